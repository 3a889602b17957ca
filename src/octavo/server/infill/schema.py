"""Requests and answers of llama.cpp's interface: `/completion` and `/infill`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, RootModel

from octavo.server.schema import MAX_STOPS, Schema

_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_Mixed = list[_TokenId | str]
_Number = Annotated[float, Field(ge=-(2.0**31), lt=2.0**31)]


def _milliseconds(value: Any) -> Any:
    """Plugins send numbers in a setting's form, which may be a float or a string of digits."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        return int(value)
    return value


Milliseconds = Annotated[float, BeforeValidator(_milliseconds), Field(ge=-1, lt=2.0**31)]


class Llama(Schema):
    """What both have in common. `n_predict` -1 goes on to the window's end, and 0 only reads the prompt.

    `samplers` names what is applied to the logits; what it leaves out is not. Those that Octavo does not have
    (`dry`, `typ_p`, `xtc`, `infill`, mirostat) are passed over, as are `id_slot` and `t_max_prompt_ms`: there are no
    slots, and a prompt is always read to its end. With `cache_prompt` false nothing is kept of the request.
    """

    model: str | None = None
    n_predict: Annotated[int, Field(ge=-2, lt=2**31)] = -1
    n_indent: Annotated[int, Field(ge=0, lt=2**31)] = 0
    n_cmpl: Annotated[int, Field(ge=1, le=128)] = 1
    stream: bool = False
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    temperature: _Number = 0.8
    top_k: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 40
    top_p: _Number = 0.95
    min_p: _Number = 0.05
    repeat_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = -1
    samplers: Annotated[list[str], Field(max_length=32)] | str | None = None
    ignore_eos: bool = False
    logit_bias: (
        dict[str, float | bool] | list[Annotated[list[Any], Field(min_length=2, max_length=2)]] | None
    ) = None
    n_probs: Annotated[int, Field(ge=0, le=128)] = 0
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    return_tokens: bool = False
    response_fields: Annotated[list[str], Field(max_length=64)] | None = None
    cache_prompt: bool = True
    id_slot: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    t_max_predict_ms: Milliseconds = 0
    t_max_prompt_ms: Milliseconds = 0


class LlamaCompletionRequest(Llama):
    """Text, token ids, or both mixed; or a list of such prompts, which gives a list of answers."""

    prompt: str | _Mixed | Annotated[list[str | _Mixed], Field(min_length=1, max_length=256)]


class ExtraPiece(Schema):
    """A piece of another file."""

    text: str = ""
    filename: str = "tmp"


class InfillRequest(Llama):
    """Text with a gap. `prompt` is what stands directly before it, and grows while somebody types."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraPiece], Field(default_factory=list, max_length=4096)]
    prompt: str = ""


class Times(Schema):
    """Tokens and milliseconds; `cache_n` of the prompt were known already."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class LlamaCompletion(Schema):
    """An answer. With `response_fields` it has these alone, those with a slash under their whole name."""

    index: int = 0
    content: str = ""
    tokens: list[int] = Field(default_factory=list)
    id_slot: int = -1
    stop: bool = True
    model: str = ""
    tokens_predicted: int = 0
    tokens_evaluated: int = 0
    generation_settings: dict[str, Any] = Field(default_factory=dict)
    prompt: str = ""
    has_new_line: bool = False
    truncated: bool = False
    stop_type: Literal["eos", "limit", "word"] = "limit"
    stopping_word: str = ""
    tokens_cached: int = 0
    timings: Times | None = None
    completion_probabilities: list[dict[str, Any]] = Field(default_factory=list)


class LlamaCompletions(RootModel[LlamaCompletion | list[LlamaCompletion]]):
    """One answer, or a list where several prompts or several answers were asked for."""
