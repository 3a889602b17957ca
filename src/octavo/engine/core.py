"""The engine's inside: requests in, events out, one step at a time. It runs on one thread and shares nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import torch

from octavo.config import EngineConfig
from octavo.engine.admission import check_request
from octavo.engine.answers import Answers
from octavo.engine.cache import EngineCache
from octavo.engine.counters import Counters
from octavo.engine.edits import Edits
from octavo.engine.journal import Journal
from octavo.engine.messages import (
    Event,
    MemoryReport,
    Request,
)
from octavo.engine.onlooker import Onlooker
from octavo.engine.sampler import draw_seed
from octavo.engine.scheduler import Scheduled, Scheduler
from octavo.engine.sequence import RequestState, Sequence
from octavo.engine.speculation import Speculator
from octavo.engine.step import run_step
from octavo.errors import EngineError, InvalidRequest, RequestTooLarge
from octavo.kv.storage.tier import Tier
from octavo.models.check import check_exactness
from octavo.models.loaded import LoadedModel
from octavo.models.loaded import Progress as LoadProgress
from octavo.models.prepare import prepare_model
from octavo.spec import BLOCK_SIZE

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
        prepared = prepare_model(
            loaded,
            kv_format=config.kv_format,
            context=config.context,
            device=config.device,
            kernels=config.kernels,
            fuse=config.fuse,
        )
        self.prepared = prepared
        self.context = prepared.context
        self.vocab_size = int(prepared.model.config.vocab_size)
        self._cache = EngineCache(prepared, loaded.name, config, budget_bytes, tier, post)
        self._edits = Edits(self._cache.manager, self._cache.runner, prepared)
        self._scheduler = Scheduler(
            self._cache.manager,
            self._cache.tiers,
            max_running=config.max_running,
            max_step_tokens=config.max_step_tokens,
            draft=self._draft,
            edits=self._edits,
        )
        self._speculator = Speculator(self.context, loaded.eos_token_ids)
        self._cache.on_forget(self._speculator.forget)
        self.onlooker = Onlooker(self._cache, self._scheduler, loaded.name, self.context)
        self._only_waits = False  # for the tier: nothing can be computed until something arrives
        self._counters = Counters()
        if prepared.probe is not None:
            self._cache.check_probe(prepared.probe, prepared.model.config.model_type)
        self.journal = Journal(loaded.name, self._cache.manager, loaded.tokenizer.decode)
        self._exactness = check_exactness(prepared, max_rows=config.max_step_tokens, progress=progress)
        self._answers = Answers(
            loaded,
            self._cache,
            self._scheduler,
            self._speculator,
            self.onlooker,
            self.journal,
            self._counters,
            self._exactness,
            context=self.context,
            vocab_size=self.vocab_size,
        )
        self._sequences, self._deadlines = self._answers.sequences, self._answers.deadlines
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
        ends = [self._cache.tiers.patience_s]
        if self._deadlines:
            ends.append(max(0.0, min(self._deadlines.values()) - time.perf_counter()))
        return min((end for end in ends if end is not None), default=None)

    def wake(self) -> None:
        """Something arrived, or `patience_s` is over: there may be work again."""
        self._only_waits = False

    def rest(self) -> None:
        """There is nothing to compute: what was computed is saved."""
        self.journal.settle()
        self._cache.runner.sealed.collapse()
        self._cache.tiers.save_some(num_computed=None)

    def close(self, timeout_s: float = 10.0) -> None:
        """Saves what is not saved yet, for at most so long."""
        end = time.monotonic() + timeout_s
        self._cache.tiers.save_all(timeout_s)
        self._cache.tiers.tier.close(max(0.0, end - time.monotonic()))

    def flush(self, timeout_s: float) -> bool:
        """Waits until the tier below has everything that it is to have; False if that took too long."""
        return self._cache.tiers.save_all(timeout_s)

    @property
    def num_sequences(self) -> tuple[int, int]:
        """Sequences that run, and that wait. It may be asked from any thread."""
        return len(self._scheduler.running), len(self._scheduler.waiting)

    def add(self, request: Request) -> None:
        """Takes a request in.

        Raises:
            InvalidRequest: it can never be answered; the message says why. Nothing was computed.
        """
        try:
            self._take(request)
        except Exception as error:
            self._counters.refused[type(error).__name__] += 1
            raise

    def _take(self, request: Request) -> None:
        if request.request_id in self._sequences:
            raise InvalidRequest(f"There is already a request {request.request_id!r}.")
        check_request(request, vocab_size=self.vocab_size, max_running=self._config.max_running)
        if request.reuse == "approximate":
            self._edits.check()
        namespace = self._cache.admit(request)
        seed = draw_seed() if request.params.seed is None else request.params.seed
        state = RequestState(request, namespace, seed)
        sequence = self._answers.sequence_of(state, 0)
        if request.cache and not request.ephemeral:
            lineages = self.onlooker.lineages
            state.lineage = lineages.begin(namespace, request.cache_namespace, request.token_ids)
        if request.timeout_s is not None:
            self._deadlines[request.request_id] = state.arrived_s + request.timeout_s
        self._sequences[request.request_id] = [sequence]
        self._scheduler.add(sequence)

    def abort(self, request_id: str) -> list[Event]:
        """Ends a request now; what it computed stays reusable. Unknown and finished requests are ignored."""
        return self._answers.end(request_id, "abort")

    def _end_late(self) -> list[Event]:
        """Ends the requests whose time is over."""
        now = time.perf_counter()
        events: list[Event] = []
        for request_id in [id_ for id_, deadline in self._deadlines.items() if deadline <= now]:
            state = self._sequences[request_id][0].state
            state.notes.append(f"The answer ends here: its time of {state.request.timeout_s:g} s is over.")
            events += self._answers.end(request_id, "timeout")
        return events

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Computes one step of whatever can run."""
        events = self._end_late() if self._deadlines else []
        self._cache.tiers.lose_patience()  # here, so that all that has come by now is taken first
        started_s = time.perf_counter()
        scheduled = self._scheduler.schedule()
        if not scheduled:
            self._only_waits = self._cache.tiers.patience_s is not None
            return events if self._only_waits else events + self._stuck()
        try:
            rows = run_step(self._cache.runner, scheduled)
        except Exception as error:
            self._counters.num_failed_steps += 1
            return events + self._failed(scheduled, error)
        self._answers.now_s = time.perf_counter()
        self._counters.stepped(scheduled, self._answers.now_s - started_s)
        decodes = all(item.sequence.state.first_token_s is not None for item in scheduled)
        for item, part in zip(scheduled, rows, strict=True):
            if item.sequence.table is not item.chunk.table:
                continue  # its request has failed with another of its answers
            if item.chunk.num_drafted and part is not None:
                events += self._answers.verify(item, part)
            else:
                events += self._answers.advance(item, None if part is None else part[0])
        num_computed = sum(len(item.chunk.token_ids) for item in scheduled)
        seconds = time.perf_counter() - started_s
        num_decodes = self._scheduler.computed(scheduled, seconds)
        if decodes:
            num_drafted = sum(item.chunk.num_drafted for item in scheduled)
            self._speculator.costs.stepped(len(scheduled), num_drafted, seconds)
        if num_decodes in (0, len(scheduled)):  # not beside decodes that wait for a prompt already
            self._cache.runner.sealed.collapse(1 if num_decodes else None)
        self._cache.tiers.computed(num_computed, seconds)
        self._cache.tiers.save_some(num_computed=num_computed)
        return events

    def _failed(self, scheduled: SequenceOf[Scheduled], error: Exception) -> list[Event]:
        """A step is all or nothing. Of several sequences each is tried alone, so that the guilty one fails alone."""
        if len(scheduled) == 1:
            return self._answers.fail(scheduled[0].sequence.state.request.request_id, error)
        _log.warning("A step of %d answers failed and they are tried one by one: %r", len(scheduled), error)
        self._scheduler.suspect(scheduled)
        return []

    def memory(self) -> MemoryReport:
        """What is held now, weights apart from the cache."""
        return self._cache.memory(self._scheduler.running)

    def counters(self) -> Counters:
        """What was done since the start, and how full the tiers are."""
        cache, disk = self._cache, self._cache.tiers.tier.report()
        counters = self._counters.copy()
        counters.num_preempted = self._scheduler.num_preempted
        counters.num_evicted = sum(cache.manager.num_evicted.values())
        counters.num_demoted, counters.num_restored = disk.num_written, disk.num_loaded
        counters.usage["memory"] = cache.manager.num_used_blocks / cache.plan.num_blocks
        if disk.budget_bytes:
            counters.usage["disk"] = disk.used_bytes / disk.budget_bytes
        return counters

    def clear(self) -> int:
        """See `EngineCache.clear`."""
        self.onlooker.lineages.clear()
        return self._cache.clear()

    def forget(self, cache_namespace: str, *, on_disk: bool) -> int:
        """See `EngineCache.forget`; the journal forgets the tenant too."""
        self.journal.forget(cache_namespace)
        self.onlooker.lineages.forget(self._cache.namespace(cache_namespace))
        return self._cache.forget(cache_namespace, on_disk=on_disk)

    def namespace(self, tenant: str) -> bytes:
        """The key of a tenant's blocks; it may be asked from any thread."""
        return self._cache.namespace(tenant)

    def unpin(self, name: str, cache_namespace: str) -> bool:
        """Lets go of a pin; whether there was one."""
        return self._cache.unpin(name, cache_namespace)

    def check_integrity(self) -> None:
        """Raises when the cache's bookkeeping contradicts itself."""
        self._cache.manager.check_integrity()

    def _draft(self, sequence: Sequence, room: int, num_sequences: int) -> list[int]:
        """Guesses for a sequence that decodes. They need results that no other row of a step changes."""
        if (
            self._config.speculate == "off"
            or not self._exactness.exact
            or sequence.state.request.params.beams > 1
        ):
            return []
        return self._speculator.draft(sequence, room, num_sequences)

    def _stuck(self) -> list[Event]:
        """Nothing could be scheduled: the oldest sequence fills the cache by itself, so its answer ends."""
        if not self._scheduler.running:
            return self._crowded_out()
        sequence = self._scheduler.running[0]
        have = self._cache.plan.num_blocks * BLOCK_SIZE
        sequence.state.notes.append(
            f"The answer ends here: the cache of {have:,} tokens is full. "
            "Raise the cache budget (kv_memory, --kv-memory)."
        )
        if sequence.state.request.params.beams > 1:
            return self._answers.end(sequence.state.request.request_id, "length")
        return self._answers.finish(sequence, "length", sequence.detokenizer.finish())

    def _crowded_out(self) -> list[Event]:
        """Nothing runs and the next in line finds no room: pins have taken it since it was accepted."""
        waiting = self._scheduler.waiting
        if not waiting:
            return []
        sequence = waiting.next([]) or next(iter(waiting))
        state = sequence.state
        try:
            self._cache.check_room(sequence.token_ids[:-1], state.namespace if state.looks_up else None)
        except RequestTooLarge as error:
            return self._answers.fail(state.request.request_id, error)
        raise EngineError("A request waits although there is room for it, which is a fault of Octavo.")
