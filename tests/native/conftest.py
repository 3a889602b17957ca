"""Kernels under test: which build of them, and a workspace in which no mistake can hide."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch  # first: the native module then shares torch's OpenMP runtime

# `make sanitize` builds the module a second time; that copy then takes the installed one's place.
if folder := os.environ.get("OCTAVO_TEST_NATIVE"):
    (path,) = Path(folder).glob("_native.*")
    spec = importlib.util.spec_from_file_location("octavo._native", path)
    sys.modules["octavo._native"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["octavo._native"])

from octavo import _native
from octavo.kernels.native import NativeKernels


@pytest.fixture(params=["generic", "avx2", "avx512", "avx512bf16"])
def isa(request, monkeypatch):
    """Each instruction set that this CPU has."""
    try:
        _native.set_isa(request.param)
    except ValueError:
        pytest.skip(f"this CPU has no {request.param}")
    monkeypatch.setenv("OCTAVO_ISA", request.param)
    yield request.param
    _native.set_isa("")


@pytest.fixture(autouse=True)
def exact_workspace(monkeypatch):
    """Not a byte more than was asked for, and NaN in every float: overruns and reads before writes show."""

    def reserve(self, num_bytes):
        self._scratch = torch.full((num_bytes,), 0xFF, dtype=torch.uint8)
        return self._scratch

    monkeypatch.setattr(NativeKernels, "reserve", reserve)
