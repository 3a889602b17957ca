"""What becomes of responses and conversations, with answers that nothing has computed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from octavo.kv.storage.memory import MemoryStore
from octavo.kv.storage.records import Document
from octavo.kv.storage.store_tier import StoreTier
from octavo.server.background import Background
from octavo.server.chat.answer import Answer, ChatJob, Piece, ReplyPiece
from octavo.server.openai import responses, responses_run
from octavo.server.openai.responses import Responses
from octavo.server.openai.responses_schema import ConversationRequest, ResponseRequest
from octavo.server.problems import Problem
from octavo.server.settings import ServerSettings
from octavo.server.tenants import NOBODY


class Asked:
    """Answers at once. `jobs` are those that were asked of it."""

    jobs: list[ChatJob]

    def __init__(self, _: object, job: ChatJob) -> None:
        self.jobs.append(job)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        usage = SimpleNamespace(prompt_tokens=1, completion_tokens=1, cached_tokens=0, total_tokens=2)
        reply: Any = SimpleNamespace(usage=usage, token_ids=[2])
        prompt: Any = SimpleNamespace(ids=[1])
        yield ReplyPiece(reply, prompt, (Answer(0, text="Hello"),), ())


class Models:
    """No models, and a disk whose writes of conversations wait while `may_write` is clear."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.disk = StoreTier(self.store)
        self.on_cleared: list[Any] = []
        self.names: list[str] = []
        self.writes, self.may_write = threading.Event(), threading.Event()
        self.may_write.set()
        put = self.disk.put_document

        def slow_put(document: Document) -> bool:
            if document.kind == "dialogue":
                self.writes.set()
                assert self.may_write.wait(10)
            return put(document)

        self.disk.put_document = slow_put  # type: ignore[method-assign]

    def check_cleared(self) -> None:
        pass

    async def hold(self, *_: object) -> object:
        return SimpleNamespace(name="m", vocab_size=10, texts=None)

    def on_disk(self) -> set[str]:
        assert self.disk.flush(60)
        kinds = ("response", "dialogue")
        return {found.key.decode() for kind in kinds for found in self.store.documents(kind)}


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Iterator[Models]:
    monkeypatch.setattr(Asked, "jobs", [], raising=False)
    monkeypatch.setattr(responses, "Asked", Asked)
    monkeypatch.setattr(responses_run, "note_reply", lambda *_: None)
    made = Models()
    yield made
    made.disk.close(5)


class Maker:
    """Makes responses of one tenant."""

    def __init__(self, models: Any, **settings: Any) -> None:
        self.all = Responses(models, ServerSettings(**settings), Background())
        self.visit: Any = SimpleNamespace(tenant=NOBODY, fields={}, releases=[])

    async def make(self, **body: Any) -> str:
        """The id of a response, or "" where it is not stored; one in the background may not have ended."""

        async def receive() -> Any:
            await asyncio.Event().wait()

        request = Request({"type": "http", "state": {"visit": self.visit}}, receive)
        before = {kept.id for kept in self.all.responses.of("")}
        await self.all.create(request, ResponseRequest.model_validate({"model": "m", "input": "Hi", **body}))
        await asyncio.sleep(0)
        return "".join({kept.id for kept in self.all.responses.of("")} - before)

    async def talk(self) -> str:
        made = await self.all.create_conversation("", ConversationRequest())
        return str(made["id"])


def test_a_response_that_is_deleted_while_it_is_finished_stays_deleted(models: Models) -> None:
    async def run() -> None:
        maker = Maker(models)
        talk = await maker.talk()
        models.writes.clear()
        models.may_write.clear()
        made = await maker.make(conversation=talk, background=True)
        kept = await maker.all.find("", made)
        assert await asyncio.to_thread(models.writes.wait, 60)
        assert kept.response["status"] == "completed"
        await maker.all.delete(maker.visit, made)
        models.may_write.set()
        assert kept.task is not None
        await kept.task
        assert models.on_disk() == {talk}
        with pytest.raises(Problem, match="no response"):
            await maker.all.find("", made)

    asyncio.run(run())


IN_MEMORY = {"prompt_cache_retention": "in_memory"}


def test_a_conversation_that_was_asked_to_be_in_memory_stays_off_the_disk(models: Models) -> None:
    async def run() -> None:
        maker = Maker(models, max_kept=3)
        talk = await maker.talk()
        first = await maker.make(conversation=talk)
        assert models.on_disk() == {talk, first}
        await maker.make(conversation=talk, **IN_MEMORY)
        assert models.on_disk() == {first}
        await maker.make(conversation=talk)
        assert models.on_disk() == {first}
        assert [job.disk for job in Asked.jobs] == [True, False, False]
        assert len((await maker.all.find_conversation("", talk)).items) == 6
        for _ in range(3):
            await maker.talk()
        with pytest.raises(Problem, match="no dialogue"):  # instead of an older one from the disk
            await maker.all.find_conversation("", talk)

    asyncio.run(run())


def test_a_turn_in_memory_takes_back_what_an_earlier_one_still_writes(models: Models) -> None:
    async def run() -> None:
        maker = Maker(models)
        talk = await maker.talk()
        models.writes.clear()
        models.may_write.clear()
        earlier = asyncio.create_task(maker.make(conversation=talk, store=False))
        assert await asyncio.to_thread(models.writes.wait, 60)
        later = asyncio.create_task(maker.make(conversation=talk, store=False, **IN_MEMORY))
        while (await maker.all.find_conversation("", talk)).disk:
            await asyncio.sleep(0.01)
        models.may_write.set()
        await asyncio.gather(earlier, later)
        assert models.on_disk() == set()

    asyncio.run(run())


@pytest.mark.parametrize("background", [False, True])
def test_what_goes_on_from_a_response_in_memory_stays_off_the_disk(models: Models, background: bool) -> None:
    async def run() -> None:
        maker = Maker(models)
        made = await maker.make()
        kept = {made}
        for options in (IN_MEMORY, {}, {}):
            made = await maker.make(previous_response_id=made, background=background, **options)
            task = (await maker.all.find("", made)).task
            if task is not None:
                await task
        assert models.on_disk() == kept
        assert [job.disk for job in Asked.jobs] == [True, False, False, False]

    asyncio.run(run())
