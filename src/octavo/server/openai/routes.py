"""The paths of OpenAI's interface."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.server.models import Models
from octavo.server.openai.chat import create_chat_completion
from octavo.server.openai.chat_schema import ChatCompletion, ChatRequest
from octavo.server.openai.completions import create_completion
from octavo.server.openai.completions_schema import Completion, CompletionRequest
from octavo.server.openai.schema import ErrorBody, ModelCard, ModelList

REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in {
        400: "The request is wrong; the message says what and what to do.",
        401: "There is no API key, or a wrong one.",
        403: "The request is for another host than this one.",
        404: "There is no such model.",
        408: "The body did not come in time.",
        413: "The body is too large.",
        429: "Too many requests at once.",
        503: "The model cannot answer now.",
    }.items()
}


def openai_routes(models: Models) -> APIRouter:
    """The paths, answered with these models."""
    router = APIRouter(prefix="/v1", tags=["openai"])

    @router.get("/models", summary="The models", responses=REFUSALS)
    async def list_models() -> ModelList:
        return ModelList(data=[_card(models, name) for name in models.names])

    @router.get("/models/{model:path}", summary="One model", responses=REFUSALS)
    async def retrieve_model(model: str) -> ModelCard:
        models.check_name(model)
        return _card(models, model)

    @router.post(
        "/chat/completions",
        summary="Answer messages",
        response_model=None,
        responses={**REFUSALS, 200: generated(ChatCompletion)},
    )
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        return await create_chat_completion(models, request, body)

    @router.post(
        "/completions",
        summary="Go on from text",
        response_model=None,
        responses={**REFUSALS, 200: generated(Completion)},
    )
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await create_completion(models, request, body)

    return router


def generated(kind: type) -> dict[str, Any]:
    """An answer that is one object, or with `stream` a stream of events."""
    return {
        "model": kind,
        "description": "The answer: one object, or with `stream` server-sent events.",
        "content": {"text/event-stream": {"schema": {"description": "Events whose data is JSON."}}},
    }


def _card(models: Models, name: str) -> ModelCard:
    model = models.loaded(name)
    return ModelCard(
        id=name,
        created=models.created,
        max_context_tokens=None if model is None else model.engine.context,
        loaded=model is not None,
    )
