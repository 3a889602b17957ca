"""The engine of this process as the benchmarks see it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence

from octavo.cli.bench_workloads import Figure, Generate, Stamps
from octavo.config import SamplingParams
from octavo.engine.core import EngineCore
from octavo.engine.engine import TokenEngine
from octavo.engine.messages import Delta, Failure, Request
from octavo.errors import EngineError


def generator(engine: TokenEngine) -> Generate:
    """The engine as the workloads see it.

    Whole runs happen on the engine's own thread, where the times are taken as well: a second thread would wait for
    a core that computes.
    """

    def generate(prompts: Sequence[list[int]], num_tokens: Sequence[int]) -> Stamps:
        requests = [
            Request(f"bench-{i}", tuple(ids), SamplingParams(max_tokens=count, ignore_eos=True))
            for i, (ids, count) in enumerate(zip(prompts, num_tokens, strict=True))
        ]
        return engine._ask(lambda: _drive(engine._core, requests))

    return generate


def _drive(core: EngineCore, requests: Sequence[Request]) -> Stamps:
    stamps: dict[str, list[float]] = {request.request_id: [] for request in requests}
    start = time.perf_counter()
    for request in requests:
        core.add(request)
    while core.has_work:
        events = core.step()
        now = time.perf_counter() - start
        for event in events:
            if isinstance(event, Failure):
                raise event.error
            if isinstance(event, Delta):
                stamps[event.request_id] += [now] * len(event.token_ids)
    return list(stamps.values())


def first_token_of_a_process(model: str, options: Sequence[str], repeats: int) -> Figure:
    """Seconds from the start of a process to the first text it prints, the first and unmeasured one apart.

    Raises:
        EngineError: the process fails; the message has what it said.
    """
    command = [sys.executable, "-m", "octavo.cli.main", "run", model, "Hello", "--max-tokens", "8", *options]
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            seconds.append(time.perf_counter() - start)
            said = process.communicate()[1].decode(errors="replace")
        if process.returncode:
            raise EngineError(f"`octavo run {model}` ended with code {process.returncode}: {said.strip()}")
    return Figure("process start to first token", "s", tuple(seconds[1:]))
