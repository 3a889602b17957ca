"""What a model's cache looks like: groups of layers, heads, dimensions, bytes per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BLOCK_SIZE = 32
"""Tokens in a block: a constant of the format, part of every hash and every record."""

LANES = 16
"""Channels of a page's values come in multiples of this, so that a kernel never reads past a row's end."""

PARTITION_BLOCKS = 16
"""Blocks in an attention partition: the grid is absolute, so the merge order never depends on a step."""

ComputeDtype = Literal["bf16", "fp32"]

DTYPE_BYTES: dict[str, int] = {"bf16": 2, "fp32": 4}


def cdiv(numerator: int, denominator: int) -> int:
    """The quotient of two positive integers, rounded up."""
    return -(-numerator // denominator)


@dataclass(frozen=True, slots=True)
class PageShape:
    """One layer's share of a block: `num_kv_heads` heads of `head_dim` keys and `v_head_dim` values."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int

    @property
    def raw_elements_per_token(self) -> int:
        """Key and value elements that one token takes in a raw page of one layer, padding included."""
        return self.num_kv_heads * (self.head_dim + cdiv(self.v_head_dim, LANES) * LANES)

    def raw_bytes(self, dtype: ComputeDtype) -> int:
        """Bytes of a raw page of `BLOCK_SIZE` tokens."""
        return BLOCK_SIZE * self.raw_elements_per_token * DTYPE_BYTES[dtype]


GroupKind = Literal["full_attention", "sliding_window", "latent", "recurrent"]

STATE_BYTES = 4
"""Bytes of an element of a recurrent state, which is summed up over the whole text in float32."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share a block layout.

    `kind` says what a layer keeps: the keys and values of all tokens, or of the last `window`; a latent from which
    both are computed, as if it were a key; or a state of `state_elements` for the whole sequence. Only
    `full_attention` is run today, layers with a window as if they had none; the others are planned, and refused when
    a model is loaded.
    """

    kind: GroupKind
    num_layers: int
    num_heads: int
    page: PageShape
    window: int = 0
    state_elements: int = 0


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Everything the cache needs to know of a model."""

    groups: tuple[CacheGroup, ...]
    dtype: ComputeDtype

    @property
    def group(self) -> CacheGroup:
        """The one group of a full-attention model."""
        (group,) = self.groups
        return group

    @property
    def num_layers(self) -> int:
        return sum(group.num_layers for group in self.groups)

    @property
    def raw_bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take in the compute dtype, over all layers."""
        return sum(group.num_layers * group.page.raw_bytes(self.dtype) for group in self.groups) // BLOCK_SIZE
