"""The paths of the dashboard: two pages, what they are made of, their events, and what can be done."""

from __future__ import annotations

import asyncio
import mimetypes
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.server.dashboard.feed import Feed
from octavo.server.engines import ServedEngine
from octavo.server.http import JsonReply, event_stream, sse_json, visit_of
from octavo.server.models import Models
from octavo.server.openai.routes import REFUSALS
from octavo.server.openai.schema import ErrorBody
from octavo.server.problems import Problem, openai_error
from octavo.server.schema import Schema
from octavo.server.tenants import METRICS

_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Given(Schema):
    """What was done: bytes of memory that went back to the system, or tokens that are held."""

    bytes: int = 0
    tokens: int = 0


def dashboard_routes(models: Models, feed: Feed) -> APIRouter:
    """The paths, showing and changing these models."""
    not_loaded = {"model": ErrorBody, "description": "The model is not loaded, so it has nothing in memory."}
    router = APIRouter(tags=["dashboard"], responses={**REFUSALS, 409: not_loaded})

    @router.get("/", include_in_schema=False)
    async def dashboard() -> Response:
        return _asset("dashboard.html")

    @router.get("/chat", include_in_schema=False)
    async def chat() -> Response:
        return _asset("chat.html")

    @router.get("/dashboard/assets/{name:path}", include_in_schema=False)
    async def asset(name: str) -> Response:
        return _asset(name)

    @router.get("/dashboard/state", summary="What the engines hold and do now, as far as it is the key's own")
    async def state(request: Request) -> Response:
        return JsonReply(await feed.state(visit_of(request).tenant))

    @router.get("/dashboard/events", include_in_schema=False)
    async def events(request: Request) -> Response:
        """`/dashboard/state` as server-sent events: first all of it, then what changes. It has no end."""
        stream = feed.events(visit_of(request).tenant)
        return await event_stream(request, stream, lambda problem: sse_json(openai_error(problem), "error"))

    @router.delete("/dashboard/cache", summary="Forget the keys and values of this key")
    async def clear(request: Request, model: str | None = None) -> Given:
        """In memory and on disk. Texts that are kept stay; so does what running requests hold, until they end."""
        actor, engine = _actor(request), await _engine(models, model, request)
        return Given(bytes=await asyncio.to_thread(engine.forget, actor))

    @router.delete("/dashboard/conversations/{name}", summary="Forget a conversation's keys and values")
    async def drop(request: Request, name: str, model: str | None = None) -> Given:
        """Those that no other conversation has, in memory and on disk."""
        actor, engine = _actor(request), await _engine(models, model, request)
        return Given(bytes=await asyncio.to_thread(engine.drop_conversation, name, cache_namespace=actor))

    @router.put("/dashboard/conversations/{name}/pin", summary="Hold a conversation in memory")
    async def pin(request: Request, name: str, model: str | None = None) -> Given:
        """Its blocks are not evicted, nor are those of its next turns."""
        actor, engine = _actor(request), await _engine(models, model, request)
        return Given(tokens=await asyncio.to_thread(engine.pin_conversation, name, cache_namespace=actor))

    @router.delete("/dashboard/conversations/{name}/pin", summary="Let go of a conversation")
    async def unpin(request: Request, name: str, model: str | None = None) -> Given:
        actor, engine = _actor(request), await _engine(models, model, request)
        await asyncio.to_thread(engine.unpin_conversation, name, cache_namespace=actor)
        return Given()

    return router


async def _engine(models: Models, name: str | None, request: Request) -> ServedEngine:
    """The engine of a loaded model, held until the request has been answered."""
    name = name or models.names[0]
    models.check_name(name)
    if models.loaded(name) is None:
        raise Problem(
            409,
            f"The model {name!r} is not loaded, so it has nothing in memory. Ask it something first.",
            "not_loaded",
        )
    return (await models.hold(name, visit_of(request))).engine


def _actor(request: Request) -> str:
    """The namespace of who acts, on what is its own alone."""
    tenant = visit_of(request).tenant
    if tenant is METRICS:
        raise Problem(403, "The key of the metrics changes nothing. Use the key of a tenant.", "wrong_key")
    return tenant.namespace


@cache
def _assets() -> dict[str, bytes]:
    folder = files("octavo.server.dashboard") / "assets"
    found = {item.name: item.read_bytes() for item in folder.iterdir() if item.is_file()}
    vendor = folder / "vendor"
    return found | {f"vendor/{item.name}": item.read_bytes() for item in vendor.iterdir() if item.is_file()}


def _asset(name: str) -> Response:
    content = _assets().get(name)
    if content is None:
        raise Problem(404, f"The dashboard has no file {name[:80]!r}.", "unknown_path")
    kind = mimetypes.guess_type(name)[0] or "text/plain"
    return Response(content, media_type=kind, headers=_HEADERS)
