"""Requests made from the server's own document, right and wrong ones: none fails it, and answers are as described.

`make fuzz` sends many times as many.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from .conftest import PATIENCE_S, Served, served

NUM_EXAMPLES = int(os.environ.get("OCTAVO_FUZZ_EXAMPLES", "12"))
SHORT = {
    "/completion": "n_predict",
    "/infill": "n_predict",
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def fast(tiny: str) -> Iterator[Served]:
    with served("--kv-memory", "256MiB", model=tiny) as server:
        yield server
        assert server.stop() == 0
        errors = [line for line in server.lines if line["level"] == "error"]
        assert not errors, json.dumps(errors[0])


@pytest.fixture
def document(fast: Served) -> Any:
    schema = schemathesis.openapi.from_url(f"{fast.url}/openapi.json", config=SchemathesisConfig())

    @schema.hook
    def map_body(context: Any, body: Any) -> Any:
        """A model that exists and short answers, or nothing behind the first check would be reached."""
        if isinstance(body, dict):
            if isinstance(body.get("model"), str):
                body["model"] = "tiny"
            short = SHORT.get(context.operation.path)
            if short is not None and not isinstance(body.get(short), str | list | dict | bool):
                value = body.get(short) or 4
                body[short] = 4 if value in (-1, -2) else min(value, 4)  # those would fill the window
        return body

    return schema


def test_no_request_fails_the_server(document: Any) -> None:
    """As many right and as many wrong requests to each operation; all failures are told together."""
    failures = []
    num_requests = 0
    for found in document.get_all_operations():
        operation = found.ok()
        for mode in GenerationMode:

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(
                max_examples=NUM_EXAMPLES,
                database=None,
                derandomize=NUM_EXAMPLES < 100,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate],
            )
            def send(case: Any) -> None:
                nonlocal num_requests
                num_requests += 1
                case.call_and_validate(checks=CHECKS, timeout=PATIENCE_S)

            try:
                send()
            except Unsatisfiable:  # there is no wrong way to ask, as for a path without parameters
                continue
            except (Exception, BaseExceptionGroup) as error:
                told = error.exceptions if isinstance(error, BaseExceptionGroup) else [error]
                failures += [f"{operation.label}, {mode.value}: {one!r} {one}"[:2000] for one in told]
                print(*failures[-len(told) :], sep="\n\n")
    assert not failures, "\n\n".join(failures)
    assert num_requests >= 10 * NUM_EXAMPLES
    print(f"{num_requests} requests")
