"""Packed weights: what is kept of a file's blocks, and products that depend on their own row alone."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels.linear import PackedMatrix, packed_row_bytes, unpack_rows
from octavo.kernels.native import KernelArgumentError
from octavo.models.gguf_header import TENSOR_TYPES

IDS = {kind.name: type_id for type_id, kind in TENSOR_TYPES.items()}
CODED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
HALVES = {  # where a block's half-precision scales and minima are
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2],
    "Q6_K": [208],
}  # fmt: skip
DENSE = ["fp32", "bf16"]
ROW_COUNTS = [1, 2, 3, 5, 7, 16, 17, 33, 65, 129, 512]


def block_size(name):
    return TENSOR_TYPES[IDS[name]].block_size


def random_blocks(name, rows, columns, seed=0):
    """[rows, bytes of a row]: every code, step and sign, with scales of a weight's usual size."""
    kind = TENSOR_TYPES[IDS[name]]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows * columns // kind.block_size, kind.block_bytes), dtype=np.uint8)
    for at in HALVES[name]:
        scales = generator.normal(0, 0.01, (len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    return torch.from_numpy(blocks.reshape(rows, -1))


def dequantise(name, packed):
    return torch.from_numpy(gguf.quants.dequantize(packed.numpy(), gguf.GGMLQuantizationType(IDS[name])))


def matrix(kind, num_outputs, num_inputs, seed=0):
    if kind in DENSE:
        weights = torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(seed)) * 0.05
        return PackedMatrix.from_dense(weights, kind)
    return PackedMatrix.from_gguf(
        IDS[kind], random_blocks(kind, num_outputs, num_inputs, seed), num_outputs, num_inputs
    )


def inputs(rows, columns, seed=1):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return x * torch.rand(rows, 1).mul(4).exp()


def same(a, b):
    return a.numpy().tobytes() == b.numpy().tobytes()


def quantised(x):
    """What coded products see of their inputs, and the size of a step, in float64."""
    groups = x.view(len(x), -1, 32)
    most = groups.abs().amax(2, keepdim=True)
    scale = (most / 127).double()
    codes = (groups * (127 / most).nan_to_num(posinf=0)).round().double()
    return (codes * scale).view_as(x)


def check_product(weights, x, out, bias=None):
    """`out` against float64, to within the rounding of a float32 sum of a term for each group or input."""
    dense = weights.rows(torch.arange(weights.num_outputs)).double()
    seen = quantised(x) if weights.packing.startswith("int") else x.double()
    if weights.packing == "bf16":
        low_precision = x.bfloat16().double()
    expected = seen @ dense.T
    size = seen.abs() @ dense.abs().T
    if bias is not None:
        expected += bias.double()
        size += bias.double().abs()
    tolerance = size * 2.0**-23 * (4 + weights.num_inputs**0.5) + 1e-30
    if weights.packing == "bf16":  # inputs as they are, or rounded to bf16
        rounded = low_precision @ dense.T + (0 if bias is None else bias.double())
        wrong = torch.minimum((out - expected).abs(), (out - rounded).abs()) > tolerance
    else:
        wrong = (out - expected).abs() > tolerance
    assert not wrong.any(), ((out - expected).abs() / tolerance).max()


@pytest.mark.parametrize("name", CODED)
def test_codes_scales_and_minima_are_kept(name):
    """Every bit of the value, in an order of rows of our own, and within a tenth of the file's bytes."""
    columns = 2 * block_size(name)
    packed = random_blocks(name, 160, columns)
    dense = dequantise(name, packed)
    order = torch.randperm(160, generator=torch.Generator().manual_seed(2))
    weights = PackedMatrix.from_gguf(IDS[name], packed, 160, columns, order)
    assert same(weights.rows(torch.arange(160)), dense[order])
    assert same(unpack_rows(IDS[name], packed, order, columns), dense[order])
    assert weights.num_bytes <= 1.1 * packed.numel()


@settings(max_examples=60)
@given(st.sampled_from(CODED), st.integers(1, 70), st.integers(1, 3), st.data())
def test_any_bytes_survive_packing(name, num_outputs, num_blocks, data):
    columns = num_blocks * block_size(name)
    row_bytes = packed_row_bytes(IDS[name], columns)
    seed = data.draw(st.integers(0, 2**32 - 1))
    packed = torch.from_numpy(
        np.random.default_rng(seed).integers(0, 256, (num_outputs, row_bytes), dtype=np.uint8)
    )
    weights = PackedMatrix.from_gguf(IDS[name], packed, num_outputs, columns)
    with np.errstate(all="ignore"):
        dense = dequantise(name, packed)
    ids = torch.arange(num_outputs)
    for values in (weights.rows(ids), unpack_rows(IDS[name], packed, ids, columns)):
        finite = dense.isfinite()
        assert torch.equal(values.isfinite(), finite)
        assert same(values[finite], dense[finite])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", DENSE)
def test_dense_weights_are_kept(kind, dtype):
    weights = torch.randn(37, 19).to(dtype)
    weights[3, 4] = torch.nan
    packed = PackedMatrix.from_dense(weights, kind)
    expected = weights.float() if kind == "fp32" else weights.float().bfloat16().float()
    assert torch.equal(packed.rows(torch.arange(37)).nan_to_num(nan=9.0), expected.nan_to_num(nan=9.0))
    ids = torch.tensor([36, 0, 36])
    assert torch.equal(
        unpack_rows(
            {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}[dtype],
            weights.view(torch.uint8),
            ids,
            19,
        ),
        weights[ids].float(),
    )


@pytest.mark.parametrize("kind", CODED + DENSE)
@pytest.mark.parametrize(("num_outputs", "blocks"), [(1, 1), (16, 3), (33, 2), (95, 9), (192, 4)])
def test_products_are_those_of_float64(isa, kind, num_outputs, blocks):
    num_inputs = blocks * block_size(kind) if kind in CODED else blocks * 31
    weights = matrix(kind, num_outputs, num_inputs)
    x = inputs(9, num_inputs)
    bias = torch.randn(num_outputs)
    check_product(weights, x, weights.multiply(x))
    check_product(weights, x, weights.multiply(x, bias), bias)


@pytest.mark.parametrize("kind", CODED)
def test_the_greatest_codes_and_inputs_do_not_overflow(isa, kind):
    """All codes at one end and all inputs at one end: the largest integer sums there are."""
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        packed = torch.full_like(random_blocks(kind, 33, 256), byte)
        for at in HALVES[kind]:
            blocks = packed.view(-1, TENSOR_TYPES[IDS[kind]].block_bytes)
            blocks[:, at : at + 2] = torch.tensor([1.0], dtype=torch.float16).view(torch.uint8)
        weights = PackedMatrix.from_gguf(IDS[kind], packed, 33, 256)
        x = torch.ones(3, 256)
        x[1] = -1.0
        x[2, ::2] = -1.0
        check_product(weights, x, weights.multiply(x))


@pytest.mark.parametrize("kind", CODED + DENSE)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(48, 576), (167, 96), (33, 1536)])
def test_a_row_does_not_depend_on_the_others(isa, kind, num_outputs, num_inputs):
    if kind in CODED:
        num_inputs = -(-num_inputs // block_size(kind)) * block_size(kind)
    else:
        num_inputs += 5
    weights = matrix(kind, num_outputs, num_inputs)
    x = inputs(max(ROW_COUNTS), num_inputs)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([weights.multiply(row[None]) for row in x[:140]])
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            for rows in ROW_COUNTS:
                out = weights.multiply(x[:rows])
                assert same(out[:140], alone[:rows]), (rows, num_threads)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", CODED + DENSE)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(isa, kind, poison):
    num_inputs = 2 * block_size(kind) if kind in CODED else 64
    weights = matrix(kind, 40, num_inputs)
    x = inputs(11, num_inputs)
    clean = weights.multiply(x)
    x[4, 37] = poison
    out = weights.multiply(x)
    keep = torch.arange(11) != 4
    assert same(out[keep], clean[keep])
    assert not out[4].isfinite().any()


@pytest.mark.parametrize("kind", CODED)
def test_instruction_sets_with_fused_products_agree(kind):
    from octavo import _native

    weights = matrix(kind, 70, 512)
    x = inputs(13, 512)
    outs = []
    try:
        for name in ("avx2", "avx512"):
            try:
                _native.set_isa(name)
            except ValueError:
                pytest.skip(f"this CPU has no {name}")
            outs.append(weights.multiply(x))
    finally:
        _native.set_isa("")
    assert same(*outs)


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-38, 1e-42, 1e34])
def test_tiny_and_huge_inputs(isa, value):
    weights = matrix("Q8_0", 16, 64)
    x = inputs(2, 64)
    x[1, 32:] = value
    out = weights.multiply(x)
    dense = weights.rows(torch.arange(16)).double()
    expected = x.double() @ dense.T
    assert (out - expected).abs().max() <= 1e-2 * (x.double().abs() @ dense.abs().T).max()


