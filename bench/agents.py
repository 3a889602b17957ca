"""Agents that wait for tools, in memory for a quarter of them: what is computed again.

    python bench/agents.py smollm2

Eight agents of one system prompt take 30 steps each: an answer, then a tool, whose result is added. Tools take 0.1 to
30 s, which is scaled. Now and then an agent's title is asked for beside it, in a request that comes once. Memory holds
the final contexts of two agents. Told are the tokens of prompts that were computed, over those that no earlier request
had: with eviction by value and the disk, and with the least recently used evicted and no disk.
"""

from __future__ import annotations

import argparse
import random
import secrets
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from octavo import Engine
from octavo.engine import cache as engine_cache
from octavo.errors import InvalidRequest
from octavo.kv import LRU
from octavo.kv.planner import plan_cache
from octavo.spec import BLOCK_SIZE

TOOL_S = (0.1, 30.0)


@dataclass
class Traffic:
    """Numbers of agents and steps, tokens of their parts, and by how much tools are faster than they would be."""

    agents: int = 8
    steps: int = 30
    system: int = 320
    task: tuple[int, int] = (60, 160)
    result: tuple[int, int] = (15, 60)
    answer: tuple[int, int] = (6, 20)
    side_every: int = 6
    side: tuple[int, int] = (100, 200)
    scale: float = 0.02
    seed: int = 0

    @property
    def final(self) -> int:
        """Tokens of an agent's last prompt, about."""
        return self.system + sum(self.task) // 2 + self.steps * (sum(self.result) + sum(self.answer)) // 2


@dataclass
class Counts:
    """Tokens of prompts: computed, those that were new, and those that came from disk; seconds until first tokens."""

    computed: int = 0
    new: int = 0
    loaded: int = 0
    side_computed: int = 0
    first_s: list[float] = field(default_factory=list)
    causes: Counter[str | None] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, reply: Any, new: int, *, side: bool = False) -> None:
        with self.lock:
            self.computed += reply.usage.computed_tokens
            self.side_computed += reply.usage.computed_tokens if side else 0
            self.new += new
            self.loaded += reply.usage.loaded_tokens
            self.first_s.append(reply.timings.ttft_s)
            self.causes[None if reply.why is None else reply.why.cause] += reply.usage.computed_tokens - new


def run(engine: Engine, traffic: Traffic) -> Counts:
    """Lets all agents take all their steps."""
    counts = Counts()
    namespace = secrets.token_hex(8)  # nothing of another run is found
    common = random.Random(traffic.seed)
    vocabulary = range(200, len(engine.tokenizer))
    system = common.choices(vocabulary, k=traffic.system)
    titles = common.choices(vocabulary, k=2 * BLOCK_SIZE)
    options: dict[str, Any] = {"cache_namespace": namespace, "ignore_eos": True, "temperature": 0.8}
    # both beginnings are read once, so that no two agents compute them at the same time
    for ids in (system, titles):
        counts.add(engine.generate(ids, max_tokens=1, **options), len(ids))

    def agent(number: int) -> None:
        chance = random.Random(f"{traffic.seed} {number}")
        prompt = [*system, *chance.choices(vocabulary, k=chance.randint(*traffic.task))]
        known, ahead = len(system), []
        for step in range(traffic.steps):
            length = chance.randint(*traffic.answer)
            reply = engine.generate(prompt, max_tokens=length, seed=chance.randrange(1 << 30), **options)
            counts.add(reply, len(prompt) - known)
            known = len(prompt) + len(reply.token_ids) - 1  # the last token was never computed
            prompt += [*reply.token_ids]
            if step % traffic.side_every == number % traffic.side_every:
                side = [*titles, *chance.choices(vocabulary, k=chance.randint(*traffic.side))]
                counts.add(engine.generate(side, max_tokens=4, **options), len(side) - len(titles), side=True)
            low, high = TOOL_S
            time.sleep(traffic.scale * low * (high / low) ** chance.random())
            ahead.append(engine.prefetch(prompt, cache_namespace=namespace))  # the tool has returned
            prompt += chance.choices(vocabulary, k=chance.randint(*traffic.result))

        for done in ahead:
            counts.add(done.result(), 0)

    threads = [threading.Thread(target=agent, args=(number,)) for number in range(traffic.agents)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.forget(namespace)
    return counts


def budget(engine: Engine, num_tokens: int) -> int:
    """Bytes with which a cache has room for so many tokens in sealed blocks, beside its open ones."""
    prepared, running = engine._core.prepared, engine.config.max_running
    for size in range(1 << 24, 1 << 40, 1 << 18):
        try:
            plan = plan_cache(prepared.spec, prepared.page_format, size, running)
        except InvalidRequest:  # too small for so many open blocks
            continue
        if plan.num_blocks * BLOCK_SIZE >= num_tokens:
            return size
    raise AssertionError("no machine has so much memory")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--memory-for", type=float, default=2.0, help="final contexts that memory holds")
    parser.add_argument("--scale", type=float, default=0.02, help="of a tool's time")
    parser.add_argument(
        "--without-lru", action="store_true", help="leave the comparison out, which takes longer"
    )
    arguments = parser.parse_args()
    traffic = Traffic(agents=arguments.agents, steps=arguments.steps, scale=arguments.scale)
    with Engine(arguments.model, kv_memory="256MiB", kv_disk=0) as engine:
        memory = budget(engine, int(arguments.memory_for * traffic.final))
    print(
        f"{traffic}\nmemory for {arguments.memory_for:g} contexts of {traffic.final:,} tokens: {memory:,} bytes"
    )
    ways: dict[str, Any] = {"by value, disk": (engine_cache.ByValue, "2GiB")}
    if not arguments.without_lru:
        ways["LRU, no disk"] = (lambda _: LRU(), 0)
    by_value = engine_cache.ByValue
    for name, (policy, disk) in ways.items():
        engine_cache.ByValue = policy  # type: ignore[misc]
        try:
            with Engine(arguments.model, kv_memory=memory, kv_disk=disk) as engine:
                began_s = time.perf_counter()
                counts = run(engine, traffic)
                seconds = time.perf_counter() - began_s
        finally:
            engine_cache.ByValue = by_value  # type: ignore[misc]
        first_s = sorted(counts.first_s)
        ratio, late = counts.computed / counts.new, int(0.95 * len(first_s))
        print(
            f"{name:15} computed {counts.computed:9,} for {counts.new:7,} new tokens: {ratio:.2f}; {counts.loaded:,} "
            f"from disk; side requests computed {counts.side_computed:,}; first token "
            f"{first_s[len(first_s) // 2]:.3f} s, 95 % {first_s[late]:.3f} s; {seconds:.0f} s in all",
            flush=True,
        )
        causes = {cause or "known": number for cause, number in counts.causes.items() if number}
        print(f"{'':15} computed beyond what was new, by cause: {causes}", flush=True)


if __name__ == "__main__":
    main()
