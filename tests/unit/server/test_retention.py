"""What requests say of keeping, as a priority in the cache."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.server.anthropic.convert import job_of
from octavo.server.anthropic.schema import MessagesRequest
from octavo.server.openai.chat_schema import ChatRequest

HOUR, SHORT = {"type": "ephemeral", "ttl": "1h"}, {"type": "ephemeral"}
HI = [{"role": "user", "content": "Hi"}]


def marked(mark: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": mark}]}]


@pytest.mark.parametrize(
    ("body", "priority"),
    [
        ({"messages": HI}, 0),
        ({"messages": marked(SHORT)}, 1),
        ({"messages": marked(HOUR)}, 2),
        ({"messages": HI, "cache_control": SHORT}, 1),
        ({"messages": marked(SHORT), "system": [{"type": "text", "text": "S", "cache_control": HOUR}]}, 2),
        ({"messages": HI, "tools": [{"name": "f", "input_schema": {}, "cache_control": HOUR}]}, 2),
    ],
)
def test_the_longest_mark_counts(body: dict[str, Any], priority: int) -> None:
    request = MessagesRequest.model_validate({"model": "m", "max_tokens": 1, **body})
    assert job_of(request, "").priority == priority


@pytest.mark.parametrize(("retention", "priority"), [(None, 0), ("in_memory", 0), ("24h", 2)])
def test_a_day_in_the_cache(retention: str | None, priority: int) -> None:
    body = {"model": "m", "messages": HI, "prompt_cache_retention": retention}
    assert ChatRequest.model_validate(body).priority == priority
