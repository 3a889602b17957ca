"""The prefix index: which sealed block continues which, by hash and by token ids."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from octavo.kv.hashing import ROOT_HASH, BlockHash

Parent = int | bytes
"""What a block continues: the block id before it, or the namespace if it is a sequence's first block."""


@dataclass(frozen=True, slots=True)
class PublishedBlock:
    """What a shareable block holds: `BLOCK_SIZE` token ids, after everything that `parent` stands for.

    `depth` counts the blocks before it.
    """

    namespace: bytes
    block_hash: bytes
    parent: Parent
    depth: int
    token_ids: tuple[int, ...]


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of leading token ids that both have."""
    length = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        length += 1
    return length


class PrefixIndex:
    """A forest of published blocks; its roots are namespaces.

    A block's parent is published for as long as the block is, so a parent's id says exactly which tokens
    come before. Therefore a block that has the right hash is compared by its parent and its own token
    ids, and a collision is a miss.
    """

    def __init__(self, hash_function: BlockHash) -> None:
        self._hash = hash_function
        self._blocks: dict[int, PublishedBlock] = {}
        self._by_hash: dict[bytes, int] = {}
        self._children: dict[Parent, set[int]] = {}

    def chain_hash(self, parent: Parent) -> bytes:
        """The hash that stands for everything up to and including `parent`, which is published."""
        return ROOT_HASH if isinstance(parent, bytes) else self._blocks[parent].block_hash

    def find(self, namespace: bytes, parent: Parent, token_ids: Sequence[int]) -> int | None:
        """The published block with exactly these ids that continues `parent`."""
        block_id = self.with_hash(self._hash(namespace, self.chain_hash(parent), token_ids))
        return block_id if block_id is not None and self.holds(block_id, parent, token_ids) else None

    def holds(self, block_id: int, parent: Parent, token_ids: Sequence[int]) -> bool:
        """Whether `block_id` is published with exactly this content."""
        block = self._blocks.get(block_id)
        return block is not None and block.parent == parent and block.token_ids == tuple(token_ids)

    def with_hash(self, block_hash: bytes) -> int | None:
        """The published block with this hash."""
        return self._by_hash.get(block_hash)

    def publish(self, block_id: int, namespace: bytes, parent: Parent, token_ids: Sequence[int]) -> bool:
        """Put a block in. False if a block with this hash is in already: nothing is done."""
        hash_ = self._hash(namespace, self.chain_hash(parent), token_ids)
        if hash_ in self._by_hash:
            return False
        depth = 0 if isinstance(parent, bytes) else self._blocks[parent].depth + 1
        self._blocks[block_id] = PublishedBlock(namespace, hash_, parent, depth, tuple(token_ids))
        self._by_hash[hash_] = block_id
        self._children.setdefault(parent, set()).add(block_id)
        return True

    def unpublish(self, block_id: int) -> PublishedBlock:
        """Take a block out and return what it held. The blocks that continue it must be out already."""
        block = self._blocks.pop(block_id)
        del self._by_hash[block.block_hash]
        siblings = self._children[block.parent]
        siblings.remove(block_id)
        if not siblings:
            del self._children[block.parent]
        return block

    def clear(self) -> list[PublishedBlock]:
        """Take all blocks out and return what they held."""
        blocks = list(self._blocks.values())
        self._blocks, self._by_hash, self._children = {}, {}, {}
        return blocks

    def children(self, parent: Parent) -> Collection[int]:
        """The published blocks that continue `parent`."""
        return self._children.get(parent, ())

    def chains(self, parent: Parent, limit: int) -> list[list[int]]:
        """Ways to go on behind `parent`, `limit` at most: published blocks, the longest way first.

        Where there are very many, some are not looked at.
        """
        ways: list[list[int]] = []
        waiting = [[block_id] for block_id in self.children(parent)]
        while waiting and len(ways) < 8 * limit:
            way = waiting.pop()
            children = list(self.children(way[-1]))
            if not children:
                ways.append(way)
                continue
            for child in children[1:]:
                waiting.append([*way, child])
            way.append(children[0])
            waiting.append(way)
        return sorted(ways, key=len, reverse=True)[:limit]

    def get(self, block_id: int) -> PublishedBlock | None:
        """What a block holds; None if it is not published."""
        return self._blocks.get(block_id)

    def blocks(self) -> dict[int, PublishedBlock]:
        """What all published blocks hold, by id; a copy."""
        return dict(self._blocks)

    def __getitem__(self, block_id: int) -> PublishedBlock:
        return self._blocks[block_id]

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._blocks

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)
