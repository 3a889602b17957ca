"""Page memory: address space reserved once, touched on demand, given back to the system when empty."""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from collections.abc import Iterable

import numpy as np
import torch

from octavo.errors import NotEnoughMemory
from octavo.spec import cdiv

Bytes2D = np.ndarray[tuple[int, ...], np.dtype[np.uint8]] | torch.Tensor

HUGE_PAGE_BYTES = 2 << 20
_MAP_NORESERVE = 0x4000
_MADV_COLLAPSE = 25


class Region:
    """`num_bytes` of memory, on the CPU without cost until touched.

    On another device the memory is taken at once: torch offers no reservation there.
    """

    def __init__(self, num_bytes: int, *, device: str = "cpu", align: int = 4096) -> None:
        self.device = device
        self._align = align
        if device == "cpu":
            # The flags are Linux's; the kernel zeroes pages when they are touched.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            try:
                self._map = mmap.mmap(-1, num_bytes + align, flags=flags)
            except OSError as error:
                raise NotEnoughMemory(
                    f"The system does not grant {num_bytes:,} bytes of address space for the key-value cache "
                    f"({error.strerror}). Set a smaller kv_memory."
                ) from error
            whole = torch.frombuffer(self._map, dtype=torch.uint8)
            self._start = -whole.data_ptr() % align
            self.bytes = whole[self._start : self._start + num_bytes]
        else:
            self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def collapse(self, start: int) -> None:
        """Makes the huge page at `start` of the pages that are there; where the kernel will not, small ones stay."""
        if self.device == "cpu":
            try:
                self._map.madvise(_MADV_COLLAPSE, self._start + start, HUGE_PAGE_BYTES)
            except OSError:  # before Linux 6.1, or no huge page is free: ask for one in the kernel's own time
                with contextlib.suppress(OSError):
                    self._map.madvise(mmap.MADV_HUGEPAGE, self._start + start, HUGE_PAGE_BYTES)

    def release(self, start: int, num_bytes: int) -> None:
        """Gives bytes back to the system; they read as zero when touched again. `start` is page-aligned."""
        if self.device == "cpu":
            self._map.madvise(mmap.MADV_DONTNEED, self._start + start, num_bytes)


