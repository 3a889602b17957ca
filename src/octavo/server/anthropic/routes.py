"""The paths of Anthropic's interface."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.server.anthropic.messages import count_tokens, create_message
from octavo.server.anthropic.schema import AnswerMessage, CountRequest, ErrorBody, MessagesRequest, TokenCount
from octavo.server.models import Models
from octavo.server.openai.routes import REFUSALS, generated

_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {**refusal, "model": ErrorBody} for status, refusal in REFUSALS.items()
}


def anthropic_routes(models: Models) -> APIRouter:
    """The paths, answered with these models."""
    router = APIRouter(prefix="/v1/messages", tags=["anthropic"])

    @router.post(
        "",
        summary="Answer messages",
        response_model=None,
        responses={**_REFUSALS, 200: generated(AnswerMessage)},
    )
    async def messages(request: Request, body: MessagesRequest) -> Response:
        return await create_message(models, request, body)

    @router.post("/count_tokens", summary="Count the tokens of messages", responses=_REFUSALS)
    async def count(request: Request, body: CountRequest) -> TokenCount:
        return TokenCount(**await count_tokens(models, request, body))

    return router
