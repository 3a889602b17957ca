"""What became of a key's last requests."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request

from octavo.engine.journal import MAX_RECORDS
from octavo.server.http import visit_of
from octavo.server.models import Models
from octavo.server.openai.routes import REFUSALS
from octavo.server.schema import Schema, WhyReport


class RequestReport(Schema):
    """A finished request: what it reused, from where, why not more, and how long it took; see `RequestRecord` in
    octavo.engine.journal. Times are in seconds."""

    request_id: str
    model: str
    finished_s: float
    finish_reason: str
    prompt_tokens: int
    memory_tokens: int
    disk_tokens: int
    computed_tokens: int
    completion_tokens: int
    queue_s: float
    prefill_s: float
    ttft_s: float
    total_s: float
    decode_tokens_per_s: float
    why: WhyReport | None


class RequestList(Schema):
    object: Literal["list"] = "list"
    data: list[RequestReport]


def recent_routes(models: Models) -> APIRouter:
    """The path, for the journals of these models."""
    router = APIRouter(prefix="/v1/octavo", tags=["operation"], responses=REFUSALS)

    @router.get("/requests", summary="The last requests of this key, and why each did not reuse more")
    async def requests(
        request: Request, limit: Annotated[int, Query(ge=1, le=MAX_RECORDS)] = 20
    ) -> RequestList:
        tenant = visit_of(request).tenant.namespace
        records = [
            record
            for engine in models.engines().values()
            for record in await asyncio.to_thread(engine.recent, limit, tenant=tenant)
        ]
        records.sort(key=lambda record: record.finished_s, reverse=True)
        return RequestList(data=[RequestReport(**record.as_dict()) for record in records[:limit]])

    return router
