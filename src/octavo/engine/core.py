"""The engine's inside: requests in, events out, one step at a time. It runs on one thread and shares nothing."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt
import torch

from octavo.config import EngineConfig
from octavo.engine.detokenizer import Detokenizer
from octavo.engine.messages import Delta, Event, Failure, FinishReason, MemoryReport, Progress, Reply, Request
from octavo.engine.pins import Pins
from octavo.engine.runner import Chunk, Runner
from octavo.engine.sampler import Sample, TokenSampler, draw_seed, logprob_of
from octavo.engine.scheduler import Scheduled, Scheduler
from octavo.engine.sequence import RequestState, Sequence
from octavo.engine.tiers import Tiers
from octavo.errors import EngineError, InvalidRequest, OctavoError, PromptTooLong, RequestTooLarge
from octavo.kv.hashing import namespace_key
from octavo.kv.manager import KVCacheManager
from octavo.kv.planner import plan_cache
from octavo.kv.storage.records import Space
from octavo.kv.storage.tier import Tier
from octavo.kv.table import BlockTable
from octavo.kv.value import ByValue
from octavo.models.check import check_exactness
from octavo.models.loaded import LoadedModel
from octavo.models.loaded import Progress as LoadProgress
from octavo.models.prepare import Probe, prepare_model
from octavo.spec import BLOCK_SIZE, cdiv

_log = logging.getLogger(__name__)


class EngineCore:
    """A model, its cache and the requests in it.

    Args:
        loaded: is taken over and changed in place.
        budget_bytes: of the cache.
        tier: below memory; is taken over, and closed by `close`.
        post: runs a function on the core's thread; may be called from any thread.
        progress: see `check_exactness`.

    Raises:
        UnsupportedModel, InvalidRequest: see `prepare_model` and `plan_cache`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        budget_bytes: int,
        tier: Tier,
        post: Callable[[Callable[[], None]], None],
        progress: LoadProgress | None = None,
    ) -> None:
        self._config = config
        self._tokenizer = loaded.tokenizer
        self._eos = loaded.eos_token_ids
        prepared = prepare_model(
            loaded,
            kv_format=config.kv_format,
            context=config.context,
            device=config.device,
            kernels=config.kernels,
            fuse=config.fuse,
        )
        self.prepared = prepared
        self._plan = plan_cache(prepared.spec, prepared.page_format, budget_bytes, config.max_running)
        self._identity = prepared.identity
        self._name = loaded.name
        self._budget_bytes = budget_bytes
        self._weights_bytes = prepared.weights_bytes
        self.context = prepared.context
        self.vocab_size = int(prepared.model.config.vocab_size)
        self._runner = Runner(prepared, self._plan, device=config.device, debug_fill=config.debug_fill)
        self._manager = KVCacheManager(
            num_blocks=self._plan.num_blocks,
            num_slots=self._plan.num_slots,
            max_tails=self._plan.max_tails,
            policy=ByValue,
            on_evict=lambda block_id: self._tiers.evicted(block_id),
        )
        self._tiers = Tiers(
            tier, self._manager, self._runner.sealed, self._runner.opened, prepared.spec, post
        )
        self._scheduler = Scheduler(
            self._manager, self._tiers, max_running=config.max_running, max_step_tokens=config.max_step_tokens
        )
        self._pins = Pins(self._manager, self._plan.num_blocks)
        self._only_waits = False  # for the tier: nothing can be computed until something arrives
        self._sequences: dict[str, list[Sequence]] = {}
        if prepared.probe is not None:
            self._check_probe(prepared.probe, prepared.model.config.model_type)
        self._exactness = check_exactness(prepared, max_rows=config.max_step_tokens, progress=progress)
        if not self._exactness.exact:
            _log.warning("%s", self._exactness.reason)

    @property
    def num_prefilling(self) -> int:
        """Requests whose first token is still to come."""
        return sum(sequences[0].state.first_token_s is None for sequences in self._sequences.values())

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work and not self._only_waits

    @property
    def patience_s(self) -> float | None:
        """How long the thread may sleep when there is no work; None if it may until it is called."""
        return self._tiers.patience_s

    def wake(self) -> None:
        """Something arrived, or `patience_s` is over: there may be work again."""
        self._only_waits = False
        self._tiers.lose_patience()

    def rest(self) -> None:
        """There is nothing to compute: what was computed is saved."""
        self._tiers.save_some(num_computed=None)

    def close(self, timeout_s: float = 10.0) -> None:
        """Saves what is not saved yet, for at most so long."""
        end = time.monotonic() + timeout_s
        self._tiers.save_all(timeout_s)
        self._tiers.tier.close(max(0.0, end - time.monotonic()))

    def flush(self, timeout_s: float) -> bool:
        """Waits until the tier below has everything that it is to have; False if that took too long."""
        return self._tiers.save_all(timeout_s)

    @property
    def num_sequences(self) -> tuple[int, int]:
        """Sequences that run, and that wait. It may be asked from any thread."""
        return len(self._scheduler.running), len(self._scheduler.waiting)

    def add(self, request: Request) -> None:
        """Takes a request in.

        Raises:
            InvalidRequest: it can never be answered; the message says why. Nothing was computed.
        """
        if self._tiers.tier.was_cleared():  # by `octavo cache clear`, in another process
            self._forget()
        self._pins.expire()
        self._check(request)
        seed = draw_seed() if request.params.seed is None else request.params.seed
        fields = {**self._identity, "tenant": request.cache_namespace}
        namespace = namespace_key(fields)
        if request.retention.pin is not None:
            self._pins.check((namespace, request.retention.pin), len(request.token_ids))
        if request.disk and not request.ephemeral:
            self._tiers.introduce(Space(namespace, fields, self._name))
        state = RequestState(request, namespace, seed)
        sequence = self._sequence(state, 0)
        self._sequences[request.request_id] = [sequence]
        self._scheduler.waiting.append(sequence)

    def abort(self, request_id: str) -> list[Event]:
        """Ends a request now; what it computed stays reusable. Unknown and finished requests are ignored."""
        events: list[Event] = []
        for sequence in list(self._sequences.get(request_id, ())):
            if sequence.awaits_forks:  # its other answers have not begun
                for index in range(1, sequence.state.request.params.n):
                    fork = self._sequence(sequence.state, index)
                    events += self._finish(fork, "abort", "")
            events += self._finish(sequence, "abort", sequence.detokenizer.finish())
        return events

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Computes one step of whatever can run."""
        started_s = time.perf_counter()
        scheduled = self._scheduler.schedule()
        if not scheduled:
            self._only_waits = self._tiers.patience_s is not None
            return [] if self._only_waits else self._stuck()
        try:
            rows = self._run(scheduled)
        except Exception as error:  # a step is all or nothing: its sequences fail, the others go on
            requests = {item.sequence.state.request.request_id for item in scheduled}
            return [event for request_id in requests for event in self._fail(request_id, error)]
        events: list[Event] = []
        for item, row in zip(scheduled, rows, strict=True):
            events += self._advance(item, row)
        num_computed = sum(len(item.chunk.token_ids) for item in scheduled)
        self._tiers.computed(num_computed, time.perf_counter() - started_s)
        self._tiers.save_some(num_computed=num_computed)
        return events

    def _run(self, scheduled: SequenceOf[Scheduled]) -> list[torch.Tensor | None]:
        """Computes the chunks; logits of the last row of those that complete their sequence."""
        chunks = [item.chunk for item in scheduled]
        counts = [len(chunk.token_ids) for chunk in chunks]
        completes = [
            count == item.sequence.num_remaining_tokens for count, item in zip(counts, scheduled, strict=True)
        ]
        if all(item.sequence.state.request.prompt_logprobs is None for item in scheduled):
            ends = itertools.accumulate(counts)
            wanted = [end - 1 for end, complete in zip(ends, completes, strict=True) if complete]
            rows = iter(self._runner.run(chunks, torch.tensor(wanted, dtype=torch.int64)))
            return [next(rows) if complete else None for complete in completes]
        parts = torch.split(self._runner.run(chunks, torch.arange(sum(counts))), counts)
        for item, part in zip(scheduled, parts, strict=True):
            self._score(item, part.numpy())
        return [part[-1] if complete else None for part, complete in zip(parts, completes, strict=True)]

    def _score(self, item: Scheduled, rows: npt.NDArray[np.float32]) -> None:
        """Notes what the model thought of the prompt's tokens, from the logits of all rows of a chunk."""
        state = item.sequence.state
        count = state.request.prompt_logprobs
        if count is None:
            return
        for position, row in enumerate(rows, item.chunk.table.num_tokens + 1):
            if position < state.num_prompt_tokens:
                state.prompt_logprobs[position] = logprob_of(row, state.request.token_ids[position], count)

    def memory(self) -> MemoryReport:
        """What is held now, weights apart from the cache."""
        block_bytes = self._plan.page_bytes * self._runner.sealed.num_layers
        used_blocks = len({id_ for sequence in self._scheduler.running for id_ in sequence.held_block_ids})
        used_slots = self._manager.num_used_slots * self._runner.opened.slot_bytes
        tail_slots = self._manager.num_reusable_slots * self._runner.opened.slot_bytes
        return MemoryReport(
            weights_bytes=self._weights_bytes,
            kv_used_bytes=used_blocks * block_bytes + used_slots,
            kv_reusable_bytes=(len(self._manager.allocated_blocks()) - used_blocks) * block_bytes
            + tail_slots,
            kv_allocated_bytes=self._runner.allocated_bytes,
            kv_budget_bytes=self._budget_bytes,
            kv_bytes_per_token=self._plan.bytes_per_token,
            workspace_bytes=self._runner.workspace_bytes + self._tiers.tier.workspace_bytes,
            kv_format=str(self._identity["format"]),
            disk=self._tiers.tier.report(),
            weights=str(self._identity["weights"]),
        )

    def clear(self) -> int:
        """Forgets everything reusable of this model, in memory and below, whoever's it is; the model stays.

        Returns:
            The bytes of memory given back to the system.
        """
        given_back = self._forget()
        self._tiers.tier.clear(model=str(self._identity["model"]))
        return given_back

    def forget(self, cache_namespace: str, *, on_disk: bool) -> int:
        """Forgets everything reusable of a tenant, in memory and below; returns the bytes given back to the system.

        What its running requests hold stays until they end.
        """
        namespace = self._namespace(cache_namespace)
        self._pins.clear(namespace)
        self._tiers.forget(namespace)
        self._manager.forget(namespace)
        if on_disk:
            self._tiers.tier.clear(model=str(self._identity["model"]), tenant=cache_namespace)
        return self._give_back()

    def _forget(self) -> int:
        self._pins.clear()
        self._manager.clear()
        self._tiers.forget()
        return self._give_back()

    def check_integrity(self) -> None:
        """Raises when the cache's bookkeeping contradicts itself."""
        self._manager.check_integrity()

    def _give_back(self) -> int:
        blocks = self._runner.sealed.release_unused(self._manager.allocated_blocks())
        return blocks + self._runner.opened.release_unused(self._manager.allocated_slots())

    @torch.inference_mode()
    def _check_probe(self, probe: Probe, kind: str) -> None:
        """Computes the probe's tokens in two steps, as a chat would, and compares."""
        table = self._manager.start(self._manager.match_prefix([], namespace=b""), [], publish=False)
        for part in (probe.token_ids[:-5], probe.token_ids[-5:]):
            plan = self._manager.allocate(table, len(part))
            assert plan is not None, "the plan holds at least one slab of blocks"
            logits = self._runner.run([Chunk(part, table, plan)])
            self._manager.commit(table, part)
        self._manager.free(table)
        self._give_back()
        probe.check(logits[0], kind)

    def _check(self, request: Request) -> None:
        if request.request_id in self._sequences:
            raise InvalidRequest(f"There is already a request {request.request_id!r}.")
        if not request.token_ids:
            raise InvalidRequest("The prompt is empty: it needs at least one token.")
        bad = [token for token in request.token_ids if not 0 <= token < self.vocab_size]
        if bad:
            raise InvalidRequest(
                f"The prompt has token id {bad[0]}; this model has ids 0 to {self.vocab_size - 1}."
            )
        if request.prompt_logprobs is not None and request.cache:
            raise InvalidRequest(
                "prompt_logprobs needs every token of the prompt to be computed; switch cache off for this request."
            )
        length = len(request.token_ids)
        if length >= self.context:
            raise PromptTooLong(length, self.context)
        if request.params.n > self._config.max_running:
            raise InvalidRequest(
                f"n is {request.params.n} and at most {self._config.max_running} answers run at once (max_running)."
            )
        self._check_room(length)

    def _check_room(self, length: int) -> None:
        """Raises RequestTooLarge if so many tokens do not fit the cache, even with nothing else than pins in it."""
        need, pinned = cdiv(length + 1, BLOCK_SIZE), self._pins.num_blocks
        have = self._plan.num_blocks - pinned
        if need > have:
            block_bytes = self._plan.bytes_per_token * BLOCK_SIZE
            beside = " beside what is pinned" if pinned else ""
            raise RequestTooLarge(
                f"The prompt of {length:,} tokens needs {need * block_bytes:,} bytes of cache and the whole cache "
                f"holds {have * block_bytes:,}, {have * BLOCK_SIZE:,} tokens{beside}. Raise the cache budget "
                "(kv_memory, --kv-memory) or shorten the prompt."
            )

    def _sequence(self, state: RequestState, index: int) -> Sequence:
        params = state.request.params
        return Sequence(
            state=state,
            index=index,
            token_ids=list(state.request.token_ids),
            sampler=TokenSampler(
                params,
                seed=state.seed,
                sample_index=index,
                prompt_token_ids=state.request.token_ids,
                vocab_size=self.vocab_size,
                constraint=None if state.request.constraint is None else state.request.constraint.copy(),
            ),
            detokenizer=Detokenizer(self._tokenizer, params.stop, shown=state.request.shown_specials),
        )

    def _advance(self, item: Scheduled, logits: torch.Tensor | None) -> list[Event]:
        """Takes a computed chunk into the cache, and samples when its sequence has nothing left to compute."""
        sequence, state = item.sequence, item.sequence.state
        table, count = item.chunk.table, len(item.chunk.token_ids)
        first_block = table.num_tokens // BLOCK_SIZE
        self._manager.commit(table, item.chunk.token_ids)
        if state.request.disk:
            self._tiers.committed(table, first_block, state.request.retention.ttl_s)
        caches = state.request.cache
        if not caches or state.first_token_s is None:
            state.num_computed_tokens += count
        if logits is None:
            if state.first_token_s is None:
                return [Progress(state.request.request_id, table.num_tokens, state.num_prompt_tokens)]
            return []
        if caches and table.num_tokens == state.num_prompt_tokens:
            self._manager.keep_tail(table)
        sequences = [sequence, *(self._fork(sequence) if sequence.awaits_forks else ())]
        if state.first_token_s is None:
            state.first_token_s = time.perf_counter()
        events: list[Event] = []
        for answer in sequences:
            try:
                sample = answer.sampler.sample(logits, len(answer.token_ids))
            except OctavoError as error:
                return events + self._fail(state.request.request_id, error)
            events += self._append(answer, sample)
            if not caches and answer.finish_reason is None:
                self._scheduler.forget_blocks(answer)
        return events

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        forks = []
        for index in range(1, sequence.state.request.params.n):
            fork = self._sequence(sequence.state, index)
            if sequence.table is not None:
                fork.table = self._manager.fork(sequence.table)
            forks.append(fork)
        self._sequences[sequence.state.request.request_id] += forks
        self._scheduler.running += forks
        return forks

    def _append(self, sequence: Sequence, sample: Sample) -> list[Event]:
        """Adds a sampled token to an answer, and ends it where that is due."""
        params, state = sequence.state.request.params, sequence.state
        token_id = sample.token_id
        sequence.token_ids.append(token_id)
        sequence.sampler.accept(token_id)
        logprobs = () if sample.logprob is None else (sample.logprob,)
        sequence.logprobs += logprobs
        ends = token_id in params.stop_token_ids or (token_id in self._eos and not params.ignore_eos)
        text = "" if ends else sequence.detokenizer.push(token_id)
        num_generated = len(sequence.token_ids) - state.num_prompt_tokens
        reason: FinishReason | None = None
        if ends or sequence.detokenizer.stopped is not None:
            reason = "stop"
        elif params.max_tokens is not None and num_generated >= params.max_tokens:
            reason = "length"
        elif len(sequence.token_ids) >= self.context:
            reason = "length"
            state.notes.append(
                f"The answer ends here: the context window of {self.context:,} tokens is full."
            )
        if reason is None:
            sequence.text += text
            cached = state.num_cached_tokens
            return [
                Delta(
                    state.request.request_id,
                    sequence.index,
                    text,
                    (token_id,),
                    logprobs,
                    num_cached_tokens=cached,
                )
            ]
        return self._finish(sequence, reason, text + sequence.detokenizer.finish(), (token_id,), sample)

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        text: str,
        token_ids: SequenceOf[int] = (),
        sample: Sample | None = None,
    ) -> list[Event]:
        state = sequence.state
        request_id = state.request.request_id
        sequence.text += text
        if reason == "length" and sequence.detokenizer.stopped is not None:
            reason = "stop"  # the text held back at the end turned out to be a stop string
        sequence.finish_reason = reason
        if sequence.table is not None and sequence.table.publishes and not sequence.table.num_pending:
            self._retain(state, sequence.table)
        self._scheduler.release(sequence)
        choice = state.choices[sequence.index] = sequence.choice()
        reply = None
        if state.finished:
            del self._sequences[request_id]
            complaint = self._tiers.tier.take_complaint()
            if complaint is not None:
                state.notes.append(complaint)
            reply = Reply(
                request_id=request_id,
                choices=tuple(state.choices[index] for index in sorted(state.choices)),
                usage=state.usage(),
                timings=state.timings(),
                memory=self.memory(),
                seed=state.seed,
                why=state.why,
                notes=tuple(dict.fromkeys((*self._exactness.notes, *state.notes))),
                exact=self._exactness.exact,
                prompt_logprobs=state.all_prompt_logprobs(),
            )
        logprobs = () if sample is None or sample.logprob is None else (sample.logprob,)
        return [
            Delta(
                request_id,
                sequence.index,
                text,
                tuple(token_ids),
                logprobs,
                reason,
                reply,
                choice.stop,
                state.num_cached_tokens,
            )
        ]

    def _retain(self, state: RequestState, table: BlockTable) -> None:
        """A sequence ends: what it has computed is kept as its request says."""
        retention = state.request.retention
        if state.request.disk:
            self._tiers.finished(table, retention.ttl_s)
        if retention.priority or retention.ttl_s is not None:
            expires_s = None if retention.ttl_s is None else time.monotonic() + retention.ttl_s
            self._manager.retain(table, retention.priority, expires_s)
        if retention.pin is not None:
            num_tokens = self._pins.hold((state.namespace, retention.pin), table, retention.ttl_s)
            if num_tokens < table.num_tokens // BLOCK_SIZE * BLOCK_SIZE:
                state.notes.append(
                    f"Only the first {num_tokens:,} tokens are pinned: pins may hold half of the cache."
                )

    def unpin(self, name: str, cache_namespace: str) -> bool:
        """Lets go of a pin; whether there was one."""
        return self._pins.release((self._namespace(cache_namespace), name))

    def _namespace(self, tenant: str) -> bytes:
        return namespace_key({**self._identity, "tenant": tenant})

    def _fail(self, request_id: str, error: Exception) -> list[Event]:
        for sequence in self._sequences.pop(request_id, ()):
            self._scheduler.release(sequence)
        return [Failure(request_id, error)]

    def _stuck(self) -> list[Event]:
        """Nothing could be scheduled: the oldest sequence fills the cache by itself, so its answer ends."""
        if not self._scheduler.running:
            return self._crowded_out()
        sequence = self._scheduler.running[0]
        have = self._plan.num_blocks * BLOCK_SIZE
        sequence.state.notes.append(
            f"The answer ends here: the cache of {have:,} tokens is full. "
            "Raise the cache budget (kv_memory, --kv-memory)."
        )
        return self._finish(sequence, "length", sequence.detokenizer.finish())

    def _crowded_out(self) -> list[Event]:
        """Nothing runs and the next in line finds no room: pins have taken it since it was accepted."""
        if not self._scheduler.waiting:
            return []
        sequence = self._scheduler.waiting[0]
        try:
            self._check_room(len(sequence.token_ids) - 1)
        except RequestTooLarge as error:
            return self._fail(sequence.state.request.request_id, error)
        raise EngineError("A request waits although there is room for it, which is a fault of Octavo.")
