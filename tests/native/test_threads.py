"""A process has one set of threads that compute, not one for each thread that ever did."""

from __future__ import annotations

import subprocess
import sys
import textwrap

PROGRAM = """
    import os, time, torch
    from octavo.kernels.native import release_threads
    from octavo.kernels.linear import PackedMatrix

    def threads():
        return len(os.listdir("/proc/self/task"))

    torch.set_num_threads(3)
    matrix = PackedMatrix.from_dense(torch.randn(512, 512), "fp32")
    matrix.multiply(torch.randn(64, 512))
    busy = threads()
    release_threads()
    end = time.monotonic() + 10
    while threads() > busy - 2 and time.monotonic() < end:
        time.sleep(0.01)
    released = threads()
    matrix.multiply(torch.randn(64, 512))
    print(busy - released, threads() - released)
"""


def test_released_threads_end_and_come_back_when_they_are_needed() -> None:
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert run.stdout.split() == ["2", "2"]
