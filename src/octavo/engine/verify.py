"""What each cache format costs in quality: a model reads a text with it and with unquantised keys and values.

The arithmetic is float32, whatever an engine computes in, so that the format is all that differs. A token attends
to earlier blocks sealed and to its own block raw, as it always does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from octavo.engine.lockstep import REFERENCE, FormatCache, FormatScore, Run
from octavo.errors import InvalidRequest, NotEnoughMemory
from octavo.formats import FORMATS
from octavo.models.loaded import LoadedModel
from octavo.models.prepare import PreparedModel, prepare_model
from octavo.models.quiet import quiet_transformers

_COMPANION_TOKENS = 512

Progress = Callable[[str, int, int], None]
"""Called with `verify`, the tokens computed and the tokens in all, summed over formats."""


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """What is compared.

    Attributes:
        formats: to compare with unquantised keys and values.
        contexts: tokens of a window; longer ones than the model's are cut to its own.
        batches: how many sequences share a step. Where there are fewer windows than that, short stretches of
            the text stand beside them and are not counted. The figures do not depend on it, which they show.
        num_windows: of each context at most; `None` reads about 4,096 tokens, in 1 to 4 windows.

    Raises:
        InvalidRequest: there is no such format, or a number is too small.
    """

    formats: tuple[str, ...] = tuple(name for name in FORMATS if name != REFERENCE)
    contexts: tuple[int, ...] = (512, 2048, 8192)
    batches: tuple[int, ...] = (1, 4)
    num_windows: int | None = None

    def __post_init__(self) -> None:
        for name in self.formats:
            if name not in FORMATS:
                raise InvalidRequest(f"There is no cache format {name!r}. Choose from {', '.join(FORMATS)}.")
        for what, values, least in (
            ("context", self.contexts, 2),
            ("batch size", self.batches, 1),
            ("number of windows", (1 if self.num_windows is None else self.num_windows,), 1),
        ):
            if min(values) < least:
                raise InvalidRequest(f"A {what} is {min(values)}; it must be at least {least}.")

    def windows_of(self, context: int) -> int:
        """How many windows of a context are read at most."""
        return self.num_windows or max(1, min(4, 4096 // context))


@dataclass(frozen=True, slots=True)
class _Tokens:
    """A text's token ids, and what stands before every piece of it: the token that begins a text, if any."""

    token_ids: list[int]
    prefix: list[int]

    def windows(self, context: int, most: int) -> list[list[int]]:
        """At most `most` windows of `context` tokens, evenly spread over the whole windows of the text.

        Raises:
            InvalidRequest: the text is shorter than a window.
        """
        length = context - len(self.prefix)
        have = len(self.token_ids) // length
        if have == 0:
            raise InvalidRequest(
                f"The text has {len(self.token_ids):,} tokens and a window of {context:,} needs {length:,}. "
                "Give a longer text or a smaller context."
            )
        count = min(most, have)
        return [self._piece(index * have // count * length, length) for index in range(count)]

    def companion(self, context: int, place: int, batch: int) -> list[int]:
        """A short stretch of the text for a place in a batch that no window takes."""
        length = min(context, _COMPANION_TOKENS) - len(self.prefix)
        return self._piece((len(self.token_ids) - length) * place // batch, length)

    def _piece(self, start: int, length: int) -> list[int]:
        return self.prefix + self.token_ids[start : start + length]


def _tokenise(tokenizer: Any, text: str) -> _Tokens:
    """Token ids of a text. Every piece of it will begin as the tokenizer lets a text begin."""
    with quiet_transformers():  # it would warn that the text is longer than the model's window
        token_ids = tokenizer.encode(text, add_special_tokens=False)
    bos = tokenizer.bos_token_id
    return _Tokens(token_ids, [bos] if bos is not None and tokenizer.encode("a")[0] == bos else [])


def default_text() -> str:
    """The text that the package carries; `octavo/data/README.md` says where it is from."""
    return (Path(__file__).parents[1] / "data" / "persuasion.txt").read_text(encoding="utf-8")


def recommend(scores: Iterable[FormatScore], max_kld: float) -> str | None:
    """The smallest format whose mean divergence is at most `max_kld` wherever it was measured.

    Of two that take as many bytes, the one that diverges less.
    """
    worst: dict[str, tuple[int, float]] = {}
    for score in scores:
        _, kld = worst.get(score.format, (0, 0.0))
        worst[score.format] = score.bytes_per_token, max(kld, score.mean_kld)
    good = {name: cost for name, cost in worst.items() if cost[1] <= max_kld}
    return min(good, key=good.__getitem__, default=None)


@torch.inference_mode()
def verify(
    loaded: LoadedModel, text: str, settings: VerifySettings, progress: Progress | None = None
) -> list[FormatScore]:
    """Compares formats of the cache with unquantised keys and values, on the CPU.

    Args:
        loaded: in float32; is taken over and changed in place.
        text: is cut into windows of each context, and a sample of them, evenly spread, is read.

    Returns:
        A score for each context, batch size and format, in this order.

    Raises:
        InvalidRequest: the text has no whole window.
        UnsupportedModel: see `prepare_model`.
        NotEnoughMemory: the caches do not fit beside each other.
        NumericalError: the model computes no numbers even with unquantised keys and values.
    """
    contexts = dict.fromkeys(min(context, loaded.context_length) for context in settings.contexts)
    tokens = _tokenise(loaded.tokenizer, text)
    runs = [
        Run(windows, [tokens.companion(context, place, batch) for place in range(1, batch)], batch)
        for context in contexts
        for windows in [tokens.windows(context, settings.windows_of(context))]
        for batch in dict.fromkeys(settings.batches)
    ]
    prepared = prepare_model(loaded, kv_format=REFERENCE, context=max(contexts))
    most = max(run.num_cached_tokens for run in runs)
    names = (REFERENCE, *dict.fromkeys(settings.formats))
    caches = [FormatCache(prepared, name, most, max(settings.batches)) for name in names]
    _check_memory(caches, most)
    _check_probe(prepared, caches[0])
    total = sum(run.num_tokens for run in runs) * len(caches)
    done = 0

    def count(num_tokens: int) -> None:
        nonlocal done
        done += num_tokens
        if progress is not None:
            progress("verify", done, total)

    return [score for run in runs for score in run.scores(caches, count)]


def _check_memory(caches: list[FormatCache], num_tokens: int) -> None:
    need = num_tokens * sum(cache.bytes_per_token for cache in caches)
    free = psutil.virtual_memory().available
    if need > free:
        raise NotEnoughMemory(
            f"The caches of {len(caches)} formats with {num_tokens:,} tokens each take {need:,} bytes, and {free:,} "
            "are free. Take a shorter context, a smaller batch, or fewer formats."
        )


def _check_probe(prepared: PreparedModel, cache: FormatCache) -> None:
    """Compares a model of a family that the tests do not cover with transformers' own."""
    if prepared.probe is not None:
        cache.begin(1)
        logits = cache.step([prepared.probe.token_ids], len(prepared.probe.token_ids))
        prepared.probe.check(logits[-1], prepared.model.config.model_type)
