"""What approximate reuse behind an edit saves and costs: a long prompt is changed in places, and read both ways."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from octavo.engine.edits import Edits
from octavo.engine.runner import Chunk, Runner
from octavo.errors import InvalidRequest
from octavo.kv.manager import KVCacheManager
from octavo.kv.planner import plan_cache
from octavo.models.loaded import LoadedModel
from octavo.models.prepare import PreparedModel, prepare_model

SHARES = (0.25, 0.5, 0.9)
_REMOVED, _INSERTED = 12, 20
"""Tokens that an edit takes out, and puts in."""
_NUM_ROWS = 64
"""Tokens behind the prompt whose predictions are compared."""
_MIN_TOKENS = 512
_STEP = 512
_NAMESPACE = b"edits"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class EditScore:
    """One edit, read one way.

    Attributes:
        share: of the prompt that stands before the edit.
        recompute: tokens computed at the beginning of what is taken over; None where all is computed.
        ttft_s: seconds until the prompt is read.
        mean_kld, p99_kld: Kullback-Leibler divergence from the exact predictions behind the prompt, in nats.
        same_top: fraction of these whose likeliest token is the same.
    """

    share: float
    recompute: int | None
    num_tokens: int
    computed_tokens: int
    ttft_s: float
    mean_kld: float
    p99_kld: float
    same_top: float


class _Reader:
    """A model and a cache that holds the prompts of one edit."""

    def __init__(self, prepared: PreparedModel, num_tokens: int) -> None:
        budget = 4 * num_tokens * prepared.spec.raw_bytes_per_token + (1 << 30)  # address space
        plan = plan_cache(prepared.spec, prepared.page_format, budget, 4)
        self._runner = Runner(prepared, plan, device="cpu", debug_fill=False)
        self._manager = KVCacheManager(num_blocks=plan.num_blocks, num_slots=plan.num_slots, max_tails=0)
        self.edits = Edits(self._manager, self._runner, prepared)

    @torch.inference_mode()
    def read(
        self, ids: Sequence[int], behind: Sequence[int], recompute: int | None, *, publish: bool = False
    ) -> tuple[float, int, torch.Tensor]:
        """Reads a prompt, and what comes behind it.

        Returns:
            Seconds for the prompt, how many of its tokens were computed, and log-probabilities `[rows, vocabulary]` of
            what comes behind.
        """
        began_s, computed = time.perf_counter(), 0
        match = self._manager.match_prefix(ids, namespace=_NAMESPACE)
        table = self._manager.start(match, ids, publish=publish)
        plan = None if recompute is None else self.edits.plan(table, ids, recompute)
        logits, seconds = torch.empty(0), 0.0
        whole = [*ids, *behind]
        while table.num_tokens < len(whole):
            most = _STEP if plan is None else self.edits.advance(plan, table, whole, _STEP)
            count = min(most, (len(ids) if table.num_tokens < len(ids) else len(whole)) - table.num_tokens)
            room = self._manager.allocate(table, count)
            assert room is not None, "the cache was made for these tokens"
            part = whole[table.num_tokens : table.num_tokens + count]
            reads = table.num_tokens < len(ids)
            rows = [count - 1] if reads else list(range(count))
            logits = self._runner.run([Chunk(part, table, room)], torch.tensor(rows))
            self._manager.commit(table, part)
            computed += count if reads else 0
            seconds = time.perf_counter() - began_s if reads else seconds
        if plan is not None:
            self.edits.drop(plan)
        self._manager.free(table)
        return seconds, computed, torch.log_softmax(logits, dim=1)


def verify_edits(
    loaded: LoadedModel,
    text: str,
    *,
    num_tokens: int = 8000,
    recomputes: Sequence[int] = (32, 64, 256),
    kv_format: str = "int8",
    progress: Progress | None = None,
) -> list[EditScore]:
    """Reads prompts of `num_tokens` tokens that were changed in one place, exactly and approximately.

    Args:
        loaded: taken over and changed in place.
        recomputes: how many tokens are computed at the beginning of what is taken over.

    Raises:
        InvalidRequest: the model's keys cannot be turned, or text or window are too short.
    """
    num_tokens = min(num_tokens, loaded.context_length - _NUM_ROWS - _INSERTED)
    ids = loaded.tokenizer.encode(text)
    needed = num_tokens + _NUM_ROWS + _INSERTED
    if num_tokens < _MIN_TOKENS:
        raise InvalidRequest(
            f"A prompt of {num_tokens:,} tokens is too short to be edited: {_MIN_TOKENS} are needed at least. Give "
            "longer --contexts, to a model whose window has them."
        )
    if len(ids) < needed:
        raise InvalidRequest(
            f"The text has {len(ids):,} tokens, and {needed:,} are needed. Give a longer text, or shorter --contexts."
        )
    prompt, behind = ids[:num_tokens], ids[num_tokens : num_tokens + _NUM_ROWS]
    other = ids[num_tokens + _NUM_ROWS :][:_INSERTED]
    prepared = prepare_model(loaded, kv_format=kv_format)
    scores = []
    done, total = 0, len(SHARES) * (2 + len(recomputes))
    for share in SHARES:
        at = int(share * num_tokens)
        edited = [*prompt[:at], *other, *prompt[at + _REMOVED :]]
        reader = _Reader(prepared, 2 * (num_tokens + 2 * _NUM_ROWS))
        reader.edits.check()
        reader.read(prompt, [], None, publish=True)
        exact: torch.Tensor | None = None
        for recompute in (None, *recomputes):
            done += 1
            if progress is not None:
                progress("verify", done, total)
            seconds, computed, found = reader.read(edited, behind, recompute)
            exact = found if exact is None else exact
            kld = (exact.exp() * (exact - found)).sum(dim=1).clamp(min=0)
            same = (exact.argmax(dim=1) == found.argmax(dim=1)).float().mean()
            scores.append(
                EditScore(
                    share,
                    recompute,
                    len(edited),
                    computed,
                    seconds,
                    float(kld.mean()),
                    float(kld.quantile(0.99)),
                    float(same),
                )
            )
    return scores
