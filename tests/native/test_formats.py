"""What the native encoder writes into a page, against the plain one and against what a format promises."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.formats import FORMATS
from octavo.kernels.batch import AttentionBatch, Scoring
from octavo.kernels.native import NativeKernels
from octavo.spec import BLOCK_SIZE, PageShape

CODED = ["int8", "k8v4", "int4"]
HUGE = 65504.0  # the greatest half float
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def seal(kv_format, keys, values):
    """A page that the native kernels sealed: keys `[heads, dim, 32]`, values `[heads, 32, v_dim]`."""
    page = PageShape(len(keys), keys.shape[1], values.shape[2])
    item = FORMATS[kv_format]
    kernels = NativeKernels(page, page.num_kv_heads, keys.dtype, item)
    batch = AttentionBatch(*(np.array(x, dtype=np.int64) for x in ([0, BLOCK_SIZE], [0], [0, 1], [0], [0])))
    k, v = (
        torch.empty(x.shape, dtype=x.dtype).copy_(x) for x in (keys.permute(2, 0, 1), values.transpose(0, 1))
    )
    sealed = torch.full((item.page_bytes(page),), 0xFF, dtype=torch.uint8)
    opened = torch.full((kernels.open_page_bytes,), 0xFF, dtype=torch.uint8)
    kernels.begin(batch).attend(torch.zeros_like(k), k, v, sealed, opened, Scoring(1.0))
    return sealed, page


def ranges(item, x, *, keys):
    """Scale and zero of each element of keys `[heads, dim, 32]` or values, from what the format says of them."""
    bits = item.key_bits if keys else item.value_bits
    step = x.shape[2] if bits == 8 or keys else BLOCK_SIZE
    scales, zeros = torch.empty_like(x), torch.empty_like(x)
    for at in range(0, x.shape[2], step):
        group = x[..., at : at + step]
        low, high = group.amin(dim=2, keepdim=True), group.amax(dim=2, keepdim=True)
        zero = half_below(low)
        zeros[..., at : at + step] = zero
        scales[..., at : at + step] = -half_below(-(high - zero) / ((1 << bits) - 1))
    return scales, zeros


def half_below(x):
    """The greatest half float that is at most x, as float32."""
    with np.errstate(over="ignore"):
        half = x.numpy().astype(np.float16)
        below = np.nextafter(half, np.float16(-np.inf))
    return torch.from_numpy(np.where(half.astype(np.float32) > x.numpy(), below, half).astype(np.float32))


def check_part(item, x, native, plain, *, keys):
    """Decoded natively sealed and plainly sealed elements of the keys or the values, against the source x."""
    scales, zeros = ranges(item, x, keys=keys)
    fits = (scales < torch.inf) & (zeros > -torch.inf)  # false for NaN
    assert not native[~fits].isfinite().any()
    assert not plain[~fits].isfinite().any()
    x, native, plain, scales, zeros = (part[fits].double() for part in (x, native, plain, scales, zeros))
    rounding = 2.0**-22 * (zeros.abs() + (x - zeros).abs()) + 1e-42
    wrong = (native - x).abs() > scales / 2 + rounding
    assert not wrong.any(), [part[wrong][:3].tolist() for part in (x, native, plain, scales, zeros)]
    # The same codes, and at a half either neighbour.
    apart = (native - plain).abs() > rounding
    assert ((native - plain).abs() <= scales + rounding).all()
    codes = (x - zeros) / scales
    assert ((codes[apart] % 1 - 0.5).abs() < 1e-3).all()
    return fits


def check(kv_format, keys, values):
    item = FORMATS[kv_format]
    sealed, page = seal(kv_format, keys, values)
    native = item.decode(sealed, page)
    plain = item.decode(item.encode(keys, values), page)
    for x, a, b, is_keys in zip((keys, values), native, plain, (True, False), strict=True):
        check_part(item, x.float(), a, b, keys=is_keys)
    return native


def adversarial(shape, dtype, seed=0):
    """Rows along the last dimension, each hard in its own way."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    rows = x.view(-1, shape[-1])
    recipes = [
        lambda row: row,
        lambda row: torch.full_like(row, 1000.3),  # constant, and no half float
        lambda row: torch.full_like(row, -0.1),
        lambda row: torch.zeros_like(row),
        lambda row: row * 1e-3 + 300.0,  # a large bias and a tiny range, as Qwen2.5's keys have
        lambda row: row * 1e-3 - 300.0,
        lambda row: row * 1e-9,  # scales below the least half float
        lambda row: row * 1e-40,  # subnormal floats
        lambda row: row * 3e-6,  # subnormal half floats
        lambda row: row.sign() * 65280.0,  # the greatest bf16 that is a half float too
        lambda row: row.abs() * 1e4 + HUGE,  # all beyond the greatest half float
        lambda row: row * 1e4,
        lambda row: torch.where(row == row.max(), 14 * HUGE, 0.0),  # one outlier
        lambda row: row.round() * 0.5,  # many halves of a step
    ]
    for i, row in enumerate(rows):
        row.copy_(recipes[i % len(recipes)](row))
    return x.to(dtype)


