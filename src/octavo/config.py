"""Frozen settings of an engine and of a request. Checked when made, never changed after."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Literal, get_args

from octavo.errors import InvalidRequest

DtypeChoice = Literal["auto", "bf16", "fp32"]
WeightsChoice = Literal["auto", "bf16", "fp32", "int8", "int4"]
OverflowChoice = Literal["stop", "drop-oldest"]

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?\s*", re.IGNORECASE)
_SCALE = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(text: str | int) -> int:
    """Bytes in `text`: a number, or a number with K, M, G or T (powers of 1024; `GB`, `GiB` alike).

    Raises:
        InvalidRequest: `text` is not a size.
    """
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise InvalidRequest(
            f"{text!r} is not a size. Write a number of bytes, or for example 512MiB or 4GiB."
        )
    return int(float(match[1]) * _SCALE[match[2].lower()])


def refuse_unknown(names: Iterable[str], known: Collection[str], what: str) -> None:
    """Checks that all names are known.

    Raises:
        InvalidRequest: one is not; the message has the one that is spelled most alike, or else all.
    """
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            advice = f"Did you mean {close[0]}?" if close else f"There are {', '.join(known)}."
            raise InvalidRequest(f"There is no {what} {name!r}. {advice}")


def _check_kinds(settings: Any, kinds: Mapping[str, tuple[str, ...]], optional: Collection[str]) -> None:
    """Checks the types of a settings object's values; `kinds` lists the settings of each kind."""
    for kind, names in kinds.items():
        for name in names:
            value = getattr(settings, name)
            if value is None and name in optional:
                continue
            if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "True or False"):
                either = ", or None" if name in optional else ""
                raise InvalidRequest(
                    f"{name} is {value!r}, of type {type(value).__name__}; it must be {kind}{either}."
                )


