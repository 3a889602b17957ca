"""The paths of responses and conversations."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from octavo.server.http import JsonReply, visit_of
from octavo.server.openai.responses import Responses, listed
from octavo.server.openai.responses_schema import (
    Conversation,
    ConversationRequest,
    Deleted,
    ItemList,
    ResponseObject,
    ResponseRequest,
)
from octavo.server.openai.routes import REFUSALS, generated
from octavo.server.problems import Problem

Order = Literal["asc", "desc"]
Limit = Annotated[int, Query(ge=1, le=100)]


def responses_routes(responses: Responses) -> APIRouter:
    """The paths, answered by these responses."""
    router = APIRouter(prefix="/v1", tags=["openai"], responses=REFUSALS)

    def tenant(request: Request) -> str:
        return visit_of(request).tenant.namespace

    @router.post(
        "/responses",
        summary="Make a response",
        response_model=None,
        responses={200: generated(ResponseObject)},
    )
    async def create(request: Request, body: ResponseRequest) -> Response:
        return await responses.create(request, body)

    # Written by `JsonReply`, as strings of a caller's may hold what is not valid Unicode.
    one: dict[str, Any] = {
        "response_model": None,
        "responses": {200: {"model": ResponseObject, "description": "The response."}},
    }
    page: dict[str, Any] = {
        "response_model": None,
        "responses": {200: {"model": ItemList, "description": "A page of items."}},
    }

    @router.get("/responses/{response_id}", summary="A response that was kept", **one)
    async def retrieve(request: Request, response_id: str, stream: bool = False) -> Response:
        if stream:
            raise Problem(
                400,
                "A response that was kept is not streamed. Ask for it without stream.",
                "invalid_value",
                "stream",
            )
        return JsonReply((await responses.find(tenant(request), response_id)).response)

    @router.delete("/responses/{response_id}", summary="Forget a response")
    async def delete(request: Request, response_id: str) -> Deleted:
        return Deleted(**await responses.delete(visit_of(request), response_id))

    @router.post("/responses/{response_id}/cancel", summary="End a response in the background", **one)
    async def cancel(request: Request, response_id: str) -> Response:
        return JsonReply(await responses.cancel(tenant(request), response_id))

    @router.get("/responses/{response_id}/input_items", summary="What a response answered", **page)
    async def input_items(
        request: Request, response_id: str, order: Order = "desc", after: str | None = None, limit: Limit = 20
    ) -> Response:
        kept = await responses.find(tenant(request), response_id)
        return JsonReply(listed(kept.items, order=order, after=after, limit=limit))

    @router.post("/conversations", summary="Begin a conversation")
    async def create_conversation(request: Request, body: ConversationRequest) -> Conversation:
        return Conversation(**await responses.create_conversation(tenant(request), body))

    @router.get("/conversations/{conversation_id}", summary="A conversation")
    async def conversation(request: Request, conversation_id: str) -> Conversation:
        return Conversation(**(await responses.find_conversation(tenant(request), conversation_id)).as_json())

    @router.delete("/conversations/{conversation_id}", summary="Forget a conversation")
    async def delete_conversation(request: Request, conversation_id: str) -> Deleted:
        return Deleted(**await responses.delete_conversation(visit_of(request), conversation_id))

    @router.get("/conversations/{conversation_id}/items", summary="What was said in a conversation", **page)
    async def items(
        request: Request,
        conversation_id: str,
        order: Order = "desc",
        after: str | None = None,
        limit: Limit = 20,
    ) -> Response:
        kept = await responses.find_conversation(tenant(request), conversation_id)
        return JsonReply(listed(kept.items, order=order, after=after, limit=limit))

    return router
