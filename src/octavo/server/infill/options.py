"""Settings of llama.cpp's interface as the engine's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.config import SamplingParams
from octavo.server.infill.schema import Llama
from octavo.server.openai.schema import stops_of
from octavo.server.problems import Problem
from octavo.server.tools.grammar import json_grammar

_SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
"""Applied when a request names none."""
_BIASES_OUT = -1e9
"""A bias that rules a token out: `false` in a request."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a request is answered.

    Attributes:
        engine: keywords for the engine beside the parameters.
        generates: False if the prompt is only read. One token is generated all the same, and dropped.
        indent, seconds: see `Ends`.
        fields: of the answer; None for all.
    """

    params: SamplingParams
    engine: dict[str, Any]
    generates: bool
    indent: int
    seconds: float
    slot: int
    samplers: tuple[str, ...]
    wants_tokens: bool
    fields: tuple[str, ...] | None

    @classmethod
    def of(cls, body: Llama, vocab_size: int, ends: Sequence[int] = ()) -> Options:
        """The options of a request; `ends` are tokens that end the answer besides the model's own.

        Raises:
            Problem, InvalidRequest: a value is out of range.
        """
        if body.grammar:
            raise Problem(
                400,
                "grammar is not supported, because it is in llama.cpp's own notation. Send json_schema.",
                "unsupported_value",
                "grammar",
            )
        samplers = tuple(
            _SAMPLERS if body.samplers is None or isinstance(body.samplers, str) else body.samplers
        )

        def if_named(sampler: str, value: float, off: float) -> float:
            return value if sampler in samplers else off

        params = SamplingParams(
            # Without its sampler the temperature is 1; below 0 it is 0.
            temperature=max(0.0, if_named("temperature", body.temperature, 1.0)),
            top_k=max(0, int(if_named("top_k", body.top_k, 0))),
            top_p=_share(if_named("top_p", body.top_p, 1.0)) or 1e-6,
            min_p=_share(if_named("min_p", body.min_p, 0.0)),
            repetition_penalty=if_named("penalties", body.repeat_penalty, 1.0),
            presence_penalty=if_named("penalties", body.presence_penalty, 0.0),
            frequency_penalty=if_named("penalties", body.frequency_penalty, 0.0),
            seed=body.seed if 0 <= body.seed < 2**32 - 1 else None,  # the largest stands for a random one
            logit_bias=_biases(body.logit_bias, vocab_size),
            max_tokens=1 if body.n_predict == 0 else body.n_predict if body.n_predict > 0 else None,
            stop=tuple(stop for stop in stops_of(body.stop) if stop),
            stop_token_ids=tuple(ends),
            ignore_eos=body.ignore_eos,
            logprobs=body.n_probs or None,
            n=body.n_cmpl if body.n_predict else 1,
        )
        engine: dict[str, Any] = {} if body.cache_prompt else {"ephemeral": True}
        if body.json_schema is not None:
            engine["grammar"] = json_grammar(body.json_schema, strict=False)
        return cls(
            params=params,
            engine=engine,
            generates=body.n_predict != 0,
            indent=body.n_indent,
            seconds=max(0.0, body.t_max_predict_ms / 1000),
            slot=body.id_slot,
            samplers=samplers,
            wants_tokens=body.return_tokens or body.stream,
            fields=None if body.response_fields is None else tuple(body.response_fields),
        )

    def wants(self, name: str) -> bool:
        """Whether a field is asked for."""
        return self.fields is None or any(field.partition("/")[0] == name for field in self.fields)

    def selected(self, result: dict[str, Any]) -> dict[str, Any]:
        """The fields that are asked for. `timings/prompt_n` is a field of that name; what there is not is left out."""
        if self.fields is None:
            return result
        found: dict[str, Any] = {}
        for name in self.fields:
            value: Any = result
            for part in name.split("/"):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                found[name] = value
        return found

    def settings(self, context: int, seed: int) -> dict[str, Any]:
        """The field `generation_settings`."""
        params = self.params
        return {
            "n_ctx": context,
            "n_predict": (-1 if params.max_tokens is None else params.max_tokens) if self.generates else 0,
            "n_indent": self.indent,
            "seed": seed,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repeat_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "stop": list(params.stop),
            "ignore_eos": params.ignore_eos,
            "n_probs": params.logprobs or 0,
            "samplers": list(self.samplers),
            "t_max_predict_ms": 1000 * self.seconds,
        }


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))


def _biases(given: Any, vocab_size: int) -> dict[int, float]:
    """`logit_bias`: pairs of a token id and a number, or of an id and false; or an object."""
    pairs = given.items() if isinstance(given, dict) else given or ()
    biases: dict[int, float] = {}
    for key, value in pairs:
        id_ = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10 else key
        if not isinstance(id_, int) or isinstance(id_, bool) or not 0 <= id_ < vocab_size:
            raise Problem(
                400,
                f"logit_bias has the token {str(key)[:40]!r}; tokens are ids from 0 to {vocab_size - 1}.",
                "invalid_value",
                "logit_bias",
            )
        if not isinstance(value, bool | int | float) or value is True or not abs(value) < 1e9:
            raise Problem(
                400,
                f"logit_bias of the token {id_} is {str(value)[:40]!r}; it must be a number, or false to rule it out.",
                "invalid_value",
                "logit_bias",
            )
        biases[id_] = _BIASES_OUT if value is False else float(value)
    return biases
