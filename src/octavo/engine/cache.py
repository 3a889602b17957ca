"""What an engine holds: pages and their bookkeeping, pins, the tier below; and how it gives them back."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf

import torch

from octavo.config import EngineConfig
from octavo.engine.messages import MemoryReport, Request
from octavo.engine.pins import Pins
from octavo.engine.runner import Chunk, Runner
from octavo.engine.sequence import RequestState, Sequence
from octavo.engine.shared import SHARED, SharedPrefixes
from octavo.engine.tiers import Tiers
from octavo.errors import PromptTooLong, RequestTooLarge
from octavo.kv.hashing import namespace_key, sequence_hash
from octavo.kv.manager import KVCacheManager
from octavo.kv.planner import plan_cache
from octavo.kv.storage.records import Space
from octavo.kv.storage.tier import Tier
from octavo.kv.table import BlockTable
from octavo.kv.value import ByValue
from octavo.models.prepare import PreparedModel, Probe
from octavo.spec import BLOCK_SIZE, cdiv


class EngineCache:
    """The cache of one prepared model.

    Args:
        name: of the model, as the tier below tells it.
        budget_bytes: of the pages in memory.
        tier: below memory; is taken over.
        post: runs a function on the engine's thread; may be called from any thread.

    Raises:
        InvalidRequest: see `plan_cache`.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        name: str,
        config: EngineConfig,
        budget_bytes: int,
        tier: Tier,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self.plan = plan_cache(prepared.spec, prepared.page_format, budget_bytes, config.max_running)
        self.runner = Runner(prepared, self.plan, device=config.device, debug_fill=config.debug_fill)
        self.manager = KVCacheManager(
            num_blocks=self.plan.num_blocks,
            num_slots=self.plan.num_slots,
            max_tails=self.plan.max_tails,
            policy=ByValue,
            on_evict=lambda block_id: self.tiers.evicted(block_id),
        )
        self._forget_elsewhere: Callable[[bytes | None], None] = lambda _: None
        self._name = name
        self._identity = prepared.identity
        shared = SharedPrefixes(self.manager, self.runner.sealed, self.namespace(SHARED))
        self.tiers = Tiers(
            tier, self.manager, self.runner.sealed, self.runner.opened, prepared.spec, shared, post
        )
        self.pins = Pins(self.manager, self.plan.num_blocks)
        self._budget_bytes = budget_bytes
        self._weights_bytes = prepared.weights_bytes
        self._context = prepared.context

    @property
    def block_bytes(self) -> int:
        """Bytes of a sealed block in all layers."""
        return self.plan.page_bytes * self.runner.sealed.num_layers

    @property
    def dtype(self) -> str:
        """Of open blocks."""
        return str(self._identity["dtype"])

    def namespace(self, tenant: str) -> bytes:
        """The key under which a tenant's blocks are hashed."""
        return namespace_key(self._fields(tenant))

    def _fields(self, tenant: str) -> dict[str, str | int]:
        return {**self._identity, "tenant": tenant}

    def admit(self, request: Request) -> bytes:
        """Makes the request's tenant known to pins and tier; returns its namespace.

        Raises:
            InvalidRequest: the prompt fits neither window nor cache, or cannot be pinned.
        """
        if self.tiers.tier.was_cleared():  # by `octavo cache clear`, in another process
            self.forget_all()
        self.pins.expire()
        length = len(request.token_ids)
        if length >= self._context:
            raise PromptTooLong(length, self._context)
        namespace = self.namespace(request.cache_namespace)
        looks_up = request.cache and request.prompt_logprobs is None
        self.check_room(request.token_ids, namespace if looks_up else None)
        if request.retention.pin is not None:
            self.pins.check((namespace, request.retention.pin), length)
        if request.disk and not request.ephemeral:
            self.tiers.introduce(Space(namespace, self._fields(request.cache_namespace), self._name))
        return namespace

    def check_room(self, token_ids: SequenceOf[int], namespace: bytes | None = None) -> None:
        """Raises RequestTooLarge if these tokens do not fit, even with nothing else than pins beside them.

        Pinned blocks that they begin with in a namespace are not beside them.
        """
        length, pins = len(token_ids), self.pins.block_ids()
        if pins and namespace is not None:
            pins.difference_update(self.manager.match_prefix(token_ids, namespace=namespace).block_ids)
        need, pinned = cdiv(length + 1, BLOCK_SIZE), len(pins)
        have = self.plan.num_blocks - pinned
        if need > have:
            block_bytes = self.plan.bytes_per_token * BLOCK_SIZE
            beside = " beside what is pinned" if pinned else ""
            raise RequestTooLarge(
                f"The prompt of {length:,} tokens needs {need * block_bytes:,} bytes of cache and the whole cache "
                f"holds {have * block_bytes:,}, {have * BLOCK_SIZE:,} tokens{beside}. Raise the cache budget "
                "(kv_memory, --kv-memory) or shorten the prompt."
            )

    def retain(self, state: RequestState, table: BlockTable) -> None:
        """A sequence ends: what it has computed is kept as its request says."""
        retention = state.request.retention
        if state.request.disk:
            self.tiers.finished(table, retention.ttl_s)
        expires_s = None if retention.ttl_s is None else time.monotonic() + retention.ttl_s
        self.manager.retain(table, retention.priority, expires_s)
        if retention.pin is not None:
            num_tokens = self.pins.hold((state.namespace, retention.pin), table, retention.ttl_s)
            if num_tokens < table.num_tokens // BLOCK_SIZE * BLOCK_SIZE:
                state.notes.append(
                    f"Only the first {num_tokens:,} tokens are pinned: pins may hold half of the cache."
                )

    def unpin(self, name: str, tenant: str) -> bool:
        """Lets go of a pin; whether there was one."""
        return self.pins.release((self.namespace(tenant), name))

    def memory(self, running: list[Sequence]) -> MemoryReport:
        """What is held now, weights apart from the cache; `running` is who uses it."""
        block_bytes = self.block_bytes
        used_blocks = len({id_ for sequence in running for id_ in sequence.held_block_ids})
        slot_bytes = self.runner.opened.slot_bytes
        return MemoryReport(
            weights_bytes=self._weights_bytes,
            kv_used_bytes=used_blocks * block_bytes + self.manager.num_used_slots * slot_bytes,
            kv_reusable_bytes=(len(self.manager.allocated_blocks()) - used_blocks) * block_bytes
            + self.manager.num_reusable_slots * slot_bytes,
            kv_allocated_bytes=self.runner.allocated_bytes,
            kv_budget_bytes=self._budget_bytes,
            kv_bytes_per_token=self.plan.bytes_per_token,
            workspace_bytes=self.runner.workspace_bytes + self.tiers.tier.workspace_bytes,
            kv_format=str(self._identity["format"]),
            disk=self.tiers.tier.report(),
            weights=str(self._identity["weights"]),
        )

    def clear(self) -> int:
        """Forgets everything reusable of this model, in memory and below, whoever's it is; the model stays.

        Returns:
            The bytes of memory given back to the system.
        """
        given_back = self.forget_all()
        self.tiers.tier.clear(model=str(self._identity["model"]))
        return given_back

    def forget(self, tenant: str, *, on_disk: bool) -> int:
        """Forgets everything reusable of a tenant, in memory and below; returns the bytes given back to the system.

        What its running requests hold is theirs alone from now on, and goes with them.
        """
        namespace = self.namespace(tenant)
        self._forget_elsewhere(namespace)
        self.pins.clear(namespace)
        self.tiers.forget(namespace)
        self.manager.forget(namespace)
        if on_disk:
            self.tiers.tier.clear(model=str(self._identity["model"]), tenant=tenant)
        return self._give_back()

    def on_forget(self, forget: Callable[[bytes | None], None]) -> None:
        """Has `forget` called when something of a namespace, or of all of them (None), is forgotten or dropped."""
        self._forget_elsewhere = forget

    def drop(
        self,
        namespace: bytes,
        block_hashes: Collection[bytes],
        token_ids: SequenceOf[int],
        tables: Collection[BlockTable] = (),
    ) -> int:
        """Forgets these blocks and what is raw of the sequence behind them, in memory and below.

        What `tables` alone hold, those of answers that go on from there, is theirs from now on and goes with them.

        Returns:
            The bytes of memory given back to the system.
        """
        self._forget_elsewhere(namespace)
        names = set(block_hashes)
        if len(token_ids) % BLOCK_SIZE:
            names.add(sequence_hash(namespace, token_ids))
        self.tiers.discard(self.manager.forget_blocks(namespace, block_hashes, token_ids, tables))
        self.tiers.tier.remove(namespace, names)
        return self._give_back()

    def forget_all(self) -> int:
        """Forgets everything reusable in memory; returns the bytes given back to the system."""
        self._forget_elsewhere(None)
        self.pins.clear()
        self.manager.clear()
        self.tiers.forget()
        return self._give_back()

    def _give_back(self) -> int:
        blocks = self.runner.sealed.release_unused(self.manager.allocated_blocks())
        return blocks + self.runner.opened.release_unused(self.manager.allocated_slots())

    @torch.inference_mode()
    def check_probe(self, probe: Probe, kind: str) -> None:
        """Computes the probe's tokens in two steps, as a chat would, and compares.

        Raises:
            UnsupportedModel: see `Probe.check`.
        """
        table = self.manager.start(self.manager.match_prefix([], namespace=b""), [], publish=False)
        for part in (probe.token_ids[:-5], probe.token_ids[-5:]):
            plan = self.manager.allocate(table, len(part))
            assert plan is not None, "the plan holds at least one slab of blocks"
            logits = self.runner.run([Chunk(part, table, plan)])
            self.manager.commit(table, part)
        self.manager.free(table)
        self._give_back()
        probe.check(logits[0], kind)
