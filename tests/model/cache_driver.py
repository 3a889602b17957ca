"""Drives a prepared model through the cache by hand, without an engine: logits of every token."""

from __future__ import annotations

import torch

from octavo.engine.runner import Chunk, Runner
from octavo.kv.manager import BlockTable, KVCacheManager
from octavo.kv.planner import plan_cache
from octavo.models.loaded import LoadedModel
from octavo.models.prepare import prepare_model

NAMESPACE = b"n" * 32


class CacheDriver:
    """A model, its pages and its manager. Fresh memory is NaN."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        kernels: str = "auto",
        kv_format: str = "raw",
        budget_bytes: int = 64 << 20,
    ) -> None:
        self.prepared = prepare_model(loaded, kernels=kernels, kv_format=kv_format)
        spec = self.prepared.spec
        plan = plan_cache(spec, self.prepared.page_format, budget_bytes, max_running=8)
        self.runner = Runner(self.prepared, plan, device="cpu", debug_fill=True)
        self.manager = KVCacheManager(
            num_blocks=plan.num_blocks, num_slots=plan.num_slots, max_tails=plan.max_tails
        )

    def start(self, token_ids: list[int]) -> BlockTable:
        match = self.manager.match_prefix(token_ids, namespace=NAMESPACE)
        return self.manager.start(match, token_ids)

    @torch.inference_mode()
    def step(self, *parts: tuple[BlockTable, list[int]]) -> torch.Tensor:
        """Computes new tokens of some tables in one packed step; logits of each one's last token."""
        chunks = []
        for table, token_ids in parts:
            plan = self.manager.allocate(table, len(token_ids))
            assert plan is not None
            chunks.append(Chunk(token_ids, table, plan))
        logits = self.runner.run(chunks)
        for chunk in chunks:
            self.manager.commit(chunk.table, chunk.token_ids)
        self.manager.check_integrity()
        return logits

    def feed(self, table: BlockTable, token_ids: list[int], chunk: int) -> torch.Tensor:
        """Computes `token_ids` in chunks; logits `[steps, vocabulary]` of each chunk's last token."""
        return torch.cat(
            [self.step((table, token_ids[i : i + chunk])) for i in range(0, len(token_ids), chunk)]
        )
