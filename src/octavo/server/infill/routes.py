"""The paths of llama.cpp's interface."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.server.http import visit_of
from octavo.server.infill.answer import answer
from octavo.server.infill.model import fim_of, room_for
from octavo.server.infill.prompt import Gap
from octavo.server.infill.schema import InfillRequest, LlamaCompletionRequest, LlamaCompletions
from octavo.server.models import Model, Models
from octavo.server.openai.routes import REFUSALS, generated


def infill_routes(models: Models) -> APIRouter:
    """The paths, answered with these models."""
    router = APIRouter(tags=["llama.cpp"])

    @router.post(
        "/completion",
        summary="Go on from a prompt",
        response_model=None,
        responses={**REFUSALS, 200: generated(LlamaCompletions)},
    )
    async def completion(request: Request, body: LlamaCompletionRequest) -> Response:
        model = await models.hold(body.model, visit_of(request))
        prompts, several = _prompts(body)
        ids = await asyncio.to_thread(lambda: [_ids(model, prompt) for prompt in prompts])
        return await answer(model, request, body, ids, several=several)

    @router.post(
        "/infill",
        summary="Fill a gap in a text",
        response_model=None,
        responses={**REFUSALS, 200: generated(LlamaCompletions)},
    )
    async def infill(request: Request, body: InfillRequest) -> Response:
        model = await models.hold(body.model, visit_of(request))
        fim = fim_of(model, "input_suffix")
        extra = tuple((piece.filename, piece.text) for piece in body.input_extra)
        gap = Gap(body.input_prefix, body.input_suffix, body.prompt, extra)
        room = room_for(model, body.n_predict if body.n_predict >= 0 else None)
        namespace = visit_of(request).tenant.namespace
        ids = await asyncio.to_thread(fim.infill, gap, room=room, namespace=namespace)
        return await answer(model, request, body, [ids], ends=fim.tokens.ends)

    return router


def _prompts(body: LlamaCompletionRequest) -> tuple[list[str | list[int | str]], bool]:
    """The prompts, and whether they are a list. A list with a token id in it is one prompt."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt], False
    if not prompt or any(isinstance(part, int) for part in prompt):
        return [prompt], False  # type: ignore[list-item]
    return list(prompt), True  # type: ignore[arg-type]


def _ids(model: Model, prompt: str | list[int | str]) -> list[int]:
    ids: list[int] = []
    parts = [prompt] if isinstance(prompt, str) else prompt
    for number, part in enumerate(parts):
        if isinstance(part, int):
            ids.append(part)
        elif number == 0:
            ids += model.encode(part)
        else:
            ids += model.engine.tokenizer.encode(part, add_special_tokens=False)
    return ids
