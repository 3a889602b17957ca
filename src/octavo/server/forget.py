"""Deleting what is kept of a tenant."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request

from octavo.server.http import visit_of
from octavo.server.models import Models
from octavo.server.openai.responses import Responses
from octavo.server.openai.routes import REFUSALS
from octavo.server.schema import Schema


class Forgotten(Schema):
    """What was deleted. `cache_bytes` of memory went back to the system; what was on disk is gone too."""

    responses: int
    transcripts: int
    cache_bytes: int


def kept_routes(models: Models, responses: Responses) -> APIRouter:
    """The path, for everything that these keep."""
    router = APIRouter(prefix="/v1/octavo", tags=["operation"], responses=REFUSALS)

    @router.delete("/kept", summary="Delete everything kept of this key")
    async def forget(request: Request) -> Forgotten:
        """Responses, conversations, histories, and keys and values in memory and on disk. Requests that are being
        answered keep what they hold until they end."""
        namespace = visit_of(request).tenant.namespace
        async with models.unchanging():  # an engine that is being unloaded writes what it holds
            engines = models.engines().values()
            cache_bytes = [await asyncio.to_thread(engine.forget, namespace) for engine in engines]
            return Forgotten(
                responses=responses.forget(namespace),
                transcripts=await asyncio.to_thread(models.forget, namespace),
                cache_bytes=sum(cache_bytes),
            )

    return router
