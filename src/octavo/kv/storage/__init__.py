"""Where bytes are: the arenas of memory, and stores of keyed bytes below it that need no model to be tested."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable

from octavo.config import parse_bytes
from octavo.kv.storage.disk import DiskStore
from octavo.kv.storage.file import store_path
from octavo.kv.storage.store_tier import StoreTier
from octavo.kv.storage.tier import NullTier, Tier, told

DEFAULT_DISK_BYTES = 10 << 30


def default_disk_bytes() -> int:
    """The budget of the disk tier where none is given: `OCTAVO_KV_DISK`, else 10 GiB.

    Raises:
        InvalidRequest: the variable is not a size.
    """
    return parse_bytes(os.environ.get("OCTAVO_KV_DISK", DEFAULT_DISK_BYTES))


def open_tier(budget_bytes: int, on_room: Callable[[], None]) -> Tier:
    """The user's store on disk as a tier; where it cannot be opened, none, which says why once.

    Args:
        budget_bytes: 0 for none.
        on_room: see `StoreTier`.
    """
    if not budget_bytes:
        return NullTier()
    path = store_path()
    try:
        store = DiskStore(path, budget_bytes=budget_bytes)
    except (OSError, sqlite3.Error) as error:
        return NullTier(told(error), str(path))
    return StoreTier(
        store,
        place=str(path.parent),
        budget_bytes=budget_bytes,
        on_room=on_room,
        cleared_mark=store.cleared_mark,
        notice=_notice(path, budget_bytes) if store.was_made else None,
    )


def _notice(path: object, budget_bytes: int) -> str:
    return (
        f"From now on the keys and values of conversations are kept in {path}, at most {budget_bytes / 2**30:.3g} GiB "
        "of them for 30 days; `octavo cache clear` removes them, and --kv-disk 0 keeps none."
    )
