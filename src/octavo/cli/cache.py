"""`octavo cache`: what is kept on disk, without loading a model."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.render import count, size, table
from octavo.cli.terminal import Terminal
from octavo.errors import EngineError, InvalidRequest

if TYPE_CHECKING:
    from octavo.kv.storage.disk import DiskStore

cache = typer.Typer(
    name="cache", no_args_is_help=True, help="See, check, move or clear what is kept on disk."
)

_KEPT_BY_SERVERS = ("transcript", "response", "dialogue")
"""Kinds of documents: what was generated, responses, and conversations that responses add to."""

_Json = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]


@contextmanager
def _store() -> Iterator[DiskStore]:
    """The user's store, within the budget that holds without an option.

    Raises:
        EngineError: it cannot be opened or read; the message says why.
    """
    from octavo.kv.storage import default_disk_bytes
    from octavo.kv.storage.disk import DiskStore
    from octavo.kv.storage.file import store_path

    path = store_path()
    try:
        store = DiskStore(path, budget_bytes=default_disk_bytes() or 1 << 20)
        try:
            yield store
        finally:
            store.close()
    except (OSError, sqlite3.Error) as error:
        raise EngineError(
            f"The store {path} cannot be used: {error}. Remove the folder {path.parent} if nothing in it is wanted."
        ) from error


@cache.command("path")
def path_() -> None:
    """Print where the store is."""
    from octavo.kv.storage.file import store_path

    Terminal().print(str(store_path()))


@cache.command()
def show(json: _Json = False) -> None:
    """What is kept for each model and tenant: blocks, bytes, ages and hits."""
    terminal = Terminal(json=json)
    with _store() as store:
        totals = store.totals()
        rows = [(space, totals[space.namespace]) for space in store.spaces() if space.namespace in totals]
        file_bytes, place = store.file_bytes, store.path
    if json:
        for space, total in rows:
            terminal.print_json(
                {
                    "model": space.model,
                    "tenant": space.fields.get("tenant", ""),
                    "format": space.fields.get("format", ""),
                    "blocks": total.num_blocks,
                    "tails": total.num_tails,
                    "bytes": total.num_bytes,
                    "hits": total.num_hits,
                    "oldest_s": total.oldest_s,
                    "used_s": total.used_s,
                }
            )
        return
    terminal.print(f"{place}: {size(file_bytes)}")
    lines = [("MODEL", "TENANT", "FORMAT", "BLOCKS", "TAILS", "SIZE", "HITS", "OLDEST", "USED")]
    lines += [
        (
            *(space.model, str(space.fields.get("tenant", "")), str(space.fields.get("format", ""))),
            *(f"{total.num_blocks:,}", f"{total.num_tails:,}", size(total.num_bytes), f"{total.num_hits:,}"),
            *(_age(total.oldest_s), _age(total.used_s)),
        )
        for space, total in rows
    ]
    terminal.print("\n".join(table(lines)))


@cache.command("ls")
def ls(json: _Json = False) -> None:
    """The conversations that are kept, the latest first."""
    from octavo.sessions import archive

    terminal = Terminal(json=json)
    with _store() as store:
        items = archive.kept(store)
    if json:
        for item in items:
            terminal.print_json(
                {
                    "id": item.id,
                    "model": item.model,
                    "tenant": item.tenant,
                    "turns": item.num_turns,
                    "tokens": len(item.token_ids),
                    "saved_s": item.saved_s,
                    "title": item.title,
                }
            )
        return
    if not items:
        terminal.say("No conversation is kept. `octavo chat MODEL --save` keeps one.")
        return
    lines = [("ID", "MODEL", "TURNS", "TOKENS", "SAVED", "BEGINS")]
    lines += [
        (
            *(item.id, item.model, str(item.num_turns), f"{len(item.token_ids):,}"),
            *(_age(item.saved_s), item.title[:50]),
        )
        for item in items
    ]
    terminal.print("\n".join(table(lines)))


@cache.command()
def verify() -> None:
    """Read every record, compare it with its name and its checksum, and remove what is not sound."""
    with _store() as store:
        sound, doubtful = store.check()
    what = f"{count(sound, 'record')} sound"
    Terminal().print(f"{what}, none doubtful." if not doubtful else f"{what}, {doubtful:,} removed.")


@cache.command()
def clear(
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only keys and values of one model, named as `show` does."),
    ] = None,
    tenant: Annotated[str | None, typer.Option(metavar="NAME", help="Only what is of one tenant.")] = None,
    conversations: Annotated[
        bool, typer.Option("--conversations", help="The conversations that were saved, too.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Forget keys and values, on disk and in the memory of engines that are running.

    Nothing that was computed before is used afterwards, and what servers keep of responses and conversations is gone.
    With --model that stays. Engines that are running forget all that they hold, whatever it is of. Conversations that
    were saved are kept as text and tokens, unless --conversations is given.
    """
    from octavo.sessions import archive

    terminal = Terminal()
    with _store() as store:
        spaces = [
            space
            for space in store.spaces()
            if (model is None or space.model == model)
            and (tenant is None or space.fields.get("tenant") == tenant)
        ]
        if (model is not None or tenant is not None) and not spaces:
            raise InvalidRequest(
                "Nothing is kept of that model and tenant. `octavo cache show` lists what is."
            )
        if not yes and not typer.confirm(f"Forget everything in {store.path} that was asked for?"):
            raise typer.Abort
        store.mark_cleared()
        if model is None and tenant is None:
            gone = store.clear()
            for kind in _KEPT_BY_SERVERS:
                store.remove_documents(kind)
        else:
            gone = sum(store.clear_space(space.namespace) for space in spaces)
            for kind in _KEPT_BY_SERVERS if model is None else ():
                store.remove_documents(kind, tenant)
        if conversations:
            for item in archive.kept(store):
                if (model is None or item.model == model) and (tenant is None or item.tenant == tenant):
                    store.remove_document(archive.KIND, item.tenant, item.id.encode())
        left = store.file_bytes
    terminal.print(f"{count(gone, 'record')} removed; the store takes {size(left)} now.")


@cache.command()
def export(
    id: Annotated[str, typer.Argument(metavar="ID", help="Of a kept conversation, or last.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="To be made.")],
) -> None:
    """Write a kept conversation, with its keys and values, to one file."""
    from octavo.sessions import archive, transfer

    with _store() as store:
        done = transfer.export(store, archive.find(store, id), file)
    Terminal().print(
        f"{count(done.kept.num_turns, 'turn')} of {done.kept.id} written to {file}, with the keys and values of "
        f"{count(done.num_tokens, 'token')} ({size(file.stat().st_size)})."
    )


@cache.command("import")
def import_(file: Annotated[Path, typer.Argument(metavar="FILE", help="That `export` wrote.")]) -> None:
    """Take over a conversation from a file. Import only what you trust as much as the model itself."""
    from octavo.sessions import transfer

    with _store() as store:
        transfers = transfer.import_file(store, file)
    for done in transfers:
        Terminal().print(
            f"{count(done.kept.num_turns, 'turn')} taken over as {done.kept.id}, with the keys and values of "
            f"{count(done.num_tokens, 'token')}. Go on with: octavo chat {done.kept.model} --resume {done.kept.id}"
        )


def _age(when_s: float) -> str:
    """How long ago, for a person."""
    seconds = max(0.0, time.time() - when_s)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
