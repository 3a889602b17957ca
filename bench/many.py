"""Many conversations in memory for a few: all finish, with the tokens of the same conversation alone, in the budget.

    python bench/many.py [--model smollm2] [--conversations 64] [--turns 4] [--memory-for 12]

Every conversation asks again as soon as it has its answer. Told are the turns that finished, how many answers differ
from those of the same conversation alone, the anonymous memory over what the loaded model takes beside what the budget
and the declared workspace allow, and what pressure did. The disk tier is off: what leaves memory is computed again.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import random
import time

from agents import budget
from working_set import anonymous_bytes

from octavo import Engine
from octavo.engine.messages import Delta

SYSTEM, QUESTION, ANSWER = 96, (20, 120), 32


async def converse(engine: Engine, number: int, turns: int, namespace: str = "") -> list[tuple[int, ...]]:
    """One conversation of random tokens; its answers."""
    chance = random.Random(number)
    vocabulary = range(200, len(engine.tokenizer))
    prompt, answers = random.Random(-1).choices(vocabulary, k=SYSTEM), []
    for _ in range(turns):
        prompt += chance.choices(vocabulary, k=chance.randint(*QUESTION))
        options = {"temperature": 0.8, "seed": number, "ignore_eos": True, "cache_namespace": namespace}
        async for event in engine.astream(prompt, max_tokens=ANSWER, **options):
            if isinstance(event, Delta) and event.reply is not None:
                answers.append(event.reply.token_ids)
        prompt += answers[-1]
    return answers


async def watched(done: asyncio.Event) -> int:
    """The most anonymous memory that was seen."""
    peak = 0
    while not done.is_set():
        peak = max(peak, anonymous_bytes())
        await asyncio.sleep(0.01)
    return peak


async def together(engine: Engine, arguments: argparse.Namespace) -> tuple[list[list[tuple[int, ...]]], int]:
    done = asyncio.Event()
    watch = asyncio.ensure_future(watched(done))
    answers = await asyncio.gather(
        *(converse(engine, number, arguments.turns) for number in range(arguments.conversations))
    )
    done.set()
    return answers, await watch


async def alone(engine: Engine, arguments: argparse.Namespace) -> list[list[tuple[int, ...]]]:
    """One after the other, each with nothing of anybody else's to reuse."""
    return [
        await converse(engine, number, arguments.turns, f"alone {number}")
        for number in range(arguments.conversations)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument(
        "--memory-for", type=int, default=12, help="conversations that the budget holds at their end"
    )
    arguments = parser.parse_args()
    final = SYSTEM + arguments.turns * (sum(QUESTION) // 2 + ANSWER)
    with Engine(arguments.model, kv_memory="256MiB", kv_disk=0) as engine:
        memory_bytes = budget(engine, arguments.memory_for * final)
    with Engine(arguments.model, kv_memory=memory_bytes, kv_disk=0) as engine:
        engine.generate([1, 2, 3], max_tokens=2)
        engine.clear()
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        base, began = anonymous_bytes(), time.perf_counter()
        answers, peak = asyncio.run(together(engine, arguments))
        seconds = time.perf_counter() - began
        engine.check_integrity()
        memory, counters = engine.memory(), engine.counters()
        expected = asyncio.run(alone(engine, arguments))
    num_answers = sum(map(len, answers))
    num_other = sum(
        a != b for one, two in zip(answers, expected, strict=True) for a, b in zip(one, two, strict=True)
    )
    print(
        f"{arguments.conversations} conversations of {arguments.turns} turns, about {final} tokens each at their end, "
        f"memory for {arguments.memory_for}: {num_answers} answers in {seconds:.0f} s, {num_other} other than alone"
    )
    print(
        f"anonymous memory {(peak - base) / 2**20:.1f} MiB; budget {memory.kv_budget_bytes / 2**20:.1f} and workspace "
        f"{memory.workspace_bytes / 2**20:.1f}; {counters.num_preempted} preemptions, {counters.num_evicted:,} blocks "
        f"evicted; held by running sequences afterwards: {memory.kv_used_bytes} bytes"
    )


if __name__ == "__main__":
    main()
