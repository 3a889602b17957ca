"""What a benchmark ran on."""

from __future__ import annotations

import os
import platform
import statistics
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import psutil
import torch

from octavo import _native
from octavo.kernels.native import select_isa
from octavo.models.check import cpu

_READ_BYTES, _PAGE_BYTES, _READS = 256 << 20, 64 << 10, 5


def machine() -> dict[str, Any]:
    """JSON values: processor, memory, versions, and how fast its memory can be read now."""
    name, _ = cpu()
    return {
        "cpu": name,
        "usable_cpus": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "isa": select_isa(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
        "octavo": version("octavo"),
        "torch": torch.__version__,
        "read_gbps": round(read_gbps(torch.get_num_threads()), 1),
    }


def read_gbps(threads: int) -> float:
    """Gigabytes a second at which `threads` threads read memory that no processor cache holds."""
    memory = torch.zeros(_READ_BYTES, dtype=torch.uint8)
    offsets = np.arange(0, _READ_BYTES, _PAGE_BYTES, dtype=np.int64)
    seconds = []
    for _ in range(_READS):
        start = time.perf_counter()
        _native.read_pages(memory.data_ptr(), offsets, _PAGE_BYTES, threads)
        seconds.append(time.perf_counter() - start)
    return _READ_BYTES / statistics.median(seconds) / 1e9
