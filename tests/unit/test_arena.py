"""Page memory: held from the system when touched, given back when empty, poisoned when asked."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

from octavo.kv.storage.arena import HUGE_PAGE_BYTES, OpenArena, SealedArena


def resident_bytes() -> int:
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def make(num_blocks=400, page_bytes=13440, slab_bytes=258048, **settings):
    return SealedArena(
        num_layers=3, page_bytes=page_bytes, num_blocks=num_blocks, slab_bytes=slab_bytes, **settings
    )


def fill(arena, blocks, value):
    arena.touch(blocks)
    for layer in arena.layers:
        for block in blocks:
            layer[arena.offset(block) : arena.offset(block) + arena.page_bytes] = value


def test_blocks_have_their_own_bytes_in_every_layer():
    arena = make()
    offsets = [arena.offset(block) for block in range(400)]
    assert all(b - a >= arena.page_bytes for a, b in itertools.pairwise(offsets))
    assert offsets[-1] + arena.page_bytes <= arena.layers[0].numel()
    fill(arena, [0, 18, 19, 399], 7)
    fill(arena, [1, 17, 20, 398], 9)
    for layer in arena.layers:
        for block, value in ((0, 7), (18, 7), (19, 7), (399, 7), (1, 9), (17, 9), (20, 9), (398, 9)):
            page = layer[arena.offset(block) : arena.offset(block) + arena.page_bytes]
            assert page.unique().tolist() == [value]


def test_memory_is_held_when_touched_and_given_back_when_empty():
    arena = make(num_blocks=40_000)
    before = resident_bytes()
    assert arena.allocated_bytes == 0
    fill(arena, range(2_000), 1)
    held = arena.allocated_bytes
    assert held == -(-2_000 // 19) * 258048 * 3
    assert 0.9 * held < resident_bytes() - before < 1.2 * held
    assert arena.release_unused(range(100)) == held - -(-100 // 19) * 258048 * 3
    assert resident_bytes() - before < 1.2 * arena.allocated_bytes + (1 << 20)
    assert arena.layers[2][arena.offset(99)].item() == 1, "what is in use stays"
    assert arena.layers[2][arena.offset(1_500)].item() == 0
    arena.release_unused([])
    assert arena.allocated_bytes == 0
    assert resident_bytes() - before < 2 << 20


def test_filled_huge_pages_are_asked_for_once_and_again_after_release(monkeypatch):
    arena = make(num_blocks=1000)
    collapsed = []
    monkeypatch.setattr(arena._region, "collapse", collapsed.append)
    per_huge = -(-HUGE_PAGE_BYTES // 258048)  # slabs that touch the first huge page

    def touch(num_slabs):
        arena.touch(range(19 * num_slabs))
        arena.collapse(2)
        at_once = len(collapsed)
        arena.collapse()
        return at_once

    touch(per_huge - 1)
    assert collapsed == []
    assert touch(per_huge) == 2, "as many as it was told"
    assert collapsed == [layer * arena.layers[0].numel() for layer in range(3)]
    touch(per_huge)
    assert len(collapsed) == 3
    arena.release_unused(range(19))
    touch(per_huge)
    assert len(collapsed) == 6
    arena.release_unused([])
    arena.touch(range(19 * per_huge))
    arena.release_unused(range(19))
    arena.collapse()
    assert len(collapsed) == 6, "what was given back meanwhile stays so"


def test_content_survives_becoming_a_huge_page():
    arena = make(num_blocks=600)
    for block in range(600):
        fill(arena, [block], block % 251)
    arena.collapse()
    for layer in arena.layers:
        for block in range(600):
            assert layer[arena.offset(block) + 5].item() == block % 251


@pytest.mark.parametrize("kind", ["sealed", "open"])
def test_fresh_memory_is_nan_when_asked(kind):
    if kind == "sealed":
        arena = make(debug_fill=True)
        arena.touch([3])
        page = arena.layers[1][arena.offset(3) : arena.offset(3) + 64]
    else:
        arena = OpenArena(num_layers=2, page_bytes=1000, num_slots=3, debug_fill=True)
        arena.touch([2])
        page = arena.layers[1][arena.offset(2) : arena.offset(2) + 64]
    assert page.view(torch.float32).isnan().all()


def test_open_slots_copy_whole_and_go_back():
    arena = OpenArena(num_layers=3, page_bytes=5000, num_slots=4)
    arena.touch([0, 2])
    for layer, opened in enumerate(arena.layers):
        opened[arena.offset(0) : arena.offset(0) + 5000] = layer + 1
    arena.copy(0, 2)
    for layer, opened in enumerate(arena.layers):
        assert opened[arena.offset(2) : arena.offset(2) + 5000].unique().tolist() == [layer + 1]
    assert arena.allocated_bytes == 2 * arena.slot_bytes
    assert arena.release_unused([2]) == arena.slot_bytes
    assert arena.layers[0][arena.offset(2)].item() == 1
    assert arena.layers[0][arena.offset(0)].item() == 0
