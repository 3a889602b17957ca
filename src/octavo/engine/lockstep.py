"""A step taken by several caches at once, and compared.

Every format has a cache of its own over one model. All of them compute the same tokens in the same step, beside
the unquantised one, so that no logits have to be kept: what is compared is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from octavo.engine.runner import Chunk, Runner
from octavo.errors import NumericalError
from octavo.formats import get_format
from octavo.kernels.native import NativeKernels
from octavo.kv.manager import KVCacheManager
from octavo.kv.planner import plan_cache
from octavo.kv.table import BlockTable
from octavo.models.prepare import PreparedModel
from octavo.spec import cdiv

REFERENCE = "fp32"

_MAX_ROWS = 256  # of one window in a step
_MAX_LOGITS = 1 << 24  # of one window in a step, 64 MiB
_SLICE_ROWS = 32  # compared at once, few enough to stay in the processor's cache


@dataclass(frozen=True, slots=True)
class FormatScore:
    """A format's figures at one context length and batch size.

    Attributes:
        bytes_per_token: of sealed keys and values in all layers, the format's scales included.
        size: `bytes_per_token` as a fraction of float32's.
        num_windows, num_tokens: windows of the text, and tokens that were predicted in them.
        perplexity, reference_perplexity: with the format, and with unquantised keys and values.
        mean_kld, p999_kld: Kullback-Leibler divergence from the unquantised distribution, in nats: the mean over
            all tokens, and what 99.9 % of them do not exceed. Infinite where a logit was not a number.
        same_top: fraction of the tokens whose likeliest successor is the same.
    """

    format: str
    context: int
    batch: int
    bytes_per_token: int
    size: float
    num_windows: int
    num_tokens: int
    perplexity: float
    reference_perplexity: float
    mean_kld: float
    p999_kld: float
    same_top: float


class FormatCache:
    """One format's pages and bookkeeping over a model that several share.

    Args:
        prepared: in float32, on the CPU.
        num_tokens, num_sequences: that it holds at the same time, at most.
    """

    def __init__(self, prepared: PreparedModel, name: str, num_tokens: int, num_sequences: int) -> None:
        spec = prepared.spec
        self.format = get_format(name, spec)
        kernels = NativeKernels(spec.group.page, spec.group.num_heads, torch.float32, self.format)
        # Address space: no more of it is touched than the tokens need.
        budget = 4 * num_tokens * spec.raw_bytes_per_token + (1 << 30)
        plan = plan_cache(spec, self.format, budget, num_sequences)
        self.bytes_per_token = plan.bytes_per_token
        self.size = plan.bytes_per_token / spec.raw_bytes_per_token
        self.vocab_size = int(prepared.model.config.vocab_size)
        prepared = replace(prepared, page_format=self.format, kernels=kernels)
        self._runner = Runner(prepared, plan, device="cpu", debug_fill=False)
        self._manager = KVCacheManager(num_blocks=plan.num_blocks, num_slots=plan.num_slots, max_tails=0)
        self._tables: list[BlockTable] = []

    def begin(self, num_sequences: int) -> None:
        """Starts as many sequences anew. Nothing that was computed before is found again."""
        for table in self._tables:
            self._manager.free(table)
        nothing = self._manager.match_prefix([], namespace=b"")
        self._tables = [self._manager.start(nothing, [], publish=False) for _ in range(num_sequences)]

    def step(self, parts: Sequence[Sequence[int]], num_rows: int) -> torch.Tensor:
        """Computes the next tokens of each sequence; logits `[num_rows, vocabulary]` of the first ones."""
        chunks = []
        for table, part in zip(self._tables, parts, strict=True):
            if part:
                plan = self._manager.allocate(table, len(part))
                assert plan is not None, "the plan was made for these tokens"
                chunks.append(Chunk(part, table, plan))
        logits = self._runner.run(chunks, torch.arange(num_rows))
        for chunk in chunks:
            self._manager.commit(chunk.table, chunk.token_ids)
        return logits


class Run:
    """Windows of one context, read by every cache in batches of one size.

    Args:
        windows: `[num_windows][context]` token ids; the last one of each is predicted and never read.
        companions: shorter ones, at most `batch - 1`, for the places in a batch that no window takes.
    """

    def __init__(self, windows: list[list[int]], companions: list[list[int]], batch: int) -> None:
        self._windows = windows
        self._companions = companions
        self._batch = batch
        self._length = len(windows[0]) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens that one cache computes."""
        return sum(self._group_sizes())

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that one cache holds at the same time, at most."""
        return max(self._group_sizes())

    def scores(self, caches: list[FormatCache], count: Callable[[int], None]) -> Iterator[FormatScore]:
        """The score of every cache but the first, which is the one to compare with.

        Args:
            count: is told how many tokens a cache has computed.

        Raises:
            NumericalError: the first cache's logits are not numbers.
        """
        reference, *others = [_Tally(cache, len(self._windows), self._length) for cache in caches]
        for first, num_windows, companions in self._groups():
            for cache in caches:
                cache.begin(num_windows + len(companions))
            for parts, pieces in self._steps(first, num_windows, companions, caches[0].vocab_size):
                num_rows = num_windows * len(parts[0])
                log_probs = reference.cache.step(parts, num_rows)
                for piece in pieces:
                    log_probs[piece.rows] = torch.log_softmax(log_probs[piece.rows], dim=1)
                    reference.add(piece, log_probs[piece.rows])
                count(sum(map(len, parts)))
                for tally in others:
                    logits = tally.cache.step(parts, num_rows)
                    for piece in pieces:
                        tally.add(piece, torch.log_softmax(logits[piece.rows], dim=1), log_probs[piece.rows])
                    count(sum(map(len, parts)))
        if not reference.nll.isfinite().all():
            raise NumericalError(
                "The model's logits are not numbers even with unquantised keys and values, so formats cannot be "
                "compared. Check its weights."
            )
        for tally in others:
            yield tally.score(reference, self._length + 1, self._batch)

    def _groups(self) -> Iterator[tuple[int, int, list[list[int]]]]:
        """What runs together: the first window's index, the number of windows, and the companions."""
        for first in range(0, len(self._windows), self._batch):
            num_windows = min(self._batch, len(self._windows) - first)
            yield first, num_windows, self._companions[: self._batch - num_windows]

    def _group_sizes(self) -> list[int]:
        return [self._length * windows + sum(map(len, others)) for _, windows, others in self._groups()]

    def _steps(
        self, first: int, num_windows: int, companions: list[list[int]], vocab_size: int
    ) -> Iterator[tuple[list[list[int]], list[_Piece]]]:
        """Each step's tokens, windows first, and the pieces in which its logits are compared.

        A window is cut alike in every batch, so that its figures can be equal in every bit.
        """
        windows = self._windows[first : first + num_windows]
        most = min(_MAX_ROWS, max(_SLICE_ROWS, _MAX_LOGITS // vocab_size))
        num_steps = cdiv(self._length, most)
        for step in range(num_steps):
            start, end = step * most, min((step + 1) * most, self._length)
            parts = [window[start:end] for window in windows]
            # A companion is spread over all steps.
            parts += [
                lane[len(lane) * step // num_steps : len(lane) * (step + 1) // num_steps]
                for lane in companions
            ]
            pieces = []
            for index, window in enumerate(windows):
                for begin in range(start, end, _SLICE_ROWS):
                    stop = min(begin + _SLICE_ROWS, end)
                    row = index * (end - start) + begin - start
                    targets = torch.tensor(window[begin + 1 : stop + 1])
                    pieces.append(
                        _Piece(slice(row, row + stop - begin), first + index, slice(begin, stop), targets)
                    )
            yield parts, pieces


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some rows of a step's logits, their place in a window, and the tokens that follow there."""

    rows: slice
    window: int
    positions: slice
    targets: torch.Tensor


class _Tally:
    """What is kept of every predicted token: three numbers."""

    def __init__(self, cache: FormatCache, num_windows: int, num_tokens: int) -> None:
        self.cache = cache
        self.nll = torch.zeros((num_windows, num_tokens), dtype=torch.float64)
        self.kld = torch.zeros_like(self.nll)
        self.top = torch.zeros((num_windows, num_tokens), dtype=torch.int64)

    def add(self, piece: _Piece, log_probs: torch.Tensor, reference: torch.Tensor | None = None) -> None:
        """Takes log-probabilities `[rows, vocabulary]`, and the unquantised ones to compare them with."""
        at = piece.window, piece.positions
        self.nll[at] = -log_probs.gather(1, piece.targets[:, None])[:, 0].double()
        self.top[at] = log_probs.argmax(dim=1)
        if reference is not None:
            self.kld[at] = (reference.exp() * (reference - log_probs)).sum(dim=1).double()

    def score(self, reference: _Tally, context: int, batch: int) -> FormatScore:
        kld, nll = (
            torch.where(numbers.isnan(), torch.inf, numbers).flatten() for numbers in (self.kld, self.nll)
        )
        return FormatScore(
            format=self.cache.format.name,
            context=context,
            batch=batch,
            bytes_per_token=self.cache.bytes_per_token,
            size=self.cache.size,
            num_windows=self.nll.shape[0],
            num_tokens=self.nll.numel(),
            perplexity=nll.mean().exp().item(),
            reference_perplexity=reference.nll.mean().exp().item(),
            # Rounding can leave a hair below zero where nothing differs.
            mean_kld=max(0.0, kld.mean().item()),
            p999_kld=max(0.0, kld.quantile(0.999, interpolation="higher").item()),
            same_top=(self.top == reference.top).double().mean().item(),
        )
