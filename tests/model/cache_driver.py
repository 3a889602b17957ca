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
        fuse: bool = True,
        kv_format: str = "raw",
        budget_bytes: int = 8 << 20,
    ) -> None:
        self.prepared = prepare_model(loaded, kernels=kernels, kv_format=kv_format, fuse=fuse)
        spec = self.prepared.spec
        plan = plan_cache(spec, self.prepared.page_format, budget_bytes, max_running=8)
        self.runner = Runner(self.prepared, plan, device="cpu", debug_fill=True)
        self.manager = KVCacheManager(
            num_blocks=plan.num_blocks, num_slots=plan.num_slots, max_tails=plan.max_tails
        )

    def start(self, token_ids: list[int], *, cache: bool = True) -> BlockTable:
        """A table with what the cache has of a prompt; without `cache` it takes nothing and leaves nothing."""
        match = self.manager.match_prefix(token_ids if cache else [], namespace=NAMESPACE)
        return self.manager.start(match, token_ids if cache else [], publish=cache)

    def step(self, *parts: tuple[BlockTable, list[int]]) -> torch.Tensor:
        """Computes new tokens of some tables in one packed step; logits of each one's last token."""
        chunks = self.allocate(*parts)
        logits = self._run(chunks)
        self._commit(chunks)
        return logits

    def step_rows(self, *parts: tuple[BlockTable, list[int]]) -> list[torch.Tensor]:
        """`step` with the logits of every new token: for each table `[tokens, vocabulary]`."""
        chunks = self.allocate(*parts)

        num_rows = sum(len(chunk.token_ids) for chunk in chunks)
        logits = self._run(chunks, torch.arange(num_rows))
        self._commit(chunks)
        return list(logits.split([len(chunk.token_ids) for chunk in chunks]))

    def allocate(self, *parts: tuple[BlockTable, list[int]]) -> list[Chunk]:
        """Makes room for a step, which is then under way."""
        chunks = []
        for table, token_ids in parts:
            plan = self.manager.allocate(table, len(token_ids))
            assert plan is not None
            chunks.append(Chunk(token_ids, table, plan))
        return chunks

    def feed(self, table: BlockTable, token_ids: list[int], chunk: int) -> torch.Tensor:
        """Computes `token_ids` in chunks; logits `[steps, vocabulary]` of each chunk's last token."""
        return torch.cat(
            [self.step((table, token_ids[i : i + chunk])) for i in range(0, len(token_ids), chunk)]
        )

    @torch.inference_mode()
    def _run(self, chunks: list[Chunk], rows: torch.Tensor | None = None) -> torch.Tensor:
        return self.runner.run(chunks, rows).clone()

    def _commit(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            self.manager.commit(chunk.table, chunk.token_ids)
        self.manager.check_integrity()