_TYPES = {"an integer": Integral, "a number": Real, "True or False": bool, "a string": str}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of an engine.

    Attributes:
        dtype: compute dtype; `auto` takes bf16 where the CPU has it in hardware, else fp32.
        weights: how weights are held. `auto` leaves a GGUF file's packed as they are, and takes the compute dtype for
            all others; `bf16` and `fp32` are dense, also of a GGUF file, and are then the compute dtype too; `int8`
            and `int4` quantise linear layers with dense weights when the model is loaded.
        kv_memory_bytes: budget of the key-value cache (`Engine`: `kv_memory`); `None` takes a share of free memory.
        kv_disk_bytes: what keys and values may take on disk (`Engine`: `kv_disk`); 0 keeps them off it.
        kv_format: how sealed blocks are encoded: `int8`, `k8v4`, `int4`, `bf16`, `fp32`, or `raw` for the compute
            dtype. It has nothing to do with the precision of the weights.
        context: tokens of the context window; `None` takes the model's own.
        cache: `False` computes the whole sequence again at every token, under the same numeric rules.
        device: a torch device; on `cpu` the native kernels run, elsewhere the reference ones.
        threads: threads of a step; `None` leaves torch's own number.
        max_running: sequences that run at once.
        max_step_tokens: tokens computed in one step, decodes and prefill chunks together.
        kernels: `auto`, or `reference` to force the plain torch oracle.
        fuse: run a decoder's layers as one native call where its structure is known; `False` runs the modules of
            transformers one by one.
        speculate: `auto` computes tokens that earlier text makes likely beside the one that is due, where it pays; the
            answers are the same. `off` does not.
        debug_fill: fill fresh cache memory with NaN, so that a read before a write is seen.
    """

    dtype: DtypeChoice = "auto"
    weights: WeightsChoice = "auto"
    kv_memory_bytes: int | None = None
    kv_disk_bytes: int = 0
    kv_format: str = "int8"
    context: int | None = None
    cache: bool = True
    device: str = "cpu"
    threads: int | None = None
    max_running: int = 16
    max_step_tokens: int = 512
    kernels: Literal["auto", "native", "reference"] = "auto"
    fuse: bool = True
    speculate: Literal["auto", "off"] = "auto"
    debug_fill: bool = False

    def __post_init__(self) -> None:
        kinds = {
            "an integer": (
                *("kv_memory_bytes", "kv_disk_bytes"),
                *("context", "threads", "max_running", "max_step_tokens"),
            ),
            "a string": ("dtype", "weights", "kv_format", "device", "kernels", "speculate"),
            "True or False": ("cache", "fuse", "debug_fill"),
        }
        _check_kinds(self, kinds, optional=("kv_memory_bytes", "context", "threads"))
        if self.kernels not in ("auto", "native", "reference"):
            raise InvalidRequest(f"kernels is {self.kernels!r}; it must be auto, native or reference.")
        if self.speculate not in ("auto", "off"):
            raise InvalidRequest(f"speculate is {self.speculate!r}; it must be auto or off.")
        check_weights(self.weights, self.dtype, self.device)
        for name in ("context", "threads", "kv_memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequest(f"{name} is {value}; it must be at least 1.")
        if self.kv_disk_bytes < 0:
            raise InvalidRequest(f"kv_disk_bytes is {self.kv_disk_bytes}; it must be 0 (off) or more.")
        for name in ("max_running", "max_step_tokens"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; it must be at least 1.")


def check_weights(weights: str, dtype: str, device: str = "cpu") -> None:
    """Checks that weights can be held as asked.

    Raises:
        InvalidRequest: there is no such choice, or it contradicts the compute dtype or the device.
    """
    if weights not in get_args(WeightsChoice):
        raise InvalidRequest(f"weights is {weights!r}; it must be auto, bf16, fp32, int8 or int4.")
    if weights in ("bf16", "fp32") and dtype not in ("auto", weights):
        raise InvalidRequest(
            f"weights is {weights} and dtype is {dtype}, and dense weights are held in the dtype that computes. Give "
            "both the same, or leave one of them out."
        )
    if weights in ("int8", "int4") and device != "cpu":
        raise InvalidRequest(
            f"weights is {weights} and device is {device}, and packed weights are multiplied on the CPU only. Use "
            "weights bf16 or fp32 there."
        )


@dataclass(frozen=True, slots=True)
class Retention:
    """How long what a request has computed is worth keeping.

    Attributes:
        pin: a name under which its blocks are held in memory, in place of those that the name held before.
        ttl_s: seconds after which a pin lets go, and blocks leave memory first and are not loaded any more.
        priority: from -4 to 4; each step makes blocks count as four times as likely to be used again.

    Raises:
        InvalidRequest: a value is out of range.
    """

    pin: str | None = None
    ttl_s: float | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        kinds = {"a string": ("pin",), "a number": ("ttl_s",), "an integer": ("priority",)}
        _check_kinds(self, kinds, optional=("pin", "ttl_s"))
        if self.ttl_s is not None and not 0 < self.ttl_s < math.inf:
            raise InvalidRequest(f"ttl_s is {self.ttl_s}; it must be above 0.")
        if not -4 <= self.priority <= 4:
            raise InvalidRequest(f"priority is {self.priority}; it must be from -4 to 4.")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen.

    Attributes:
        temperature: 0 takes the most likely token.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches it.
        min_p: keep tokens at least this share as likely as the most likely one.
        repetition_penalty: divides (or multiplies, below zero) the logits of tokens already seen.
        presence_penalty: subtracted once from tokens already generated.
        frequency_penalty: subtracted for each time a token was generated.
        logit_bias: token id -> added to its logit.
        seed: of the noise; `None` draws one and reports it.
        max_tokens: tokens to generate at most; `None` fills the context window.
        stop: strings that end the answer; they are not part of it.
        stop_token_ids: ids that end the answer, besides the model's own end tokens.
        ignore_eos: go on past the model's end tokens.
        logprobs: how many alternatives to report per token; 0 reports the chosen token's alone,
            `None` reports nothing.
        n: answers to one prompt, which is computed once.
        best_of: answers that are drawn; the `n` whose tokens have the highest mean log-probability are returned, all
            of them at the end.
        beams: above 1, the `n` best answers of a search with so many beams, returned at the end.
        length_penalty: an answer of the search is ranked by the sum of its log-probabilities over its number of
            tokens to this power: above 1 favours long ones, 0 the likeliest.

    Raises:
        InvalidRequest: a value is out of range, or contradicts another; the message names it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] | str = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    best_of: int | None = None
    beams: int = 1
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        kinds = {
            "an integer": ("top_k", "seed", "max_tokens", "logprobs", "n", "best_of", "beams"),
            "a number": (
                *("temperature", "top_p", "min_p"),
                *("repetition_penalty", "presence_penalty", "frequency_penalty", "length_penalty"),
            ),
            "True or False": ("ignore_eos",),
        }
        _check_kinds(self, kinds, optional=("seed", "max_tokens", "logprobs", "best_of"))
        stop = self._tuple("stop", str, "a string or several")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", self._tuple("stop_token_ids", Integral, "token ids"))
        try:
            bias = {int(key): float(value) for key, value in self.logit_bias.items()}
        except (AttributeError, TypeError, ValueError):
            raise InvalidRequest(
                f"logit_bias is {self.logit_bias!r}; it must be a dictionary of numbers by token id."
            ) from None
        object.__setattr__(self, "logit_bias", MappingProxyType(bias))
        checks = (
            ("temperature", self.temperature, 0 <= self.temperature < math.inf, "0 or more"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (off) or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "from 0 to 1"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                0 < self.repetition_penalty < math.inf,
                "above 0",
            ),
            ("presence_penalty", self.presence_penalty, math.isfinite(self.presence_penalty), "finite"),
            ("frequency_penalty", self.frequency_penalty, math.isfinite(self.frequency_penalty), "finite"),
            ("max_tokens", self.max_tokens, self.max_tokens is None or self.max_tokens >= 1, "1 or more"),
            ("logprobs", self.logprobs, self.logprobs is None or 0 <= self.logprobs <= 128, "from 0 to 128"),
            ("n", self.n, 1 <= self.n <= 128, "from 1 to 128"),
            ("best_of", self.best_of, self.best_of is None or self.n <= self.best_of <= 128, "from n to 128"),
            ("beams", self.beams, 1 <= self.beams <= 128, "from 1 to 128"),
            ("length_penalty", self.length_penalty, math.isfinite(self.length_penalty), "finite"),
        )
        for name, value, valid, wanted in checks:
            if not valid:
                raise InvalidRequest(f"{name} is {value}; it must be {wanted}.")
        if self.beams > 1:
            self._check_beams()
        if any(not text for text in stop):
            raise InvalidRequest(
                "A stop string is empty; leave it out or write the text that ends the answer."
            )
        if any(math.isnan(value) for value in self.logit_bias.values()):
            raise InvalidRequest("A logit bias is not a number.")

    def __reduce__(self) -> tuple[Any, ...]:
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return partial(SamplingParams, **{**values, "logit_bias": dict(self.logit_bias)}), ()

    @property
    def width(self) -> int:
        """Sequences that the request takes at once."""
        return max(self.n, self.best_of or 1, self.beams)

    def _check_beams(self) -> None:
        for name, wrong, rule in (
            ("temperature", self.temperature != 0, "0: a search draws nothing"),
            ("n", self.n > self.beams, f"at most the {self.beams} beams"),
            ("best_of", self.best_of is not None, "left out"),
            ("stop", bool(self.stop), "left out; stop_token_ids end an answer of a search"),
        ):
            if wrong:
                raise InvalidRequest(
                    f"{name} is {getattr(self, name)} and beams is {self.beams}; {name} must be {rule}."
                )

    def _tuple(self, name: str, kind: type, wanted: str) -> tuple[Any, ...]:
        """The values of a setting that takes several; a single string is one of them."""
        value = getattr(self, name)
        values = (value,) if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
        if not all(isinstance(item, kind) for item in values):
            raise InvalidRequest(f"{name} is {value!r}; it must be {wanted}.")
        return values
