"""What a model's cache looks like: groups of layers, heads, dimensions, bytes per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BLOCK_SIZE = 32
"""Tokens in a block: a constant of the format, part of every hash and every record."""

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
    def elements(self) -> int:
        """Key and value elements in a page of `BLOCK_SIZE` tokens."""
        return BLOCK_SIZE * self.elements_per_token

    @property
    def elements_per_token(self) -> int:
        """Key and value elements that one token adds to one layer."""
        return self.num_kv_heads * (self.head_dim + self.v_head_dim)


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share a block layout.

    `kind` says which earlier tokens a layer attends to. Only `full_attention` is run today; the others
    are refused when a model is loaded.
    """

    kind: Literal["full_attention"]
    num_layers: int
    num_heads: int
    page: PageShape


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
        elements = sum(group.num_layers * group.page.elements_per_token for group in self.groups)
        return elements * DTYPE_BYTES[self.dtype]
