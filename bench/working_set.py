"""A working set three times the cache's budget: conversations visited at random, with the disk tier on and off.

    python bench/working_set.py [--model smollm2] [--budget 32MiB] [--conversations 16] [--visits 64]

For each it prints the share of reusable tokens that were reused, the anonymous memory over what the loaded model
takes beside what the budget and the declared workspace allow, and the time of steps.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import os
import pydoc_data.topics
import random
import re
import statistics
import tempfile
import time
from pathlib import Path


def anonymous_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def measure(arguments: argparse.Namespace, kv_disk: str, results: multiprocessing.SimpleQueue) -> None:
    from octavo import Engine
    from octavo.engine.messages import Delta, Event

    rng = random.Random(0)
    with Engine(arguments.model, kv_memory=arguments.budget, kv_disk=kv_disk) as engine:
        topics = pydoc_data.topics.topics
        ids = engine.tokenizer.encode("\n\n".join(topics[key] for key in sorted(topics)))
        memory = engine.memory()
        length = 3 * memory.kv_budget_bytes // memory.kv_bytes_per_token // arguments.conversations
        histories = [ids[i * len(ids) // 32 :][: length - 200] for i in range(arguments.conversations)]
        fresh = iter(range(len(ids) // 2, len(ids), 8))
        engine.generate(ids[:3], max_tokens=2)
        engine.clear()
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        base, peak = anonymous_bytes(), 0
        reusable = reused = 0
        steps: list[float] = []
        step = engine._core.step
        begun: set[str] = set()

        def timed() -> list[Event]:
            began = time.perf_counter()
            events = step()
            for event in events:
                if isinstance(event, Delta) and event.request_id in begun:  # not the step that ends a prefill
                    steps.append(time.perf_counter() - began)
                if isinstance(event, Delta):
                    begun.add(event.request_id)
            return events

        engine._core.step = timed
        visits = list(range(arguments.conversations))
        visits += [rng.randrange(arguments.conversations) for _ in range(arguments.visits)]
        for number, visit in enumerate(visits):
            history = histories[visit]
            start = next(fresh)
            prompt = history + ids[start : start + 8]
            reply = engine.generate(prompt, max_tokens=16, ignore_eos=True)
            if number >= arguments.conversations:
                reusable += len(history) - 1
                reused += min(reply.usage.cached_tokens, len(history) - 1)
            histories[visit] = prompt + list(reply.token_ids)
            peak = max(peak, anonymous_bytes())
        memory = engine.memory()
        results.put(
            {
                "disk": kv_disk,
                "reused": reused / reusable,
                "anonymous_mib": (peak - base) / 2**20,
                "allowed_mib": (memory.kv_budget_bytes + memory.workspace_bytes) / 2**20,
                "step_p50_ms": statistics.median(steps) * 1e3,
                "step_p99_ms": sorted(steps)[len(steps) * 99 // 100] * 1e3,
                "num_dropped": memory.disk.num_dropped,
            }
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--budget", default="32MiB")
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--visits", type=int, default=64)
    arguments = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    print("disk    reused   anonymous / allowed MiB   decode step p50, p99 ms   dropped")
    for kv_disk in ("1GiB", "0"):
        results = spawn.SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            os.environ["OCTAVO_CACHE"] = folder
            process = spawn.Process(target=measure, args=(arguments, kv_disk, results))
            process.start()
            process.join()
        if process.exitcode:
            raise SystemExit(process.exitcode)
        row = results.get()
        print(
            f"{kv_disk:6} {row['reused']:7.1%} {row['anonymous_mib']:11.1f} / {row['allowed_mib']:7.1f}      "
            f"{row['step_p50_ms']:8.2f} {row['step_p99_ms']:8.2f}   {row['num_dropped']:7}"
        )


if __name__ == "__main__":
    main()