@pytest.mark.parametrize(("packing", "most"), [("int8", 0.006), ("int4", 0.072)])
def test_quantised_weights_are_near(packing, most):
    """Root mean square error against that of the weights; the plain range of a block gives 0.078 in 4 bits."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(64, 512, generator=generator)
    weights[3] = 7.25
    weights[4] = 0.0
    weights[5, 64:] = torch.nan
    packed = PackedMatrix.from_dense(weights, packing).rows(torch.arange(64))
    assert packed[5, 64:].isnan().all()
    assert torch.equal(packed[4], weights[4])
    assert (packed[3] - 7.25).abs().max() < 0.02
    assert ((packed[6:] - weights[6:]).square().mean() / weights[6:].square().mean()).sqrt() < most


def test_a_view_of_the_inputs_is_read_by_its_stride(isa):
    weights = matrix("Q4_1", 32, 64)
    x = inputs(5, 128)
    assert same(weights.multiply(x[:, 64:]), weights.multiply(x[:, 64:].contiguous()))
    assert same(weights.multiply(x[:, ::2]), weights.multiply(x[:, ::2].contiguous()))
    assert weights.multiply(x[:0, :64]).shape == (0, 32)


def test_mistakes_are_told():
    packed = random_blocks("Q4_1", 4, 64)
    weights = PackedMatrix.from_gguf(IDS["Q4_1"], packed, 4, 64)
    for call, text in [
        (lambda: PackedMatrix.from_gguf(IDS["Q2_K"], packed, 4, 64), "No packing keeps GGUF type 10"),
        (lambda: PackedMatrix.from_gguf(IDS["Q4_1"], packed, 5, 64), "do not make 5 outputs"),
        (
            lambda: PackedMatrix.from_gguf(IDS["Q4_1"], packed.view(-1)[1:], 4, 64),
            "rows of 40 contiguous bytes",
        ),
        (lambda: PackedMatrix.from_gguf(IDS["Q4_1"], packed, 4, 72), "cannot be packed"),
        (
            lambda: PackedMatrix.from_gguf(IDS["Q4_1"], packed, 4, 64, torch.tensor([0, 1, 2, 4])),
            "within 4 rows",
        ),
        (lambda: PackedMatrix.from_dense(torch.zeros(4, 63), "int8"), "multiple of 32"),
        (lambda: PackedMatrix.from_dense(torch.zeros(4, 64), "int6"), "fp32 or bf16"),
        (lambda: PackedMatrix.from_dense(torch.zeros(4, 64, dtype=torch.int32), "fp32"), "float32, float16"),
        (lambda: weights.multiply(torch.zeros(2, 63)), "the layer wants floats"),
        (lambda: weights.multiply(torch.zeros(2, 64), torch.zeros(3)), "bias is"),
        (lambda: weights.rows(torch.tensor([4])), "within 4 rows"),
    ]:
        with pytest.raises(KernelArgumentError, match=text):
            call()
