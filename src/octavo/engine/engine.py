"""The engine as callers see it: prompts in, text out, from any thread or event loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import queue
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, TypeVar

import psutil
import torch

from octavo.config import EngineConfig, Retention, SamplingParams, parse_bytes, refuse_unknown
from octavo.engine.core import EngineCore
from octavo.engine.counters import Counters
from octavo.engine.journal import RequestRecord
from octavo.engine.mailbox import Inbox, Mailbox, Sink
from octavo.engine.messages import Delta, Event, Failure, MemoryReport, Reply, Request, is_last
from octavo.engine.snapshot import Snapshot, make_snapshot
from octavo.engine.stream import Stream
from octavo.engine.thread import EngineThread
from octavo.errors import EngineStopped, InvalidRequest
from octavo.kernels.native import release_threads
from octavo.kv.planner import default_budget_bytes
from octavo.kv.storage import default_disk_bytes, open_tier
from octavo.models.load import load_model
from octavo.models.loaded import LoadedModel, Progress
from octavo.models.prepare import check_device, resolve_dtype

if TYPE_CHECKING:
    from octavo.engine.constraint import Grammars

_log = logging.getLogger(__name__)

T = TypeVar("T")


class TokenEngine:
    """Generates from prompts. Safe to share between threads; many requests run in one batch.

    Args:
        model: a bundled name, a folder, a GGUF file, a hub id, or a `LoadedModel` (taken over, changed in place).
        kv_memory: budget of the cache, bytes or for example `"2GiB"`; a share of free memory by default.
        kv_disk: what keys and values may take on disk, where they outlive the process; 0 keeps them off it.
            By default `OCTAVO_KV_DISK`, else 10 GiB. What was not used for 30 days is removed.
        progress: called with (stage, done, total) while loading.
        settings: the other fields of `EngineConfig`.

    Raises:
        UserError: the model or a setting cannot be used; the message says why and what to do.
        NotEnoughMemory: the weights do not fit.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LoadedModel,
        *,
        kv_memory: int | str | None = None,
        kv_disk: int | str | None = None,
        progress: Progress | None = None,
        **settings: Any,
    ) -> None:
        known = [
            field.name
            for field in fields(EngineConfig)
            if field.name not in ("kv_memory_bytes", "kv_disk_bytes")
        ]
        refuse_unknown(settings, [*known, "kv_memory", "kv_disk", "progress"], "engine setting")
        budget = None if kv_memory is None else parse_bytes(kv_memory)
        disk = default_disk_bytes() if kv_disk is None else parse_bytes(kv_disk)
        config = EngineConfig(kv_memory_bytes=budget, kv_disk_bytes=disk, **settings)
        check_device(config.device)
        if isinstance(model, LoadedModel) and config.weights != "auto":
            raise InvalidRequest(
                f"{model.name} is loaded already, so its weights cannot be held as {config.weights}. Give weights to "
                "load_model instead."
            )
        loaded = model if isinstance(model, LoadedModel) else load_as_set(model, config, progress)
        self.name = loaded.name
        self.tokenizer = loaded.tokenizer
        self.eos_token_ids = loaded.eos_token_ids
        self.fingerprint = loaded.fingerprint
        self.notices = loaded.notices
        budget = config.kv_memory_bytes or default_budget_bytes(psutil.virtual_memory().available)
        self._thread = EngineThread()
        self.disk = tier = open_tier(disk if config.cache else 0, self._save_more)
        try:
            with computing_with(config.threads):
                self._core = EngineCore(loaded, config, budget, tier, self._thread.post, progress)
            release_threads()  # those of loading: from here on the engine's own thread computes
        except BaseException:
            tier.close(0.0)
            raise
        self.config = config
        self.context = self._core.context
        self.vocab_size = self._core.vocab_size
        self._ids = itertools.count()
        self._sinks: dict[str, Sink] = {}
        self._mailbox: Mailbox | None = None
        # Called on the engine's thread, when the events of a step have been given out.
        self.on_step: Callable[[], None] = lambda: None
        self._thread.start(self._core, config.threads, self._dispatch, self._tell_all)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def _grammars(self) -> Grammars:
        from octavo.engine.constraint import Grammars  # most engines never need it

        return Grammars(self.tokenizer, self.vocab_size, self.eos_token_ids)

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt; special tokens written in the text become their ids."""
        return list(self.tokenizer.encode(text))

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **sampling: Any
    ) -> Stream:
        """Generates, yielding `Delta`s (the last one has the `reply`) and `Progress` of a long prefill.

        Besides sampling settings, keywords are `cache`, `cache_namespace`, `ephemeral`, `reuse`, `shown_specials`,
        `urgency`, `timeout_s` and `prompt_logprobs` (see `Request`), and `grammar`, in llguidance's Lark, which the
        answer then follows.

        Closing the iterator, or dropping it, aborts the request.

        Raises:
            InvalidRequest: the request can never be answered; raised before anything is computed.
            EngineStopped: the engine was closed.
        """
        events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        request = self._request(prompt, params, sampling)
        accepted = self._submit(request, events.put)
        try:
            self._thread.wait(accepted)
        except BaseException:
            self._forget(request.request_id)  # an interrupt may leave it accepted with nobody to hear it
            raise
        return Stream(events, lambda: self._forget(request.request_id))

    async def astream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **sampling: Any
    ) -> AsyncGenerator[Event, None]:
        """`stream` for an event loop."""
        if isinstance(prompt, str) or "grammar" in sampling:  # what takes long is not done on the loop
            request = await asyncio.to_thread(self._request, prompt, params, sampling)
        else:
            request = self._request(prompt, params, sampling)
        self._mailbox = Mailbox.of_this_loop(self._mailbox)
        inbox = Inbox(self._mailbox)
        accepted = self._submit(request, inbox.put)
        try:
            waiting = asyncio.wrap_future(accepted)
            while not waiting.done():
                await asyncio.wait([waiting], timeout=1.0)
                if self._thread.is_over and not accepted.done():
                    raise self._thread.stopped()
            waiting.result()
            while True:
                event = await inbox.next()
                yield event
                if is_last(event):
                    return
        finally:
            self._forget(request.request_id)

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **sampling: Any
    ) -> Reply:
        """Generates and returns the whole reply; see `stream`."""
        for event in self.stream(prompt, params, **sampling):
            if isinstance(event, Delta) and event.reply is not None:
                return event.reply
        raise EngineStopped("The engine ended the request without a reply.")

    def prefetch(self, prompt: str | Sequence[int], *, cache_namespace: str = "") -> Future[Reply]:
        """Has a prompt read ahead of the request that will need it, and returns at once.

        What is on disk of it comes to memory, and what is not known is computed: as when an agent's tool has returned
        and the rest of the prompt is still being written. It is part of what a request with `max_tokens=1` does, whose
        reply the future gives; nobody has to wait for it. Cancelling the future aborts it.

        Raises:
            EngineStopped: the engine was closed.
        """
        future: Future[Reply] = Future()
        request = self._request(prompt, None, {"cache_namespace": cache_namespace, "max_tokens": 1})

        def sink(event: Event) -> None:
            if not is_last(event) or not future.set_running_or_notify_cancel():
                return
            if isinstance(event, Failure):
                future.set_exception(event.error)
            elif isinstance(event, Delta) and event.reply is not None:
                future.set_result(event.reply)

        def refused(accepted: Future[None]) -> None:
            error = accepted.exception()
            if error is None or self._sinks.pop(request.request_id, None) is None:
                return
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

        self._submit(request, sink).add_done_callback(refused)
        future.add_done_callback(lambda _: self._forget(request.request_id))  # it has ended, or was cancelled
        return future

    def submit(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        sampling: dict[str, Any],
        *,
        sink: Sink,
    ) -> Future[None]:
        """`stream` for another process: gives each event to `sink`, on the engine's thread.

        Returns:
            Whether the request was accepted. `drop` ends it before it has ended by itself.

        Raises:
            InvalidRequest: it can never be answered.
            EngineStopped: the engine was closed.
        """
        request = replace(self._request(prompt, params, sampling), request_id=request_id)
        return self._submit(request, sink)

    def drop(self, request_id: str) -> None:
        """Aborts a request that was submitted, if it still runs; its sink gets no more events."""
        self._forget(request_id)

    def abort(self, request_id: str) -> None:
        """Ends a request; its stream then yields a last delta with finish reason `abort`."""
        self._thread.post(lambda: self._dispatch(self._core.abort(request_id)))

    @property
    def num_sequences(self) -> tuple[int, int]:
        """Answers that run, and that wait, at this moment."""
        return self._core.num_sequences

    def snapshot(self, cache_namespace: str | None = None, *, names: bool = True) -> Snapshot:
        """Memory, blocks and conversations at this moment: of one tenant, and of nobody else, or of all of them.

        Without `names` it has no conversations in it: how much there is and not whose.
        """
        seen = self._ask(self._core.onlooker.observe)
        namespace = None if cache_namespace is None else self._core.namespace(cache_namespace)
        return make_snapshot(seen, namespace, names=names)

    def pin_conversation(self, name: str, *, cache_namespace: str = "") -> int:
        """Holds what a conversation of `snapshot` has in memory; see `Onlooker.pin`."""
        return self._ask(lambda: self._core.onlooker.pin(name, cache_namespace))

    def unpin_conversation(self, name: str, *, cache_namespace: str = "") -> None:
        """Lets go of it; see `Onlooker.unpin`."""
        self._ask(lambda: self._core.onlooker.unpin(name, cache_namespace))

    def drop_conversation(self, name: str, *, cache_namespace: str = "") -> int:
        """Forgets what only this conversation has, in memory and on disk; see `Onlooker.drop`."""
        return self._ask(lambda: self._core.onlooker.drop(name, cache_namespace))

    def forget_sequence(self, token_ids: Sequence[int], *, cache_namespace: str = "") -> int:
        """Forgets what was computed of a sequence, in memory and on disk; see `Onlooker.forget_sequence`."""
        return self._ask(lambda: self._core.onlooker.forget_sequence(token_ids, cache_namespace))

    def memory(self) -> MemoryReport:
        """Bytes of weights and cache, apart."""
        return self._ask(self._core.memory)

    def recent(self, limit: int | None = None, *, tenant: str | None = None) -> list[RequestRecord]:
        """The last requests that have finished (256 at most), the latest first.

        Without `tenant`, a `cache_namespace`, those of all: with what only who runs the engine may know, that somebody
        else has computed the same prompt, and without the text of differences.
        """
        return self._ask(lambda: self._core.journal.recent(limit, tenant))

    def counters(self) -> Counters:
        """What the engine has done since its start."""
        return self._ask(self._core.counters)

    def clear(self) -> int:
        """Forgets everything reusable; the model stays loaded. Returns the bytes given back to the system."""
        return self._ask(self._core.clear)

    def forget(self, cache_namespace: str, *, on_disk: bool = True) -> int:
        """Forgets everything reusable of a tenant, in memory and, unless that is known to have nothing, on disk.

        Returns:
            The bytes of memory given back to the system.
        """
        return self._ask(lambda: self._core.forget(cache_namespace, on_disk=on_disk))

    def unpin(self, name: str, *, cache_namespace: str = "") -> bool:
        """Lets go of what a request held with `pin=name`; whether there was something."""
        return self._ask(lambda: self._core.unpin(name, cache_namespace))

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Waits until everything reusable is on disk too; False if that took too long, or nothing is kept there."""
        return self._ask(lambda: self._core.flush(timeout_s))

    def settle(self, timeout_s: float) -> bool:
        """Waits until all that was given to the disk, or deleted from it, is so; False if that took too long."""
        return self.disk.flush(timeout_s)

    def check(self) -> None:
        """Raises EngineStopped if the engine does not run any more."""
        self._thread.check()

    def check_integrity(self) -> None:
        """Raises when the cache's bookkeeping contradicts itself."""
        self._ask(self._core.check_integrity)

    def close(self) -> None:
        """Ends running requests and the engine's thread. Closing twice is fine."""
        self._thread.close()

    def _forget(self, request_id: str) -> None:
        """Aborts the request if it still runs, and drops its events."""
        if self._sinks.pop(request_id, None) is not None and not self._thread.closed:
            self.abort(request_id)

    def _request(
        self, prompt: str | Sequence[int], params: SamplingParams | None, sampling: dict[str, Any]
    ) -> Request:
        cache = bool(sampling.pop("cache", self.config.cache))
        namespace = str(sampling.pop("cache_namespace", ""))
        ephemeral, disk = bool(sampling.pop("ephemeral", False)), bool(sampling.pop("disk", True))
        kept = {field.name: sampling.pop(field.name) for field in fields(Retention) if field.name in sampling}
        grammar = sampling.pop("grammar", None)
        shown = tuple(sampling.pop("shown_specials", ()))
        prompt_logprobs = sampling.pop("prompt_logprobs", None)
        urgency, timeout_s = int(sampling.pop("urgency", 0)), sampling.pop("timeout_s", None)
        reuse = sampling.pop("reuse", "exact")
        if params is not None and sampling:
            raise InvalidRequest("Give either params or single sampling settings, not both.")
        if params is None:
            params = make_params(sampling)
        token_ids = self.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        request_id = f"request-{next(self._ids)}"
        return Request(
            request_id,
            tuple(token_ids),
            params,
            cache_namespace=namespace,
            ephemeral=ephemeral,
            disk=disk,
            retention=Retention(**kept),
            cache=cache and self.config.cache,
            reuse=reuse,
            constraint=None if grammar is None else self._grammars.compile(grammar),
            shown_specials=shown,
            prompt_logprobs=prompt_logprobs,
            urgency=urgency,
            timeout_s=timeout_s,
        )

    def _submit(self, request: Request, sink: Sink) -> Future[None]:
        """Hands a request to the engine; the future tells whether it was accepted."""
        self._sinks[request.request_id] = sink
        try:
            return self._thread.call(lambda: self._core.add(request))
        except EngineStopped:
            self._sinks.pop(request.request_id, None)
            raise

    def _ask(self, function: Callable[[], T]) -> T:
        """Runs `function` on the engine's thread, between two steps, and returns its result."""
        return self._thread.ask(function)

    def _tell_all(self, error: EngineStopped) -> None:
        """The thread has ended: whoever still waits is told."""
        for request_id in list(self._sinks):
            self._tell(Failure(request_id, error))
        self.on_step()

    def _save_more(self) -> None:
        """The tier below memory has written what it had: it can take more."""
        self._thread.post(lambda: None)  # when there is no work, the thread saves before it waits again

    def _dispatch(self, events: list[Event]) -> None:
        for event in events:
            self._tell(event)
        self.on_step()

    def _tell(self, event: Event) -> None:
        """Gives an event to whoever waits for it. A sink that raises ends its own request, and nothing else."""
        request_id = event.request_id
        sink = self._sinks.pop(request_id, None) if is_last(event) else self._sinks.get(request_id)
        if sink is None:
            return
        try:
            sink(event)
        except Exception:
            _log.exception("The events of request %s cannot be told, so it is aborted.", request_id)
            self._forget(request_id)


@contextmanager
def computing_with(number: int | None) -> Iterator[None]:
    """Computes with this many threads inside the block, and then with as many as before. None changes nothing."""
    if number is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load_as_set(
    model: str | os.PathLike[str], config: EngineConfig, progress: Progress | None
) -> LoadedModel:
    """The model with its weights held as the settings ask; on other devices than the CPU `auto` is dense."""
    dtype = resolve_dtype(config.dtype, config.device, config.weights)
    weights = dtype if config.weights == "auto" and config.device != "cpu" else config.weights
    loaded = load_model(model, dtype=dtype, weights=weights, progress=progress)
    for notice in loaded.notices:
        _log.warning("%s", notice)
    return loaded


def make_params(sampling: dict[str, Any]) -> SamplingParams:
    """Sampling parameters from keywords.

    Raises:
        InvalidRequest: a keyword does not exist or its value is out of range.
    """
    refuse_unknown(sampling, [field.name for field in fields(SamplingParams)], "sampling setting")
    return SamplingParams(**sampling)