class SealedArena:
    """Sealed pages: for each layer its own slabs, a block id being the same index in every layer.

    Slabs are small, so that little is held that is not used; where they have filled a huge page's worth of
    memory, `collapse` makes it one, which is read a third faster. That takes some 6 ms a page and layer.

    Args:
        num_blocks: most blocks it will hold.
        slab_bytes: unit in which one layer's memory is taken and given back.
        debug_fill: fill fresh slabs with 0xFF (NaN in every float type), so that a read before a write shows.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        page_bytes: int,
        num_blocks: int,
        slab_bytes: int,
        device: str = "cpu",
        debug_fill: bool = False,
    ) -> None:
        self.page_bytes = page_bytes
        self.slab_bytes = slab_bytes
        self.blocks_per_slab = slab_bytes // page_bytes
        self.num_layers = num_layers
        self._debug_fill = debug_fill
        unit = HUGE_PAGE_BYTES if device == "cpu" else 1
        self._layer_bytes = cdiv(cdiv(num_blocks, self.blocks_per_slab) * slab_bytes, unit) * unit
        self._region = Region(self._layer_bytes * num_layers, device=device, align=unit)
        self._pages = _plain(self._region.bytes.view(num_layers, self._layer_bytes))
        self._slabs: set[int] = set()
        self._huge: set[int] = set()
        self._to_collapse: deque[tuple[int, int]] = deque()  # huge pages and layers
        self.layers = [
            self._region.bytes[layer * self._layer_bytes : (layer + 1) * self._layer_bytes]
            for layer in range(num_layers)
        ]

    @property
    def allocated_bytes(self) -> int:
        """Bytes held from the system."""
        return len(self._slabs) * self.slab_bytes * self.num_layers

    def offset(self, block_id: int) -> int:
        """Bytes from the start of a layer to the page of a block."""
        slab, index = divmod(block_id, self.blocks_per_slab)
        return slab * self.slab_bytes + index * self.page_bytes

    def touch(self, block_ids: Iterable[int]) -> None:
        """Counts the slabs of blocks that are about to be written."""
        for slab in {block_id // self.blocks_per_slab for block_id in block_ids} - self._slabs:
            self._slabs.add(slab)
            if self._debug_fill:
                for layer in self.layers:
                    layer[slab * self.slab_bytes : (slab + 1) * self.slab_bytes].fill_(0xFF)
            for huge in range(*self._huge_pages(slab)):
                if huge not in self._huge and all(s in self._slabs for s in range(*self._slabs_of(huge))):
                    self._huge.add(huge)
                    self._to_collapse += ((huge, layer) for layer in range(self.num_layers))

    def collapse(self, limit: int | None = None) -> None:
        """Makes huge pages where slabs have filled them since, `limit` of them at most."""
        count = len(self._to_collapse) if limit is None else min(limit, len(self._to_collapse))
        for _ in range(count):
            huge, layer = self._to_collapse.popleft()
            if huge in self._huge:  # else it was given back
                self._region.collapse(layer * self._layer_bytes + huge * HUGE_PAGE_BYTES)

    def read(self, block_id: int) -> memoryview:
        """A copy of a block's pages, one layer after the other."""
        start = self.offset(block_id)
        return _copied(self._pages[:, start : start + self.page_bytes])

    def write(self, block_id: int, pages: bytes | memoryview) -> None:
        """Puts pages that `read` gave into a block that was touched.

        Raises:
            ValueError: they are not as many bytes as a block has.
        """
        start = self.offset(block_id)
        _fill(self._pages[:, start : start + self.page_bytes], pages)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's pages, all layers."""
        return self.page_bytes * self.num_layers

    def release_unused(self, block_ids: Iterable[int]) -> int:
        """Gives every slab back that holds none of these blocks; returns the bytes given back."""
        unused = self._slabs - {block_id // self.blocks_per_slab for block_id in block_ids}
        for slab in unused:
            for layer in range(self.num_layers):
                self._region.release(layer * self._layer_bytes + slab * self.slab_bytes, self.slab_bytes)
            self._huge -= set(range(*self._huge_pages(slab)))
        self._slabs -= unused
        return len(unused) * self.slab_bytes * self.num_layers

    def _huge_pages(self, slab: int) -> tuple[int, int]:
        """The first huge page of a layer that a slab touches, and the one behind its last."""
        return slab * self.slab_bytes // HUGE_PAGE_BYTES, cdiv((slab + 1) * self.slab_bytes, HUGE_PAGE_BYTES)

    def _slabs_of(self, huge: int) -> tuple[int, int]:
        """The first slab that touches a huge page of a layer, and the one behind its last."""
        return huge * HUGE_PAGE_BYTES // self.slab_bytes, cdiv((huge + 1) * HUGE_PAGE_BYTES, self.slab_bytes)


class OpenArena:
    """Open pages, raw: a slot holds one block's page of every layer, side by side."""

    def __init__(
        self,
        *,
        num_layers: int,
        page_bytes: int,
        num_slots: int,
        device: str = "cpu",
        debug_fill: bool = False,
    ) -> None:
        self._page_bytes, self._num_layers = page_bytes, num_layers
        self._page_stride = cdiv(page_bytes, 64) * 64
        self.slot_bytes = cdiv(self._page_stride * num_layers, mmap.PAGESIZE) * mmap.PAGESIZE
        self._debug_fill = debug_fill
        self._region = Region(self.slot_bytes * num_slots, device=device)
        self._slots: set[int] = set()
        # A layer's pages begin at its place in slot 0; offsets to other slots are whole slots.
        self.layers = [self._region.bytes[layer * self._page_stride :] for layer in range(num_layers)]

    @property
    def allocated_bytes(self) -> int:
        """Bytes held from the system."""
        return len(self._slots) * self.slot_bytes

    def offset(self, slot: int) -> int:
        """Bytes from a layer's first open page to its page in `slot`."""
        return slot * self.slot_bytes

    def touch(self, slots: Iterable[int]) -> None:
        """Counts slots that are about to be written."""
        for slot in set(slots) - self._slots:
            self._slots.add(slot)
            if self._debug_fill:
                self._slot(slot).fill_(0xFF)

    def read(self, slot: int) -> memoryview:
        """A copy of a slot's pages, one layer after the other."""
        return _copied(self._pages(slot))

    def write(self, slot: int, pages: bytes | memoryview) -> None:
        """Puts pages that `read` gave into a slot that was touched.

        Raises:
            ValueError: they are not as many bytes as a slot's pages have.
        """
        _fill(self._pages(slot), pages)

    def copy(self, source: int, target: int) -> None:
        """Copies a slot's pages of all layers."""
        self._slot(target).copy_(self._slot(source))

    def release_unused(self, slots: Iterable[int]) -> int:
        """Gives every slot back that is not among these; returns the bytes given back."""
        unused = self._slots - set(slots)
        for slot in unused:
            self._region.release(slot * self.slot_bytes, self.slot_bytes)
        self._slots -= unused
        return len(unused) * self.slot_bytes

    def _pages(self, slot: int) -> Bytes2D:
        used = self._slot(slot)[: self._page_stride * self._num_layers]
        return _plain(used.view(self._num_layers, self._page_stride)[:, : self._page_bytes])

    def _slot(self, slot: int) -> torch.Tensor:
        return self._region.bytes[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]


def _plain(pages: torch.Tensor) -> Bytes2D:
    """The same memory for numpy, which copies rows of pages without waking threads; on the CPU only."""
    return pages.numpy() if pages.device.type == "cpu" else pages


def _copied(pages: Bytes2D) -> memoryview:
    array = pages.copy() if isinstance(pages, np.ndarray) else pages.cpu().contiguous().numpy()
    return array.reshape(-1).data


def _fill(target: Bytes2D, pages: bytes | memoryview) -> None:
    source = np.frombuffer(pages, dtype=np.uint8)
    if source.size != target.shape[0] * target.shape[1]:
        raise ValueError(
            f"{source.size} bytes do not fill {target.shape[0]} pages of {target.shape[1]} bytes."
        )
    source = source.reshape(target.shape[0], target.shape[1])
    if isinstance(target, np.ndarray):
        target[:] = source
    else:
        target.copy_(torch.from_numpy(source.copy()))
