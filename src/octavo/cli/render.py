"""Replies, sizes and memory as text and as JSON values."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import Any

from octavo.engine.messages import MemoryReport, Reply, TokenLogprob

Decode = Callable[[int], str]


def size(num_bytes: int) -> str:
    """Bytes for a person: `257 MiB`, `1.4 GiB`."""
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if round(value) < 1000:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}" if unit != "B" and value < 9.95 else f"{value:.0f} {unit}"


def duration(seconds: float) -> str:
    """Seconds for a person: `41 ms`, `1.24 s`."""
    return f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{seconds:.2f} s"


def count(number: int, noun: str) -> str:
    """`1 token`, `1,024 tokens`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def amount(stage: str, done: int, total: int | None) -> str:
    """How far a stage has got; see `Bars`."""
    if not total:
        return ""
    if stage in ("prompt", "verify"):
        return f"{done:,} of {count(total, 'token')}"
    return f"{size(done)} of {size(total)}"


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Rows with their columns under each other, those of `right` at its right edge."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:{'>' if column in right else '<'}{widths[column]}}" for column, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]


def summary(reply: Reply, *, temperature: float) -> str:
    """One line about a reply: what was computed, how fast, and what memory is held."""
    usage, timings, memory = reply.usage, reply.timings, reply.memory
    parts = [count(usage.completion_tokens, "token")]
    if reply.why is not None and reply.why.cause == "no_cache":
        parts.append(
            f"no cache, {usage.computed_tokens:,} computed for {usage.prompt_tokens:,} of the prompt"
        )
    else:
        loaded = f" ({usage.loaded_tokens:,} from disk)" if usage.loaded_tokens else ""
        parts.append(
            f"{usage.cached_tokens:,} of {count(usage.prompt_tokens, 'prompt token')} reused{loaded}"
        )
    parts.append(f"first token {duration(timings.ttft_s)}")
    if timings.decode_tokens_per_s:
        speed = timings.decode_tokens_per_s
        parts.append(f"{speed:.0f} tok/s" if speed >= 9.95 else f"{speed:.1f} tok/s")
    parts.append(f"weights {size(memory.weights_bytes)} ({memory.weights})")
    parts.append(
        f"KV cache {size(memory.kv_allocated_bytes)} "
        f"({memory.kv_format}, {memory.kv_bytes_per_token:,} B a token)"
    )
    if temperature > 0:
        parts.append(f"seed {reply.seed}")
    return " · ".join(parts)


def ending(reply: Reply, max_tokens: int | None) -> str | None:
    """A sentence when the answer stopped before the model was done, unless a note says so."""
    num_tokens = reply.usage.completion_tokens
    if reply.finish_reason == "abort":
        return f"Stopped after {count(num_tokens, 'token')}."
    if reply.finish_reason == "length" and num_tokens == max_tokens:
        return f"The answer was cut after {count(num_tokens, 'token')} (--max-tokens)."
    return None


def memory_lines(memory: MemoryReport) -> list[str]:
    """What is held, weights apart from the cache, one line each."""
    disk = memory.disk
    rows = [
        ("Weights", size(memory.weights_bytes), memory.weights),
        ("KV cache", size(memory.kv_allocated_bytes), f"of at most {size(memory.kv_budget_bytes)}"),
        ("  in use", size(memory.kv_used_bytes), "by answers that are being written"),
        ("  reusable", size(memory.kv_reusable_bytes), "kept so that it is not computed again"),
        ("  a token", f"{memory.kv_bytes_per_token:,} B", f"in the format {memory.kv_format}"),
        ("Workspace", size(memory.workspace_bytes), ""),
    ]
    if disk.state != "off":
        what = f"of at most {size(disk.budget_bytes)}, in {disk.place}" if disk.state == "on" else disk.reason
        rows.append(("On disk", size(disk.used_bytes), what))
    return [f"{name:<11} {value:>9}  {what}".rstrip() for name, value, what in rows]


def reply_object(reply: Reply, decode: Decode) -> dict[str, Any]:
    """A reply as JSON values. `logprobs` is there only when it was asked for."""
    values: dict[str, Any] = {
        "text": reply.text,
        "token_ids": list(reply.token_ids),
        "finish_reason": reply.finish_reason,
        "usage": asdict(reply.usage),
        "why": None if reply.why is None else asdict(reply.why),
        "timings": asdict(reply.timings),
        "memory": asdict(reply.memory),
        "seed": reply.seed,
        "notes": list(reply.notes),
        "exact": reply.exact,
    }
    logprobs = reply.choices[0].logprobs
    if logprobs is not None:
        values["logprobs"] = [
            {
                **_token(entry.token_id, entry.logprob, decode),
                "top": [_token(token_id, logprob, decode) for token_id, logprob in entry.top],
            }
            for entry in logprobs
        ]
    return values


def logprob_lines(logprobs: Sequence[TokenLogprob], decode: Decode) -> list[str]:
    """One line a token: its log-probability, then the likeliest tokens in its place."""
    lines = []
    for entry in logprobs:
        others = "  ".join(f"{decode(token_id)!r} {logprob:.3f}" for token_id, logprob in entry.top)
        lines.append(f"{decode(entry.token_id)!r:<16} {entry.logprob:8.3f}  {others}".rstrip())
    return lines


def _token(token_id: int, logprob: float, decode: Decode) -> dict[str, Any]:
    # JSON has no infinity; a token that cannot be drawn has the logarithm of zero.
    known = logprob if math.isfinite(logprob) else None
    return {"token_id": token_id, "text": decode(token_id), "logprob": known}
