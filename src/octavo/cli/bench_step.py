"""`octavo bench step`: where the time of a step goes, beside the time that memory alone would take."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import psutil
import torch

from octavo.cli.bench_machine import read_gbps
from octavo.cli.terminal import Terminal
from octavo.config import EngineConfig, SamplingParams
from octavo.engine.core import EngineCore
from octavo.engine.messages import Request
from octavo.engine.sampler import Sample, TokenSampler
from octavo.kv.planner import default_budget_bytes
from octavo.kv.storage.tier import NullTier
from octavo.models import catalog
from octavo.models.fused import PHASES
from octavo.models.loaded import LoadedModel

_WARM_STEPS = 4


@dataclass(frozen=True, slots=True)
class StepFigure:
    """Steps of one kind.

    Attributes:
        kind: `prefill` or `decode`.
        tokens: that all its steps computed.
        total_ms: time of all its steps.
        step_ms: median time of a step.
        phases_ms: time of each part, all steps together: the fused decoder's phases, `sampling`, and `python` for
            the rest; empty when the layers run module by module.
        read_bytes: weights and cached keys and values that one step has to read at least.
        floor_ms: time to read them at the speed that was measured.
    """

    kind: str
    tokens: int
    total_ms: float
    step_ms: float
    phases_ms: dict[str, float]
    read_bytes: int
    floor_ms: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.total_ms * 1e3


@dataclass(frozen=True, slots=True)
class StepProfile:
    """What was measured. `unfused_reason` says why there are no phases."""

    model: str
    sequences: int
    figures: list[StepFigure]
    read_gbps: float
    unfused_reason: str

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def measure(
    model: str, settings: dict[str, Any], terminal: Terminal, *, tokens: int, sequences: int, steps: int
) -> StepProfile:
    """Loads a model and runs `run`, with bars while it loads."""
    catalog.resolve(model)  # a name that is wrong is told before torch is imported
    with terminal.bars() as bars:
        bars("start", 0, None)
        from octavo.engine.engine import load_as_set

        settings = {name: value for name, value in settings.items() if name not in ("kv_disk", "speculate")}
        config = EngineConfig(
            kv_memory_bytes=settings.pop("kv_memory"),
            max_running=max(16, sequences),
            speculate="off",
            **settings,
        )
        loaded = load_as_set(model, config, bars)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        return run(loaded, tokens=tokens, sequences=sequences, steps=steps, config=config)


def run(
    loaded: LoadedModel, *, tokens: int, sequences: int, steps: int, config: EngineConfig, seed: int = 0
) -> StepProfile:
    """Prefills `sequences` random prompts of `tokens` tokens, then decodes `steps` times.

    Raises:
        InvalidRequest: the prompts do not fit the model's context or the cache.
    """
    budget = config.kv_memory_bytes or default_budget_bytes(psutil.virtual_memory().available)
    core = EngineCore(loaded, config, budget, NullTier(), lambda work: work())
    chance = random.Random(seed)
    params = SamplingParams(max_tokens=steps + _WARM_STEPS + 1, temperature=0.0, ignore_eos=True)
    prompts = [tuple(chance.choices(range(core.vocab_size), k=tokens)) for _ in range(sequences)]
    # The shortest prompt there is warms everything up.
    core.add(
        Request("warm", (1,), SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True), "warm", True)
    )
    while core.has_work:
        core.step()
    for index, prompt in enumerate(prompts):
        core.add(Request(f"bench-{index}", prompt, params, "", True))
    fused = core.prepared.fused
    phases = np.zeros(len(PHASES))
    if fused is not None:
        fused.phase_s = phases
    speed = read_gbps(torch.get_num_threads())
    fixed = 0 if fused is None else fused.matrix_bytes
    cached = sequences * tokens * core.memory().kv_bytes_per_token
    figures = []
    with _timed_sampling() as sampling:
        for kind, read_bytes in (("prefill", fixed), ("decode", fixed + cached)):
            for _ in range(_WARM_STEPS if kind == "decode" else 0):
                core.step()
            phases[:] = 0
            sampling.clear()
            times: list[float] = []
            while core.num_prefilling if kind == "prefill" else len(times) < steps:
                start = time.perf_counter()
                core.step()
                times.append(time.perf_counter() - start)
            parts = dict(zip(PHASES, phases.tolist(), strict=True)) | {"sampling": sum(sampling)}
            parts["python"] = sum(times) - sum(parts.values())
            figures.append(
                StepFigure(
                    kind,
                    sequences * (tokens if kind == "prefill" else steps),
                    sum(times) * 1e3,
                    statistics.median(times) * 1e3,
                    {} if fused is None else {name: seconds * 1e3 for name, seconds in parts.items()},
                    read_bytes,
                    read_bytes / speed / 1e6,
                )
            )
    return StepProfile(loaded.name, sequences, figures, speed, core.prepared.unfused_reason)


def show(result: StepProfile, profile: bool) -> None:
    """Prints the figures as a table, and with `profile` where the time went."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(
        title=f"{result.model}, {result.sequences} at once; memory reads {result.read_gbps:.1f} GB/s"
    )
    for column in ("", "tokens", "tokens/s", "step ms", "bytes a step", "floor ms", "of floor"):
        table.add_column(column, justify="right" if column else "left")
    for figure in result.figures:
        bound = figure.kind == "decode" and figure.read_bytes > 0
        table.add_row(
            figure.kind,
            f"{figure.tokens:,}",
            f"{figure.tokens_per_s:,.1f}",
            f"{figure.step_ms:.2f}",
            f"{figure.read_bytes:,}" if bound else "",
            f"{figure.floor_ms:.2f}" if bound else "",
            f"{figure.floor_ms / figure.step_ms:.0%}" if bound else "",
        )
    console.print(table)
    if result.unfused_reason:
        console.print(
            f"The layers run module by module, so their phases are not known: {result.unfused_reason}."
        )
    elif profile:
        table = Table(title="Where the time goes")
        table.add_column("part")
        for figure in result.figures:
            table.add_column(f"{figure.kind}, ms a token", justify="right")
            table.add_column("share", justify="right")
        for name in result.figures[0].phases_ms:
            cells = []
            for figure in result.figures:
                ms = figure.phases_ms[name]
                cells += [f"{ms / figure.tokens:.3f}", f"{ms / figure.total_ms:.1%}"]
            table.add_row(name, *cells)
        console.print(table)


@contextmanager
def _timed_sampling() -> Iterator[list[float]]:
    """Seconds of every token sampled inside the block."""
    seconds: list[float] = []
    sample = TokenSampler.sample

    def timed(self: TokenSampler, logits: torch.Tensor, position: int) -> Sample:
        start = time.perf_counter()
        result = sample(self, logits, position)
        seconds.append(time.perf_counter() - start)
        return result

    TokenSampler.sample = timed  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        TokenSampler.sample = sample  # type: ignore[method-assign]
