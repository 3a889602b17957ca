"""The formats of sealed pages, by name.

A page is one part for each key-value head: key codes `[head_dim][32]` (channel-major), a scale and a zero per
channel, value codes `[32][v_head_dim]`, and their scales and zeros `[groups][32]`: one group of channels for 8
bits, groups of 32 channels for 4 bits. A value is `zero + scale * code`; both are half floats, the zero rounded
down and the scale up, so that the coded range covers what it encodes. Four-bit codes come in groups of 32, code
i and code i + 16 in one byte. `fp32` and `bf16` are raw and have codes only.

Keys are encoded per channel because a few channels of theirs are large in every token; per token these would
take the resolution of all others (KIVI, arXiv 2402.02750, found the same).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.errors import InvalidRequest
from octavo.spec import BLOCK_SIZE, DTYPE_BYTES, LANES, CacheSpec, PageShape, cdiv

_HALF_BYTES = 2
_TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class PageFormat:
    """One format. `native_id` names it to the kernels; `key_bits` and `value_bits` are 32 or 16 for raw ones."""

    name: str
    native_id: int
    key_bits: int
    value_bits: int

    @property
    def is_raw(self) -> bool:
        return self.name in DTYPE_BYTES

    def page_bytes(self, page: PageShape) -> int:
        """Bytes of one sealed page of this shape, scales included."""
        return page.num_kv_heads * sum(self.head_bytes(page))

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Encodes a block.

        Args:
            keys: `[num_kv_heads, head_dim, 32]`.
            values: `[num_kv_heads, 32, v_head_dim]`.

        Returns:
            uint8 `[page_bytes]`.
        """
        heads, _, v_dim = values.shape
        padded = self._padded(v_dim)
        if self.is_raw:
            dtype = _TORCH_DTYPES[self.name]
            values = torch.nn.functional.pad(values, (0, padded - v_dim))
            parts = [keys.to(dtype).flatten(1), values.to(dtype).flatten(1)]
            return torch.cat(parts, dim=1).contiguous().view(torch.uint8).flatten()
        # A last group that is not full repeats its last channel: that leaves its range as it is.
        last = values[..., -1:].expand(heads, BLOCK_SIZE, padded - v_dim if self.value_bits == 4 else 0)
        width = BLOCK_SIZE if self.value_bits == 4 else v_dim
        grouped = torch.cat((values, last), dim=2).float().reshape(heads, BLOCK_SIZE, -1, width)
        key_codes, *key_params = _encode(keys.float(), self.key_bits)
        value_codes, *value_params = _encode(grouped, self.value_bits)
        if self.value_bits == 8:
            value_codes = torch.nn.functional.pad(value_codes, (0, padded - v_dim))
        value_params = [part.squeeze(-1).transpose(1, 2) for part in value_params]  # [heads, groups, 32]
        parts = [key_codes, *key_params, value_codes, *value_params]
        return torch.cat([part.reshape(heads, -1).view(torch.uint8) for part in parts], dim=1).flatten()

    def decode(self, data: torch.Tensor, page: PageShape) -> tuple[torch.Tensor, torch.Tensor]:
        """The float32 keys `[num_kv_heads, head_dim, 32]` and values `[num_kv_heads, 32, v_head_dim]` of a page."""
        heads, dim, v_dim = page.num_kv_heads, page.head_dim, page.v_head_dim
        parts = torch.split(data.view(heads, -1), self.head_bytes(page), dim=1)
        if self.is_raw:
            dtype = _TORCH_DTYPES[self.name]
            keys, values = (part.contiguous().view(dtype).float() for part in (parts[0], parts[3]))
            return keys.view(heads, dim, BLOCK_SIZE), values.view(heads, BLOCK_SIZE, -1)[..., :v_dim]
        scales, zeros = (_halves(part, heads, dim, 1) for part in parts[1:3])
        keys = _unpack(parts[0], self.key_bits).view(heads, dim, BLOCK_SIZE) * scales + zeros
        groups = 1 if self.value_bits == 8 else cdiv(v_dim, BLOCK_SIZE)
        scales, zeros = (
            _halves(part, heads, groups, BLOCK_SIZE).transpose(1, 2)[..., None] for part in parts[4:]
        )
        values = _unpack(parts[3], self.value_bits).view(heads, BLOCK_SIZE, groups, -1) * scales + zeros
        return keys, values.reshape(heads, BLOCK_SIZE, -1)[..., :v_dim]

    def _padded(self, v_dim: int) -> int:
        """Value channels of a token, padding included."""
        unit = BLOCK_SIZE if self.value_bits == 4 else LANES
        return cdiv(v_dim, unit) * unit

    def head_bytes(self, page: PageShape) -> list[int]:
        """Bytes of a head's key codes, scales, zeros, value codes, scales, zeros."""
        padded = self._padded(page.v_head_dim)
        key_params = 0 if self.is_raw else page.head_dim * _HALF_BYTES
        value_groups = min(padded, 1) if self.value_bits == 8 else padded // BLOCK_SIZE
        value_params = 0 if self.is_raw else BLOCK_SIZE * value_groups * _HALF_BYTES
        key_codes = page.head_dim * BLOCK_SIZE * self.key_bits // 8
        value_codes = BLOCK_SIZE * padded * self.value_bits // 8
        return [key_codes, key_params, key_params, value_codes, value_params, value_params]


FORMATS = {
    item.name: item
    for item in (
        PageFormat("fp32", 1, 32, 32),
        PageFormat("bf16", 0, 16, 16),
        PageFormat("int8", 2, 8, 8),
        PageFormat("k8v4", 3, 8, 4),
        PageFormat("int4", 4, 4, 4),
    )
}


def get_format(name: str, spec: CacheSpec) -> PageFormat:
    """The format called `name`; `raw` is the one that keeps the compute dtype.

    Raises:
        InvalidRequest: there is no such format.
    """
    if name == "raw":
        return FORMATS[spec.dtype]
    if name not in FORMATS:
        raise InvalidRequest(
            f"There is no cache format {name!r}. Choose one of {', '.join(FORMATS)}, or raw."
        )
    return FORMATS[name]


def _encode(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (packed if 4 bits), and the scales and zeros over the last dimension."""
    levels = (1 << bits) - 1
    low, high = x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True)
    zero = _round_half(low, down=True)
    scale = _round_half((high - zero.float()) / levels, down=False)
    step = scale.float()
    inverse = torch.where(step > 0, 1 / step, torch.zeros_like(step))
    codes = ((x - zero.float()) * inverse).clamp(0, levels).round().nan_to_num(0).to(torch.uint8)
    if bits == 4:
        codes = codes[..., :LANES] | (codes[..., LANES:] << 4)
    return codes, scale, zero


def _round_half(x: torch.Tensor, *, down: bool) -> torch.Tensor:
    half = x.to(torch.float16)
    beyond = half.float() > x if down else half.float() < x
    step = torch.nextafter(half.cpu(), torch.tensor(float("-inf" if down else "inf"), dtype=torch.float16))
    return torch.where(beyond, step.to(half.device), half)


def _unpack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 4:
        codes = codes.reshape(*codes.shape[:-1], -1, LANES)
        codes = torch.cat((codes & 15, codes >> 4), dim=-1)
    return codes.float()


def _halves(data: torch.Tensor, *shape: int) -> torch.Tensor:
    return data.contiguous().view(torch.float16).view(shape).float()
