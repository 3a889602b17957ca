"""`/v1/responses` and `/v1/conversations`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.background import Background
from octavo.server.chat.answer import Asked
from octavo.server.chat.messages import ChatMessage
from octavo.server.gate import Visit
from octavo.server.http import JsonReply, event_stream, sse_json, unless_gone, visit_of
from octavo.server.log import log
from octavo.server.models import Models
from octavo.server.openai.kept import KeptConversation, KeptResponse, Shelf, Trace
from octavo.server.openai.responses_convert import job_of, kept_items, messages_of, new_id
from octavo.server.openai.responses_run import ResponseRun
from octavo.server.openai.responses_schema import ConversationRequest, ResponseRequest
from octavo.server.problems import Problem, problem_of
from octavo.server.settings import ServerSettings


class Responses:
    """Makes responses and keeps them."""

    def __init__(self, models: Models, settings: ServerSettings, background: Background) -> None:
        self._models = models
        self._background = background
        disk = models.disk
        limits = settings.max_kept, settings.kept_bytes
        self.responses: Shelf[KeptResponse] = Shelf("response", *limits, disk, KeptResponse.unpacked)
        self.conversations: Shelf[KeptConversation] = Shelf(
            "dialogue", *limits, disk, KeptConversation.unpacked
        )
        models.on_cleared += [self.responses.clear, self.conversations.clear]

    async def create(self, request: Request, body: ResponseRequest) -> Response:
        """Answers, as one object, as a stream of events, or later in the background."""
        visit = visit_of(request)
        model = await self._models.hold(body.model, visit)
        namespace = visit.tenant.namespace
        conversation = await self._conversation(namespace, body)
        before = conversation or await self._previous(namespace, body)
        # What it goes on from is in what is computed and kept for it too.
        disk = body.disk and (before is None or before.disk)
        own = messages_of(body.input)
        messages = (*(before.messages if before is not None else ()), *own)
        if not messages:
            raise Problem(400, "The input has nothing to answer.", "invalid_value", "input")
        if body.background and (body.store is False or body.stream):
            raise Problem(
                400, "A response in the background is stored and not streamed.", "invalid_value", "background"
            )
        asked = await asyncio.to_thread(
            lambda: Asked(model, replace(job_of(body, messages, namespace, model.vocab_size), disk=disk))
        )
        run = ResponseRun(model, body, visit, None if conversation is None else conversation.id)
        items = kept_items(body.input)

        async def done() -> None:
            if conversation is not None:
                with suppress(Problem):  # it may have been deleted meanwhile
                    talk = await self.find_conversation(namespace, conversation.id)
                    talk.add([*items, *run.response["output"]], [*own, run.message], run.trace)
                    talk.disk &= disk
                    await self.conversations.keep(namespace, talk)
            # One in the background may have been deleted while its conversation was written.
            is_wanted = not body.background or (namespace, run.response["id"]) in self.responses
            if body.store is not False and is_wanted:
                traces = [] if run.trace is None else [run.trace]
                kept = KeptResponse(run.response, items, (*messages, run.message), traces=traces, disk=disk)
                await self.responses.keep(namespace, kept)

        if body.background:
            return self._in_background(run, asked, items, messages, visit, disk, done)
        events = _until_done(run, asked, done)
        if body.stream:
            return await event_stream(
                request, _written(events), lambda problem: sse_json(run.failed(problem), "response.failed")
            )
        await unless_gone(request, _drain(events))
        return JsonReply(run.response)

    async def find(self, namespace: str, response_id: str) -> KeptResponse:
        """A response that is kept; raises Problem if there is none."""
        self._models.check_cleared()
        return await self.responses.find(namespace, response_id)

    async def find_conversation(self, namespace: str, conversation_id: str) -> KeptConversation:
        """A conversation that is kept; raises Problem if there is none."""
        self._models.check_cleared()
        return await self.conversations.find(namespace, conversation_id)

    async def delete(self, visit: Visit, response_id: str) -> dict[str, Any]:
        """Deletes a response, and what was computed for it unless something goes on from it."""
        namespace = visit.tenant.namespace
        kept = await self.find(namespace, response_id)
        self._cancel(kept)
        await self._forget(visit, kept.traces, lambda thing: thing is kept)
        await self.responses.drop(namespace, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    async def cancel(self, namespace: str, response_id: str) -> dict[str, Any]:
        """Ends a response that is made in the background; one that has ended stays as it is."""
        kept = await self.find(namespace, response_id)
        if not kept.response["background"]:
            raise Problem(
                400,
                "Only a response that was made with background set to true can be cancelled.",
                "invalid_value",
                "response_id",
            )
        if self._cancel(kept):
            await self.responses.keep(namespace, kept)
        return kept.response

    @staticmethod
    def _cancel(kept: KeptResponse) -> bool:
        """Ends the making of a response; whether it was being made."""
        if kept.task is None or not kept.is_unfinished:
            return False
        kept.response["status"] = "cancelled"
        kept.task.cancel()
        return True

    async def create_conversation(self, namespace: str, body: ConversationRequest) -> dict[str, Any]:
        items = body.items or []
        conversation = KeptConversation(
            new_id("conv"), body.metadata or {}, kept_items(items), tuple(messages_of(items))
        )
        if not await self.conversations.keep(namespace, conversation):
            raise Problem(
                413,
                "The conversation is larger than what the server keeps. Give fewer items.",
                "body_too_large",
            )
        return conversation.as_json()

    async def delete_conversation(self, visit: Visit, conversation_id: str) -> dict[str, Any]:
        """Deletes a conversation, and what was computed for it unless something goes on from it."""
        namespace = visit.tenant.namespace
        kept = await self.find_conversation(namespace, conversation_id)
        await self._forget(
            visit,
            kept.traces,
            lambda thing: (
                thing is kept
                or (isinstance(thing, KeptResponse) and thing.conversation_id == conversation_id)
            ),
        )
        await self.conversations.drop(namespace, conversation_id)
        return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}

    def forget(self, namespace: str) -> int:
        """Drops all responses and conversations of a tenant; how many there were."""
        return self.responses.forget(namespace) + self.conversations.forget(namespace)

    async def _forget(
        self,
        visit: Visit,
        traces: Sequence[Trace],
        goes: Callable[[KeptResponse | KeptConversation], bool],
    ) -> None:
        """Drops what answers have left elsewhere, but what is left by things in memory too that do not go."""
        namespace = visit.tenant.namespace
        things: list[KeptResponse | KeptConversation] = [
            *self.responses.of(namespace),
            *self.conversations.of(namespace),
        ]
        others = [trace for thing in things if not goes(thing) for trace in thing.traces]
        kept_keys = {key for other in others for key in other.keys}
        for trace in traces:
            if trace.model not in self._models.names:
                continue
            is_kept = any(other.ids[: len(trace.ids)] == trace.ids for other in others)
            ids = trace.ids[:0] if is_kept else trace.ids
            model = await self._models.hold(trace.model, visit)
            keys = [key for key in trace.keys if key not in kept_keys]
            await asyncio.to_thread(model.forget, namespace, ids, keys)

    async def _conversation(self, namespace: str, body: ResponseRequest) -> KeptConversation | None:
        if body.conversation is None:
            return None
        if body.previous_response_id is not None:
            raise Problem(
                400,
                "Give either conversation or previous_response_id, not both.",
                "invalid_value",
                "conversation",
            )
        named = body.conversation if isinstance(body.conversation, str) else body.conversation.id
        return await self.find_conversation(namespace, named)

    async def _previous(self, namespace: str, body: ResponseRequest) -> KeptResponse | None:
        if body.previous_response_id is None:
            return None
        kept = await self.find(namespace, body.previous_response_id)
        if kept.is_unfinished:
            raise Problem(
                400,
                f"The response {body.previous_response_id!r} has not ended yet. Wait for it, or cancel it.",
                "invalid_value",
                "previous_response_id",
            )
        return kept

    def _in_background(
        self,
        run: ResponseRun,
        asked: Asked,
        items: list[dict[str, Any]],
        messages: Sequence[ChatMessage],
        visit: Visit,
        disk: bool,
        done: Callable[[], Awaitable[None]],
    ) -> Response:
        namespace = visit.tenant.namespace
        kept = KeptResponse(run.response, items, tuple(messages), disk=disk)

        async def finish() -> None:
            if (namespace, kept.id) in self.responses:  # it may have been deleted meanwhile
                await done()

        async def make() -> None:
            try:
                await self.responses.keep(namespace, kept)
                await _drain(_until_done(run, asked, finish))
            except asyncio.CancelledError:
                if kept.is_unfinished and (namespace, kept.id) in self.responses:  # nobody has cancelled it
                    kept.end_with_the_server()
                    await self.responses.keep(namespace, kept)
                raise
            except Exception as error:
                problem = problem_of(error)
                if problem.status == 500:
                    log("response failed", logging.ERROR, error=error, id=run.response["id"])
                run.failed(problem)
                if (namespace, kept.id) in self.responses:
                    await self.responses.keep(namespace, kept)

        releases, visit.releases = visit.releases, []  # the model is needed for longer than the visit

        def release(_: object) -> None:
            for one in releases:
                one()

        kept.task = self._background.start(make())
        kept.task.add_done_callback(release)
        return JsonReply(dict(run.response))


async def _until_done(
    run: ResponseRun, asked: Asked, done: Callable[[], Awaitable[None]]
) -> AsyncGenerator[dict[str, Any], None]:
    """The events of a response; it is kept before the last one is told."""
    async with aclosing(run.events(asked)) as events:
        async for event in events:
            if event["type"] in ("response.completed", "response.incomplete"):
                await done()
            yield event


async def _written(events: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        early = b""
        async for event in events:
            # What is told before the first token is held back, so that a refusal can still have a status.
            written = sse_json(event, event["type"])
            if event["type"] in ("response.created", "response.in_progress"):
                early += written
            else:
                yield early + written
                early = b""


async def _drain(events: AsyncGenerator[dict[str, Any], None]) -> None:
    async with aclosing(events):
        async for _ in events:
            pass


def listed(
    items: Sequence[dict[str, Any]], *, order: Literal["asc", "desc"], after: str | None, limit: int
) -> dict[str, Any]:
    """A page of items."""
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        places = [place for place, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise Problem(400, f"There is no item {after[:80]!r} to list from.", "invalid_value", "after")
        ordered = ordered[places[0] + 1 :]
    page = ordered[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ordered) > limit,
    }
