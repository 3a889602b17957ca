"""The native attention kernel against the reference, and against itself in other batches, chunks and threads."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from sequences import PLAIN, SHAPES, Sequences, make

from octavo import _native
from octavo.errors import InvalidRequest
from octavo.formats import FORMATS
from octavo.kernels.batch import AttentionBatch, Scoring
from octavo.kernels.native import KernelArgumentError, NativeKernels
from octavo.kernels.reference import ReferenceKernels


def assert_near(native, reference, dtype, kv_format="fp32"):
    """Equal up to rounding; where codes are rounded, one may fall on the other side of a half now and then."""
    bound = 5e-5 if dtype == torch.float32 else 2e-2
    stray = 0.0 if kv_format in ("fp32", "bf16") else 0.01
    for a, b in zip(native.out, reference.out, strict=True):
        wrong = (a.float() - b.float()).abs() > bound + bound * b.float().abs()
        assert wrong.float().mean() <= stray


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "v_dim"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_agrees_with_reference(isa, dtype, heads, kv_heads, dim, v_dim, kv_format):
    lengths = [70, 33, 1, 200]
    shape = (heads, kv_heads, dim, v_dim, kv_format)
    native = Sequences(make(NativeKernels, dtype, *shape), lengths).run(64)
    reference = Sequences(make(ReferenceKernels, dtype, *shape), lengths).run(64)
    assert_near(native, reference, dtype, kv_format)
    page = native.kernels.page
    assert native.page_bytes == kv_heads * _native.head_bytes(
        native.kernels.sealed_format.native_id, dim, v_dim
    )
    for index in range(len(native.sealed) // native.page_bytes):
        pages = [
            run.sealed[index * run.page_bytes : (index + 1) * run.page_bytes] for run in (native, reference)
        ]
        decoded = [native.kernels.sealed_format.decode(data, page) for data in pages]
        # A code may fall on the other side of a half by the last bit of a product, and scales never.
        for a, b in zip(*decoded, strict=True):
            assert ((a - b).abs() > 1e-6).float().mean() < 0.002
            torch.testing.assert_close(a, b, atol=1.0 if kv_format in ("k8v4", "int4") else 0.1, rtol=0)


@pytest.mark.parametrize("kv_format", ["fp32", "int8"])
@pytest.mark.parametrize(
    "scoring",
    [
        Scoring(0.125, softcap=5.0),
        Scoring(0.125, window=1),
        Scoring(0.125, window=40),
        Scoring(0.125, window=513),
        Scoring(0.125, sinks=torch.linspace(-3, 8, 6)),
        Scoring(0.2, softcap=20.0, window=100, sinks=torch.linspace(-3, 8, 6)),
    ],
    ids=["softcap", "window1", "window40", "window513", "sinks", "all"],
)
def test_soft_cap_window_and_sinks_agree_with_reference_in_any_chunks(isa, scoring, kv_format):
    lengths = [1200, 90]
    reference = Sequences(make(ReferenceKernels, torch.float32, kv_format=kv_format), lengths).run(
        400, scoring
    )
    native = Sequences(make(NativeKernels, torch.float32, kv_format=kv_format), lengths).run(400, scoring)
    assert_near(native, reference, torch.float32, kv_format)
    for chunk in (1, 37):
        other = Sequences(make(NativeKernels, torch.float32, kv_format=kv_format), lengths).run(
            chunk, scoring
        )
        for a, b in zip(native.out, other.out, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_reference_agrees_with_plain_softmax_attention():
    kernels = make(ReferenceKernels, torch.float32)
    run = Sequences(kernels, [1100]).run(96)  # raw: sealing loses nothing
    q, k, v = (x.transpose(0, 1) for x in (run.q[0], run.k[0], run.v[0]))
    plain = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=0.125, enable_gqa=True
    )
    torch.testing.assert_close(run.out[0], plain.transpose(0, 1), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_same_bytes_in_any_chunks_batches_and_threads(isa, dtype, kv_format):
    lengths = [1100, 64, 95]
    threads = torch.get_num_threads()
    expected = Sequences(make(NativeKernels, dtype, kv_format=kv_format), lengths).run(10_000)
    try:
        for chunk in (1, 7, 33, 512):
            for num_threads in (2, 1, 3, 5):
                torch.set_num_threads(num_threads)
                got = Sequences(make(NativeKernels, dtype, kv_format=kv_format), lengths).run(chunk)
                for a, b in zip(expected.out, got.out, strict=True):
                    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), (chunk, num_threads)
                if chunk == 1:
                    break
        torch.set_num_threads(2)
        alone = Sequences(make(NativeKernels, dtype, kv_format=kv_format), lengths)
        for i, n in enumerate(lengths):
            for start in range(0, n, 50):
                alone.step([min(50, n - start) if j == i else 0 for j in range(3)])
        for a, b in zip(expected.out, alone.out, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("scoring", [PLAIN, Scoring(0.125, window=600)])
def test_a_long_sequence_beside_short_ones_is_shared_by_threads(scoring):
    lengths = [1650, 40, 600, 70, 90]
    expected = Sequences(make(NativeKernels, torch.bfloat16, kv_format="int8"), lengths).run(10_000, scoring)
    threads = torch.get_num_threads()
    try:
        for num_threads in (2, 4):
            torch.set_num_threads(num_threads)
            got = Sequences(make(NativeKernels, torch.bfloat16, kv_format="int8"), lengths)
            got.step([1500, 0, 560, 32, 50], scoring)
            for chunks in ([9, 30, 1, 1, 1], [40, 1, 1, 1, 1], [1, 1, 35, 1, 1], [100, 8, 3, 35, 37]):
                got.step(chunks, scoring)
            for a, b in zip(expected.out, got.out, strict=True):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), num_threads
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kv_format", ["bf16", "int8"])
def test_layers_in_one_call_are_as_layers_one_by_one(isa, kv_format):
    kernels = make(NativeKernels, torch.bfloat16, kv_format=kv_format)
    layers = [Sequences(kernels, [700], seed=seed, num_blocks=30).run(64) for seed in range(3)]
    for layer in layers[1:]:  # the same table, other pages
        layer.tables = layers[0].tables
    (table,), (context,) = layers[0].tables, layers[0].done
    numbers = [0, 40], [context], [0, 23], np.append(table, [29, 28])[:23] * layers[0].page_bytes, [0]
    step = kernels.begin(AttentionBatch(*(np.array(x, dtype=np.int64) for x in numbers)))
    rows = [x[0][:40] for x in (layers[0].q, layers[0].k, layers[0].v)]
    copies = [(layer.sealed.clone(), layer.opened.clone()) for layer in layers]
    outs = [step.attend(*rows, *pages, PLAIN) for pages in copies]
    pages = [(layer.sealed, layer.opened) for layer in layers]
    assert torch.equal(step.attend_layers(*rows, pages, PLAIN).view(torch.uint8), outs[-1].view(torch.uint8))
    assert not torch.equal(outs[0], outs[-1])
    for one, other in zip(copies, pages, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_nan_of_a_neighbour_and_stale_rows_stay_where_they_are(isa):
    lengths = [200, 180]
    clean = Sequences(make(NativeKernels, torch.float32), lengths).run(60)
    other = Sequences(make(NativeKernels, torch.float32), lengths)
    other.q[1][:] = other.k[1][:] = other.v[1][:] = float("nan")
    other.run(60)
    assert torch.equal(clean.out[0], other.out[0])
    assert not clean.out[0].isnan().any()
    assert other.out[1].isnan().all()


def test_a_row_sees_its_own_block_raw_and_earlier_blocks_sealed():
    run = Sequences(make(NativeKernels, torch.float32), [96])
    run.step([64])
    pages = run.sealed.view(torch.float32)
    pages.mul_(0.5)  # as if sealing had changed the values
    before = run.out[0].clone()
    run.step([32])
    other = Sequences(make(NativeKernels, torch.float32), [96]).run(96)
    assert torch.equal(before[:64], other.out[0][:64])
    assert not torch.equal(run.out[0][64:], other.out[0][64:])


def test_wrong_shapes_dtypes_and_offsets_are_refused():
    kernels = make(NativeKernels, torch.float32)
    run = Sequences(kernels, [64])
    batch = AttentionBatch(*(np.array(x, dtype=np.int64) for x in ([0, 2], [0], [0, 0], [], [0])))
    q, k, v = run.q[0][:2], run.k[0][:2], run.v[0][:2]
    step = kernels.begin(batch)
    with pytest.raises(KernelArgumentError, match="q is torch.float64"):
        step.attend(q.double(), k, v, run.sealed, run.opened, PLAIN)
    with pytest.raises(KernelArgumentError, match="k is .*wants"):
        step.attend(q, k[:1], v, run.sealed, run.opened, PLAIN)
    with pytest.raises(KernelArgumentError, match="contiguous channels"):
        step.attend(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, run.sealed, run.opened, PLAIN)
    with pytest.raises(KernelArgumentError, match="slot points"):
        step.attend(q, k, v, run.sealed, run.opened[:100], PLAIN)
    far = AttentionBatch(*(np.array(x, dtype=np.int64) for x in ([0, 2], [32], [0, 1], [10**9], [0])))
    with pytest.raises(KernelArgumentError, match="block table points"):
        kernels.begin(far).attend(q, k, v, run.sealed, run.opened, PLAIN)
    negative = AttentionBatch(*(np.array(x, dtype=np.int64) for x in ([0, 2], [32], [0, 1], [-4], [0])))
    with pytest.raises(KernelArgumentError, match="negative"):
        kernels.begin(negative)
    missing = AttentionBatch(*(np.array(x, dtype=np.int64) for x in ([0, 2], [32], [0, 0], [], [0])))
    with pytest.raises(ValueError, match="fewer blocks than it fills"):
        kernels.begin(missing)


def test_unknown_instruction_set_is_a_users_mistake(monkeypatch):
    monkeypatch.setenv("OCTAVO_ISA", "mmx")
    with pytest.raises(InvalidRequest, match="'mmx'"):
        make(NativeKernels, torch.float32)
    monkeypatch.setitem(os.environ, "OCTAVO_ISA", "")
    make(NativeKernels, torch.float32)


@pytest.mark.parametrize("kv_format", ["int8", "k8v4", "int4"])
def test_a_corrupted_scale_gives_nan_and_never_a_plausible_number(isa, kv_format):
    run = Sequences(make(NativeKernels, torch.float32, kv_format=kv_format), [96, 96])
    run.step([64, 64])
    page = run.kernels.page
    _, _, at, *_ = np.cumsum([0, *run.kernels.sealed_format.head_bytes(page)])
    broken = int(run.tables[0][1]) * run.page_bytes + int(at) - 2  # a key scale or zero of the first head
    run.sealed[broken : broken + 2] = torch.tensor([0x00, 0x7E], dtype=torch.uint8)
    run.step([32, 32])
    assert run.out[0][64:, :3].isnan().all()
    assert not run.out[1].isnan().any()
