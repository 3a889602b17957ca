"""`octavo pull` and `octavo models`: what is on this machine, and how to get what is not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli import render
from octavo.cli.options import Model
from octavo.cli.terminal import Terminal
from octavo.models import catalog


def pull(model: Model) -> None:
    """Get a model onto this machine, ready to run.

    It may be repeated: what is there already is checked, and not downloaded again.
    """
    terminal = Terminal()
    source = catalog.resolve(model)
    was_here = source.path is not None
    with terminal.bars() as bars:
        path = catalog.local_path(catalog.pull(source, bars))
    state = "already here" if was_here else "ready"
    terminal.print(f"{source.name} is {state}: {path} ({render.size(_num_bytes(path))}).")


def models(
    json: Annotated[bool, typer.Option("--json", help="One JSON object a model, on one line.")] = False,
) -> None:
    """List the models that can be named: bundled ones, and those on this machine."""
    terminal = Terminal(json=json)
    entries = catalog.list_models()
    if json:
        for entry in entries:
            terminal.print_json(
                {
                    "name": entry.name,
                    "kind": entry.kind,
                    "size_bytes": entry.size_bytes,
                    "path": None if entry.path is None else str(entry.path),
                }
            )
        return
    rows = [("NAME", "KIND", "SIZE", "PATH")]
    for entry in entries:
        where = f"(not here; octavo pull {entry.name})" if entry.path is None else str(entry.path)
        rows.append((entry.name, entry.kind, render.size(entry.size_bytes), where))
    terminal.print("\n".join(render.table(rows, right=(2,))))


def _num_bytes(path: Path) -> int:
    """Bytes of a file, or of the files under a folder, links followed."""
    if path.is_file():
        return path.stat().st_size
    return sum(Path(root, name).stat().st_size for root, _, names in os.walk(path) for name in names)
