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


@pytest.mark.parametrize(
    ("fields", "priority", "disk"),
    [
        ({}, 0, True),
        ({"prompt_cache_retention": "in_memory"}, 0, False),
        ({"prompt_cache_retention": "24h"}, 2, True),
        ({"prompt_cache_options": {"mode": "implicit"}}, 0, True),
        ({"prompt_cache_options": {"ttl": "30m"}}, 1, True),
        ({"prompt_cache_options": {"ttl": "12h"}, "prompt_cache_retention": "in_memory"}, 2, False),
    ],
)
def test_how_long_openai_asks_to_keep(fields: dict[str, Any], priority: int, disk: bool) -> None:
    request = ChatRequest.model_validate({"model": "m", "messages": HI, **fields})
    assert (request.priority, request.disk) == (priority, disk)
