"""Shared by all tests: helpers beside a test can be imported by name, and torch is loaded first."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Threads that spin while they wait slow every test down when the cores are shared.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# What one test has computed must not be found by another: tests of the disk tier ask for one, in a folder of theirs.
os.environ["OCTAVO_KV_DISK"] = "0"

import torch  # noqa: F401 (before the native module, so that both share one OpenMP runtime)
from hypothesis import HealthCheck, settings

# No test fails because the machine is busy, not even while hypothesis makes its tables of characters on a first run.
settings.register_profile("octavo", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("octavo")

sys.path.insert(0, str(Path(__file__).parent / "model"))
sys.path.insert(0, str(Path(__file__).parent / "native"))
