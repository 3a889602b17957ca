"""What the manager hands to the engine: a sequence's table, a match, and the plan of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.kv.prefix import Parent
from octavo.spec import BLOCK_SIZE


@dataclass(eq=False, slots=True)
class BlockTable:
    """Where the keys and values of one running sequence are. Read it; only the manager changes it.

    Attributes:
        namespace: what the sequence may share blocks with.
        token_ids: the computed tokens.
        block_ids: a sealed block for each full block of `token_ids`, plus those that the step under way
            will seal.
        slot: holds the raw rows of the sequence's last block, which is partial or just full. None if the
            sequence is empty, or ends on a block's end and only its sealed blocks are here.
        num_pending: tokens of the step that is allocated and not committed, 0 if there is none.
        publishes: False once the cache, or what the sequence is of, was forgotten, or a hash collided: what
            the sequence computes from then on is its own.
    """

    namespace: bytes
    token_ids: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    slot: int | None = None
    num_pending: int = 0
    publishes: bool = True

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values are computed."""
        return len(self.token_ids)

    @property
    def last_block_start(self) -> int:
        """Position of the first token of the last block."""
        return max(0, self.num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE

    def parent(self, block: int) -> Parent:
        """What the sequence's block number `block` continues."""
        return self.block_ids[block - 1] if block else self.namespace

    def block_token_ids(self, block: int) -> tuple[int, ...]:
        """The computed tokens of block number `block`: `BLOCK_SIZE`, or fewer at the end."""
        return tuple(self.token_ids[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE])


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest reusable prefix of a prompt; good until the manager is next changed.

    Attributes:
        namespace: where it was looked for.
        block_ids: sealed blocks, in order.
        tail_slot: a slot whose first `num_tail_rows` raw rows continue the blocks, or None.
        num_tail_rows: fewer than `BLOCK_SIZE`; 0 without a slot.
    """

    namespace: bytes
    block_ids: tuple[int, ...]
    tail_slot: int | None
    num_tail_rows: int

    @property
    def num_tokens(self) -> int:
        """Tokens that need not be computed; always fewer than the prompt has."""
        return len(self.block_ids) * BLOCK_SIZE + self.num_tail_rows


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Where a step writes raw rows: all of them into `slot`.

    Rows of the block in which the step starts continue those that are in the slot. If the step goes past
    that block's end, the block is sealed from them, and the rows of the step's last block then take the
    slot from row 0 on; blocks in between are sealed from the step's own rows.

    `copy_from`, if not None, is a slot whose rows of the unfinished block, `num_tokens % BLOCK_SIZE` of
    them, are to be copied to `slot` first. Copies of several sequences are made in the order of their
    `allocate` calls and before any row of the step is written.
    """

    slot: int
    copy_from: int | None
