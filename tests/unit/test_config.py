"""Settings: a wrong name, type or value is told with the setting, the value and what is wanted."""

from __future__ import annotations

import re
from typing import Any

import pytest

from octavo.config import EngineConfig, SamplingParams, parse_bytes
from octavo.engine.engine import TokenEngine, make_params
from octavo.engine.messages import Progress
from octavo.errors import InvalidRequest


@pytest.mark.parametrize(
    ("sampling", "sentence"),
    [
        ({"max_tokens": "3"}, "max_tokens is '3', of type str; it must be an integer, or None."),
        ({"temperature": "hot"}, "temperature is 'hot', of type str; it must be a number."),
        ({"top_k": 1.5}, "top_k is 1.5, of type float; it must be an integer."),
        ({"n": True}, "n is True, of type bool; it must be an integer."),
        ({"n": None}, "n is None, of type NoneType; it must be an integer."),
        ({"ignore_eos": 1}, "ignore_eos is 1, of type int; it must be True or False."),
        ({"stop": 3}, "stop is 3; it must be a string or several."),
        ({"stop": ["a", 3]}, "stop is ['a', 3]; it must be a string or several."),
        ({"stop_token_ids": ["a"]}, "stop_token_ids is ['a']; it must be token ids."),
        ({"logit_bias": [1]}, "logit_bias is [1]; it must be a dictionary of numbers by token id."),
        ({"logit_bias": {1: "x"}}, "logit_bias is {1: 'x'}; it must be a dictionary of numbers by token id."),
        ({"top_p": 0}, "top_p is 0; it must be above 0 and at most 1."),
        ({"max_new_tokens": 3}, "There is no sampling setting 'max_new_tokens'. Did you mean max_tokens?"),
        ({"colour": 1}, "There is no sampling setting 'colour'. There are temperature, top_k,"),
    ],
)
def test_a_wrong_sampling_setting_is_named_with_its_value(sampling: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(sentence)):
        make_params(sampling)


def test_what_is_like_a_number_is_one() -> None:
    import numpy as np

    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(4), seed=None, stop_token_ids=(np.int64(7),)
    )
    assert (params.temperature, params.top_k, params.stop_token_ids) == (0.5, 4, (7,))
    assert SamplingParams(temperature=1, stop="x").stop == ("x",)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"foo": 1}, "There is no engine setting 'foo'. There are dtype, weights,"),
        ({"kv_memory_bytes": 4}, "There is no engine setting 'kv_memory_bytes'. Did you mean kv_memory?"),
        ({"thread": 2}, "There is no engine setting 'thread'. Did you mean threads?"),
        ({"context": "3"}, "context is '3', of type str; it must be an integer, or None."),
        ({"kv_memory": 1.5}, "1.5 is not a size."),
        ({"cache": None}, "cache is None, of type NoneType; it must be True or False."),
        ({"weights": "int3"}, "weights is 'int3'; it must be auto, bf16, fp32, int8 or int4."),
        ({"weights": "fp32", "dtype": "bf16"}, "weights is fp32 and dtype is bf16"),
        ({"kernels": "fast"}, "kernels is 'fast'; it must be auto, native or reference."),
        ({"device": 3}, "device is 3, of type int; it must be a string."),
        ({"device": "banana"}, "Torch has no device 'banana'. Use cpu, or for example cuda."),
        ({"device": "meta"}, "Torch cannot compute on the device 'meta' here"),
    ],
)
def test_a_wrong_engine_setting_is_told_before_a_model_is_looked_for(
    settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(sentence)):
        TokenEngine("/nonexistent", **settings)


def test_sizes() -> None:
    assert parse_bytes("1.5KiB") == 1536
    assert parse_bytes(7) == 7
    assert EngineConfig().kv_format == "int8"


def test_every_event_of_a_stream_has_a_text() -> None:
    assert Progress("r", 1, 2).text == ""
