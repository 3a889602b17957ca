"""Sequences with a history in common: its pages are read once a step, and no bit tells."""

from __future__ import annotations

import copy

import pytest
import torch
from sequences import PLAIN, SHAPES, Sequences, make

from octavo.formats import FORMATS
from octavo.kernels.batch import Scoring
from octavo.kernels.native import NativeKernels
from octavo.spec import BLOCK_SIZE

PARTITION = 16 * BLOCK_SIZE
# Whose beginning each sequence has, in blocks: two partitions and a part, one, none, more of another's, a whole history.
FROM = [None, (0, 37), (0, 16), None, (1, 53), (4, 53)]
STEPS = 8  # over a block's end


def family(kernels, seed=0):
    """Sequences of which some begin with another's blocks, all but the last steps computed."""
    lengths = [55 * BLOCK_SIZE + 28 + STEPS - i for i in range(len(FROM))]
    data = Sequences(kernels, lengths, seed=seed)
    for i, origin in enumerate(FROM):
        if origin is not None:
            source, blocks = origin
            data.tables[i][:blocks] = data.tables[source][:blocks]
            for rows in (data.q, data.k, data.v):
                rows[i][: blocks * BLOCK_SIZE] = rows[source][: blocks * BLOCK_SIZE]
            data.done[i] = blocks * BLOCK_SIZE
        while data.done[i] < lengths[i] - STEPS:
            chunks = [0] * len(FROM)
            chunks[i] = min(100, lengths[i] - STEPS - data.done[i])
            data.step(chunks)
    return data


def alone(data, scoring):
    """The last steps, one sequence after the other."""
    data = copy.deepcopy(data)
    for i in range(len(FROM)):
        for _ in range(STEPS):
            data.step([int(i == j) for j in range(len(FROM))], scoring)
    return data


def same_bits(x, y):
    return all(
        torch.equal(a[-STEPS:].view(torch.uint8), b[-STEPS:].view(torch.uint8))
        for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_bit_tells_that_pages_were_shared(shape, dtype):
    check(shape, dtype, "int8")


@pytest.mark.parametrize("kv_format", sorted(FORMATS))
def test_in_every_format_on_every_instruction_set(isa, kv_format):
    check(SHAPES[0], torch.bfloat16, kv_format)


def check(shape, dtype, kv_format):
    heads, kv_heads, dim, v_dim = shape
    kernels = make(NativeKernels, dtype, heads, kv_heads, dim, v_dim, kv_format)
    data = family(kernels)
    expected = alone(data, PLAIN)
    for _ in range(STEPS):
        data.step([1] * len(FROM))
    assert same_bits(data.out, expected.out)


@pytest.mark.parametrize("scoring", [Scoring(0.1, softcap=5.0), Scoring(0.1, window=700)])
def test_soft_caps_and_windows(scoring):
    data = family(make(NativeKernels, torch.bfloat16, 9, 3, 64, 64, "int8"))
    expected = alone(data, scoring)
    for _ in range(STEPS):
        data.step([1] * len(FROM), scoring)
    assert same_bits(data.out, expected.out)


def test_longer_chunks_beside_them_share_nothing_and_change_nothing():
    data = family(make(NativeKernels, torch.bfloat16, 9, 3, 64, 64, "int8"))
    expected = alone(data, PLAIN)
    data.step([1, 3, 1, 1, 1, 1])
    data.step([1, 3, 1, 1, 1, 1])
    for _ in range(STEPS - 6):
        data.step([1] * len(FROM))
    while any(data.done[i] < data.lengths[i] for i in range(len(FROM))):
        data.step([int(data.done[i] < data.lengths[i]) for i in range(len(FROM))])
    assert same_bits(data.out, expected.out)


@pytest.mark.parametrize("num_threads", [2, 5])
def test_threads_may_share_what_is_left_of_each(num_threads):
    threads = torch.get_num_threads()
    data = family(make(NativeKernels, torch.bfloat16, 9, 3, 64, 64, "int8"))
    expected = alone(data, PLAIN)
    try:
        torch.set_num_threads(num_threads)  # of two sequences, the heads are too few to keep them busy
        for pair in ((0, 1), (4, 5), (2, 3)):
            for _ in range(STEPS):
                data.step([int(i in pair) for i in range(len(FROM))])
    finally:
        torch.set_num_threads(threads)
    assert same_bits(data.out, expected.out)


def test_more_sequences_than_a_tile_has_rows():
    kernels = make(NativeKernels, torch.bfloat16, 6, 1, 32, 32, "int8")
    num = 50  # 300 rows
    data = Sequences(kernels, [PARTITION + 3] * num)
    data.step([PARTITION] + [0] * (num - 1))
    for i in range(1, num):
        data.tables[i][:] = data.tables[0]
        for rows in (data.k, data.v):
            rows[i][:PARTITION] = rows[0][:PARTITION]
        data.done[i] = PARTITION
    other = copy.deepcopy(data)
    for _ in range(3):
        data.step([1] * num)
    for i in range(num):
        for _ in range(3):
            other.step([int(i == j) for j in range(num)])
    assert all(torch.equal(x[-3:], y[-3:]) for x, y in zip(data.out, other.out, strict=True))


def test_a_shared_page_is_read_once_a_step():
    kernels = make(NativeKernels, torch.bfloat16, 9, 3, 64, 64, "int8")
    data = family(kernels)
    steps = []
    begin = kernels.begin
    kernels.begin = lambda batch: steps.append(begin(batch)) or steps[-1]
    read = {block for i, table in enumerate(data.tables) for block in table[: data.done[i] // BLOCK_SIZE]}
    data.step([1] * len(FROM))
    assert steps[0].bytes_read == len(read) * data.page_bytes
    data.step([1] + [0] * (len(FROM) - 1))
    assert steps[1].bytes_read == data.done[0] // BLOCK_SIZE * data.page_bytes


def test_a_few_pages_are_not_shared():
    kernels = make(NativeKernels, torch.bfloat16, 9, 3, 64, 64, "int8")
    data = Sequences(kernels, [200, 200])
    data.step([198, 0])
    data.tables[1][:3] = data.tables[0][:3]
    for rows in (data.k, data.v):
        rows[1][:96] = rows[0][:96]
    data.done[1] = 96
    data.step([0, 102])
    steps = []
    begin = kernels.begin
    kernels.begin = lambda batch: steps.append(begin(batch)) or steps[-1]
    data.step([1, 1])
    assert steps[0].bytes_read == 2 * 6 * data.page_bytes
