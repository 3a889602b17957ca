"""The extra field `octavo` of answers, and what the log says of a request."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from octavo.engine.messages import Reply
from octavo.server.chat.prompt import Prompt
from octavo.server.gate import Visit
from octavo.server.schema import OctavoOptions


def octavo_report(reply: Reply, prompt: Prompt | None) -> dict[str, Any]:
    """What was reused, and why not more; `OctavoReport` as JSON values."""
    return {
        "history": None if prompt is None else prompt.history,
        "num_history_tokens": 0 if prompt is None else prompt.num_exact_tokens,
        "conversation": reply.conversation,
        "cached_tokens": reply.usage.cached_tokens,
        "loaded_tokens": reply.usage.loaded_tokens,
        "computed_tokens": reply.usage.computed_tokens,
        "approximate_tokens": reply.usage.approximate_tokens,
        "why": None if reply.why is None else asdict(reply.why),
        "ttft_s": reply.timings.ttft_s,
        "queue_s": reply.timings.queue_s,
        "total_s": reply.timings.total_s,
        "exact": reply.exact,
        "seed": reply.seed,
        "notes": list(reply.notes),
    }


def report_field(options: OctavoOptions | None, reply: Reply, prompt: Prompt) -> dict[str, Any]:
    """The field `octavo` of an answer, if the request asked for it."""
    return {"octavo": octavo_report(reply, prompt)} if options is not None and options.reports else {}


def note_reply(visit: Visit, model: str, reply: Reply, prompt: Prompt | None = None) -> None:
    """Counts an answer, and adds it to the line that the log will have."""
    visit.metrics.note(model, reply, None if prompt is None else prompt.history)
    visit.fields |= {
        "model": model,
        "prompt_tokens": reply.usage.prompt_tokens,
        "cached_tokens": reply.usage.cached_tokens,
        "completion_tokens": reply.usage.completion_tokens,
        "history": None if prompt is None else prompt.history,
        "why": None if reply.why is None else reply.why.cause,
        "ttft_ms": round(1000 * reply.timings.ttft_s, 1),
        "queue_ms": round(1000 * reply.timings.queue_s, 1),
    }