@pytest.mark.parametrize("kv_format", CODED)
@DTYPES
def test_hard_channels_and_tokens_are_kept_to_half_a_step(isa, dtype, kv_format):
    keys = adversarial((2, 56, BLOCK_SIZE), dtype, 1)
    values = adversarial((2, BLOCK_SIZE, 40), dtype, 2)
    native = check(kv_format, keys, values)
    assert all(part.isfinite().all() for part in native)


@pytest.mark.parametrize("kv_format", CODED)
def test_every_width_of_keys_and_values(isa, kv_format):
    for v_dim in range(1, 71):
        dim = 71 - v_dim
        check(
            kv_format,
            adversarial((1, dim, BLOCK_SIZE), torch.float32, v_dim),
            adversarial((1, BLOCK_SIZE, v_dim), torch.float32, 100 + v_dim),
        )


@pytest.mark.parametrize("kv_format", CODED)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), -3.0e38, 3.0e38])
def test_what_cannot_be_encoded_spoils_its_own_group_and_nothing_else(isa, kv_format, poison):
    item = FORMATS[kv_format]
    keys, values = torch.randn(2, 20, BLOCK_SIZE), torch.randn(2, BLOCK_SIZE, 50)
    sealed, page = seal(kv_format, keys, values)
    clean = item.decode(sealed, page)
    for token, channel in ((0, 0), (31, 19), (17, 3)):
        bad_keys, bad_values = keys.clone(), values.clone()
        bad_keys[1, channel, token] = poison
        bad_values[0, token, 30 + channel] = poison
        sealed, _ = seal(kv_format, bad_keys, bad_values)
        assert len(sealed) == item.page_bytes(page)
        spoilt = item.decode(sealed, page)
        expected = [torch.zeros_like(part, dtype=torch.bool) for part in clean]
        expected[0][1, channel] = True
        group = (
            slice(None)
            if item.value_bits == 8
            else slice((30 + channel) // 32 * 32, (30 + channel) // 32 * 32 + 32)
        )
        expected[1][0, token, group] = True
        for part, reference, bad in zip(spoilt, clean, expected, strict=True):
            assert not part[bad].isfinite().any()
            assert torch.equal(part[~bad], reference[~bad])


@pytest.mark.parametrize("kv_format", CODED)
def test_zeros_are_rounded_down_and_scales_up_to_half_floats_of_every_size(isa, kv_format):
    item = FORMATS[kv_format]
    bits = np.random.default_rng(3).integers(0, 1 << 32, size=4000, dtype=np.uint32).view(np.float32)
    exact = np.arange(0, 1 << 16, 37, dtype=np.uint16).view(np.float16).astype(np.float32)
    edges = [
        0.0,
        2**-25,
        2**-24,
        2**-14 - 2**-24,
        2**-14,
        1.0,
        2048.5,
        HUGE,
        HUGE + 15.9,
        65520.0,
        65536.0,
        1e30,
    ]
    near = np.float32(edges)
    x = np.concatenate([bits, exact, near, -near, np.nextafter(near, np.float32(1e31))])
    x = torch.from_numpy(x[np.isfinite(x)])
    x = x[: len(x) // 8 * 8].view(8, -1)
    no_values = torch.zeros(8, BLOCK_SIZE, 1)
    for part in x.split(512, dim=1):
        # A constant channel: its zero is the greatest half float at most as large.
        check(kv_format, part[..., None].expand(-1, -1, BLOCK_SIZE), no_values)
        # Zeros and one number: the scale is the least half float that reaches it.
        keys = torch.zeros(*part.shape, BLOCK_SIZE)
        keys[..., 1] = part.abs()
        sealed, page = seal(kv_format, keys, no_values)
        highest = item.decode(sealed, page)[0][..., 1]
        levels = (1 << item.key_bits) - 1
        scale = -half_below(-part.abs() / levels)
        code = torch.where(scale > 0, (part.abs() * (1 / scale)).clamp(0, levels).round(), 0.0)
        fits = scale < torch.inf
        assert torch.equal(highest[fits], (scale * code)[fits])
        assert not highest[~fits].isfinite().any()


@pytest.mark.parametrize("kv_format", ["fp32", "bf16"])
@DTYPES
def test_raw_pages_keep_every_number_or_round_it_to_the_nearest(isa, dtype, kv_format):
    item = FORMATS[kv_format]
    bits = np.random.default_rng(4).integers(0, 1 << 32, size=(2, 24, BLOCK_SIZE), dtype=np.uint32)
    keys = torch.from_numpy(bits.view(np.float32)).to(dtype)
    values = torch.from_numpy(bits.view(np.float32)).transpose(1, 2)[..., :17].to(dtype)
    keys[0, :3, 0] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    sealed, page = seal(kv_format, keys, values)
    stored = torch.bfloat16 if kv_format == "bf16" else torch.float32
    for part, source in zip(item.decode(sealed, page), (keys, values), strict=True):
        torch.testing.assert_close(part, source.to(stored).float(), rtol=0, atol=0, equal_nan=True)
