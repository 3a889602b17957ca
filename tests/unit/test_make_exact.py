"""Replacing layers in place: what it holds on to meanwhile."""

from __future__ import annotations

import weakref

import pytest
import torch
from families import tiny_model
from torch import nn

from octavo.models import exact


def test_the_dense_weights_of_a_layer_are_let_go_before_the_next_is_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama")
    weights = [weakref.ref(module.weight) for module in model.modules() if type(module) is nn.Linear]
    alive: list[int] = []

    class Counted(exact.ExactLinear):
        def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
            alive.append(sum(reference() is not None for reference in weights))
            super().__init__(weight, bias)

    given_back: list[int] = []
    monkeypatch.setattr(exact, "ExactLinear", Counted)
    monkeypatch.setattr(
        exact, "give_back_freed_memory", lambda: given_back.append(sum(ref() is not None for ref in weights))
    )
    exact.make_exact(model)
    assert alive == list(range(15, 0, -1))
    assert given_back == [0]
