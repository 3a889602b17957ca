"""What a long prompt does to answers that are being written: the time between their tokens, before and during.

    python bench/gap.py smollm2 --chats 8 --prompt 6000

A gap is the time between two tokens of an answer, which is that of a step. The prompt arrives when every chat has
written `--before` tokens. Measure at ordinary priority: a system stops processes of real-time priority for 50 ms in
each second.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from octavo.config import EngineConfig, SamplingParams
from octavo.engine.core import EngineCore
from octavo.engine.engine import load_as_set
from octavo.engine.messages import Delta, Request
from octavo.kv.storage.tier import NullTier

_FIRST_ID, _LAST_ID = 100, 30_000  # special tokens are at the ends of a vocabulary


def measure(core: EngineCore, chats: int, prompt: int, before: int, seed: int) -> dict[str, float]:
    """One round; times in ms."""
    chance = random.Random(seed)

    def request(name: str, num_tokens: int, max_tokens: int) -> Request:
        ids = tuple(chance.choices(range(_FIRST_ID, _LAST_ID), k=num_tokens))
        return Request(f"{name}-{seed}", ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True))

    names = []
    for number in range(chats):
        chat = request(f"chat{number}", 120, 2_000)
        names.append(chat.request_id)
        core.add(chat)
    while core.num_prefilling:
        core.step()
    steps: list[float] = []

    def step() -> bool:
        """Whether the long prompt has its first token."""
        start = time.perf_counter()
        events = core.step()
        steps.append(1e3 * (time.perf_counter() - start))
        return any(isinstance(event, Delta) and event.request_id == f"long-{seed}" for event in events)

    for _ in range(before):
        step()
    median = statistics.median(steps)
    steps.clear()
    core.add(request("long", prompt, 2))
    while not step():
        pass
    for name in names:
        core.abort(name)
    while core.has_work:
        core.step()
    core.clear()
    ordered = sorted(steps)
    p99 = ordered[int(0.99 * (len(ordered) - 1))]
    return {
        "median before": median,
        "median": statistics.median(steps),
        "p99": p99,
        "most": ordered[-1],
        "p99 over median before": p99 / median,
        "first token": sum(steps),
        "steps": len(steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=6_000)
    parser.add_argument("--before", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step", type=int, default=EngineConfig().max_step_tokens)
    args = parser.parse_args()
    config = EngineConfig(max_step_tokens=args.step, speculate="off")  # a token a step
    core = EngineCore(load_as_set(args.model, config, None), config, 1 << 30, NullTier(), lambda work: work())
    for seed in range(args.rounds + 1):
        figures = measure(core, args.chats, args.prompt if seed else 500, args.before, seed)
        if seed:  # the first and short one warms up
            print("  ".join(f"{name} {value:,.1f}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
