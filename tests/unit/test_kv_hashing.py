from __future__ import annotations

import os
import struct
import subprocess
import sys

import pytest

from octavo.kv import ROOT_HASH, block_hash, namespace_key

FIELDS = {"tenant": "a", "model": "é", "block_size": 32}


def test_a_namespace_key_depends_on_the_fields_and_not_on_their_order() -> None:
    key = namespace_key(FIELDS)
    assert len(key) == 32
    assert key == namespace_key(dict(reversed(FIELDS.items())))
    others = [{**FIELDS, "tenant": "b"}, {**FIELDS, "block_size": "32"}, {**FIELDS, "adapter": ""}, {}]
    assert len({key, *map(namespace_key, others)}) == 5


def test_a_block_hash_depends_on_the_namespace_the_parent_and_the_ids_in_order() -> None:
    a, b = namespace_key({"tenant": "a"}), namespace_key({"tenant": "b"})
    hashes = {
        block_hash(a, ROOT_HASH, [1, 2]),
        block_hash(b, ROOT_HASH, [1, 2]),
        block_hash(a, block_hash(a, ROOT_HASH, [0]), [1, 2]),
        block_hash(a, ROOT_HASH, [2, 1]),
        block_hash(a, ROOT_HASH, [1, 2, 0]),
    }
    assert len(hashes) == 5
    assert {len(hash_) for hash_ in hashes} == {16}


def test_hashes_are_the_same_in_every_process() -> None:
    code = (
        "from octavo.kv import *;"
        f"key = namespace_key({FIELDS!r}); print(block_hash(key, ROOT_HASH, range(32)).hex())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    other = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert other == block_hash(namespace_key(FIELDS), ROOT_HASH, range(32)).hex()
    # A constant, so that what is stored stays readable from one version to the next.
    assert other == "efedd354c5cb9cad104f31fc078b119a"


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_an_impossible_token_id_is_refused(token_id: int) -> None:
    with pytest.raises(struct.error):
        block_hash(b"key", ROOT_HASH, [token_id])
