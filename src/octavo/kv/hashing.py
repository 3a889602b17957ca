"""Names of blocks: keyed hash chains that are the same in every process and on every machine."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, Self

from octavo.spec import BLOCK_SIZE

ROOT_HASH = bytes(16)
"""Stands in for the parent's hash at a sequence's first block."""

FORGOTTEN = b""
"""In place of namespaces that were forgotten: what was counted of them stays in the sums."""

Kind = Literal["block", "tail"]

BlockHash = Callable[[bytes, bytes, Sequence[int]], bytes]
"""A function such as `block_hash`."""


def namespace_key(fields: Mapping[str, str | int]) -> bytes:
    """The 32-byte key of everything that must agree before a block may be shared.

    `fields` holds the tenant, the model's fingerprint, the format, the numerics id and so on. Their order
    does not matter; the number 1 and the text "1" are different.
    """
    text = json.dumps(dict(fields), sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode(), digest_size=32).digest()


def block_hash(namespace: bytes, parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The 16-byte hash of a block: BLAKE2b keyed with `namespace` over the parent's hash and the token ids.

    Raises:
        ValueError: `namespace` is longer than 64 bytes.
        struct.error: a token id is not in 0..2**32-1.
    """
    hasher = blake2b(parent, digest_size=16, key=namespace)
    hasher.update(struct.pack(f"<{len(token_ids)}I", *token_ids))
    return hasher.digest()


def chain_hashes(namespace: bytes, token_ids: Sequence[int]) -> Iterator[bytes]:
    """The hashes of a sequence's full blocks."""
    parent = ROOT_HASH
    for start in range(0, len(token_ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
        parent = block_hash(namespace, parent, token_ids[start : start + BLOCK_SIZE])
        yield parent


def sequence_hash(namespace: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of the last block of a sequence, which need not be full; `ROOT_HASH` of none."""
    parent = ROOT_HASH
    for start in range(0, len(token_ids), BLOCK_SIZE):
        parent = block_hash(namespace, parent, token_ids[start : start + BLOCK_SIZE])
    return parent


@dataclass(frozen=True, slots=True)
class Name:
    """What a record is asked for by; all of it has to agree.

    `hash` names the tokens after everything that `parent`, a hash too, stands for. `namespace` is the key of
    both hashes: all that a bit of the payload can depend on.
    """

    kind: Kind
    namespace: bytes
    parent: bytes
    hash: bytes
    token_ids: tuple[int, ...]

    @classmethod
    def of(
        cls,
        kind: Kind,
        namespace: bytes,
        parent: bytes,
        token_ids: Sequence[int],
        hash_function: BlockHash = block_hash,
    ) -> Self:
        """The name of these tokens behind `parent`, with their hash."""
        ids = tuple(token_ids)
        return cls(kind, namespace, parent, hash_function(namespace, parent, ids), ids)
