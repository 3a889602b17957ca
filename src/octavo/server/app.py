"""The application: paths, and how errors are told."""

from __future__ import annotations

import logging
import re
import threading
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import APIKeyHeader, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from octavo.server.anthropic.routes import anthropic_routes
from octavo.server.background import Background
from octavo.server.dashboard.feed import Feed
from octavo.server.dashboard.routes import dashboard_routes
from octavo.server.forget import kept_routes
from octavo.server.gate import Gate
from octavo.server.http import ClientGone, JsonReply, visit_of
from octavo.server.infill.routes import infill_routes
from octavo.server.log import log
from octavo.server.models import Models
from octavo.server.openai.responses import Responses
from octavo.server.openai.responses_routes import responses_routes
from octavo.server.openai.routes import REFUSALS, openai_routes
from octavo.server.problems import Problem, error_body, problem_of
from octavo.server.recent import recent_routes
from octavo.server.schema import Schema
from octavo.server.settings import ServerSettings
from octavo.server.tenants import Keys

_CLIENT_GONE = 499
_KIND = re.compile(r"^(str|int|system|developer|user|assistant|tool)$|[\[\]A-Z(]")
"""Parts of a place that name the kind of a value and not a field."""


class Health(Schema):
    status: str


def create_app(
    models: Models,
    settings: ServerSettings,
    keys: Keys,
    stopping: threading.Event | None = None,
    background: Background | None = None,
) -> ASGIApp:
    """The server as an ASGI application.

    `stopping` ends the streams that have no end of their own, and `background` has what is still made for requests
    that have been answered.
    """
    background = Background() if background is None else background
    app = FastAPI(
        title="Octavo",
        version=version("octavo"),
        summary="Language models whose every token is computed once, by OpenAI's, Anthropic's, llama.cpp's interfaces.",
        docs_url=None,
        redoc_url=None,
        dependencies=[
            Security(HTTPBearer(auto_error=False)),
            Security(APIKeyHeader(name="x-api-key", auto_error=False)),
        ],
    )
    app.include_router(openai_routes(models))
    app.include_router(anthropic_routes(models))
    responses = Responses(models, settings, background)
    app.include_router(responses_routes(responses))
    app.include_router(infill_routes(models))
    app.include_router(kept_routes(models, responses))
    app.include_router(recent_routes(models))
    app.include_router(dashboard_routes(models, Feed(models, keys, stopping or threading.Event())))

    @app.get("/health", summary="Whether the process is alive", tags=["operation"], responses=REFUSALS)
    async def health() -> Health:
        return Health(status="ok")

    @app.get("/ready", summary="Whether requests would be answered", tags=["operation"], responses=REFUSALS)
    async def ready() -> Health:
        models.check()
        return Health(status="ok")

    @app.get(
        "/metrics",
        summary="Counters for Prometheus",
        tags=["operation"],
        response_class=PlainTextResponse,
        responses=REFUSALS,
    )
    async def metrics() -> Response:
        return Response(await gate.metrics.read(), media_type="text/plain; version=0.0.4; charset=utf-8")

    for kind in (RequestValidationError, HTTPException, Exception, Problem, ClientGone):
        app.add_exception_handler(kind, _tell)
    document = app.openapi

    def openapi() -> dict[str, Any]:
        """The document without the answer 422, which FastAPI adds and this server does not give."""
        described = document()
        for path in described["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return described

    app.openapi = openapi  # type: ignore[method-assign]
    gate = Gate(app, settings, keys, models.engines, background)
    if not settings.origins:
        return gate
    # Browsers ask before they send, without a key, so this comes before the gate.
    origins = ["*"] if "*" in settings.origins else list(settings.origins)
    return CORSMiddleware(
        gate, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["x-request-id"]
    )


async def _tell(request: Request, error: Exception) -> Response:
    """The answer to a request that ended in an error."""
    visit = visit_of(request)
    if isinstance(error, ClientGone):
        visit.fields["gone"] = True
        return Response(status_code=_CLIENT_GONE)
    problem = _problem(error)
    if problem.status == 500:
        log("request failed", logging.ERROR, error=error, request_id=visit.request_id)
    body = error_body(problem, request.url.path, visit.request_id)
    visit.fields["code"] = problem.code
    return JsonReply(body, status_code=problem.status, headers=problem.headers)


def _problem(error: Exception) -> Problem:
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, HTTPException):
        message = {
            404: "There is no such path. The server's document is at /openapi.json.",
            405: "The path does not take this method.",
        }.get(error.status_code, f"{error.detail}.")
        code = {404: "unknown_path", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
        return Problem(error.status_code, message, code, headers=dict(error.headers or {}))
    return problem_of(error)


def _invalid(error: RequestValidationError) -> Problem:
    """The first thing that is wrong with a body, in a sentence.

    Where a field may be one of several kinds, each kind has its complaint. The one that got furthest is meant.
    """
    errors = error.errors()
    first = max(errors, key=lambda one: len(one["loc"]))
    place = [str(part) for part in first["loc"] if part != "body" and not _KIND.search(str(part))]
    said = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return Problem(400, f"The body is not valid JSON: {reason}.", "invalid_json")
    if not place:
        said = {
            "missing": "The body is missing; send a JSON object.",
            "model_attributes_type": "The body must be a JSON object, sent with Content-Type: application/json.",
        }.get(first["type"], f"{said}.")
        return Problem(400, said, "invalid_value")
    return Problem(400, f"{'.'.join(place)}: {said}.", "invalid_value", ".".join(place))
