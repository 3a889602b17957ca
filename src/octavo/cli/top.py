"""`octavo top`: what a server's cache holds and does, live in the terminal."""

from __future__ import annotations

import json as json_module
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.remote import asking
from octavo.cli.render import count, duration, size
from octavo.cli.terminal import Terminal

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

_COLOURS = ("cyan", "dark_orange3", "green", "medium_purple", "deep_pink4", "turquoise4", "yellow4", "blue")
_GLYPHS = {"used": "●", "pinned": "◆", "reusable": "■"}
_WIDTH, _MAX_ROWS, _MAX_CONVERSATIONS = 78, 8, 12
_SPEED_OVER_S = 2.0

Model = dict[str, Any]


def top(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="The server's address.")
    ] = "http://127.0.0.1:8000",
    once: Annotated[bool, typer.Option("--once", help="Print what is so now, and end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print it as one line of JSON, and end.")] = False,
) -> None:
    """Show what a server's cache holds and does: memory, blocks, conversations and speed, until Ctrl-C.

    A key sees what is its own; it is read from OCTAVO_API_KEY. Where output is not a terminal, it is printed once.
    """
    terminal = Terminal(json=json)
    with asking(url) as server:
        if json:
            terminal.print_json(server.get("/dashboard/state").raise_for_status().json())
            return
        if once or not sys.stdout.isatty():
            state = server.get("/dashboard/state").raise_for_status().json()
            from rich.console import Console

            Console(highlight=False).print(picture(state, url, defaultdict(Speed)))
            return
        from rich.live import Live

        speeds: defaultdict[str, Speed] = defaultdict(Speed)
        try:
            with Live(screen=True, auto_refresh=False) as live:
                for state in _states(server):
                    live.update(picture(state, url, speeds), refresh=True)
        except KeyboardInterrupt:
            return
    terminal.say(f"The server at {url} has ended.")


class Speed:
    """Tokens a second over the last moments, from counts that grow."""

    def __init__(self) -> None:
        self._counts: list[tuple[float, int]] = []

    def add(self, total: int, now: float) -> float:
        """The count is `total` at a time; returns tokens a second since a while ago, 0 at first."""
        self._counts.append((now, total))
        while len(self._counts) > 2 and now - self._counts[1][0] >= _SPEED_OVER_S:
            self._counts.pop(0)
        then, before = self._counts[0]
        return max(0, total - before) / (now - then) if now > then else 0.0


def _states(server: Any) -> Iterator[dict[str, Any]]:
    """The state as it is after each event."""
    from octavo.server.dashboard.changes import take_up

    state: dict[str, Any] = {}
    with server.stream("GET", "/dashboard/events") as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if line == "event: end":
                return
            if line.startswith("data: "):
                take_up(state, json_module.loads(line[6:]))
            if line.startswith(("data: ", ":")) and state:
                yield state


def picture(state: dict[str, Any], url: str, speeds: Mapping[str, Speed]) -> RenderableType:
    """Everything about all models that are loaded. `speeds` makes one for each name."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for name, model in state["models"].items():
        parts.append(Text.assemble(("Octavo  ", "bold"), (name, "bold cyan"), (f"  {url}", "dim")))
        parts += _model(model, state["who"]["whole"], speeds[name])
        parts.append(Text())
    if not parts:
        parts.append(Text(f"No model is loaded at {url}."))
    return Group(*parts[:-1] if len(parts) > 1 else parts)


def _model(model: Model, whole: bool, speed: Speed) -> list[RenderableType]:
    counts, turns = model["counts"], _turns(model)
    firsts = sorted(turn["ttft_s"] for turn in turns[-20:])
    share = counts["cached_tokens"] / counts["prompt_tokens"] if counts["prompt_tokens"] else 0.0
    rate = speed.add(counts["generated_tokens"], time.monotonic())
    figures = [
        f"reused {share:.0%} of {count(counts['prompt_tokens'], 'prompt token')}",
        f"first token {duration(firsts[len(firsts) // 2])}" if firsts else "no answers yet",
        f"{rate:,.0f} tok/s now",
    ]
    answers = f"answering {counts['running']}, waiting {counts['waiting']}"
    blocks = f"blocks evicted {counts['evicted_blocks']:,}, restored {counts['restored_blocks']:,}"
    from rich.text import Text

    return [
        *_memory(model["memory"], whole),
        Text(" · ".join(figures)),
        Text(f"{answers} · {blocks}"),
        Text(),
        *_blocks(model),
        Text(),
        _conversations(model),
    ]


def _turns(model: Model) -> list[Model]:
    turns = [turn for one in model["conversations"].values() for turn in one["turns"]]
    return sorted(turns, key=lambda turn: turn["ended_s"])


def _memory(memory: Model, whole: bool) -> list[RenderableType]:
    from rich.text import Text

    held = memory["kv_used_bytes"] + memory["kv_reusable_bytes"]
    parts = [
        ("weights", memory["weights_bytes"], "grey50"),
        ("KV in use", memory["kv_used_bytes"], "bright_cyan"),
        ("KV reusable", memory["kv_reusable_bytes"], "dark_cyan"),
        ("workspace", memory.get("workspace_bytes", 0), "dark_khaki"),
        ("free for KV" if whole else "free, or others'", memory["kv_budget_bytes"] - held, "grey23"),
    ]
    total = max(1, sum(number for _, number, _ in parts))
    bar, legend = Text(), Text()
    for name, number, colour in parts:
        last = name == parts[-1][0]
        cells = _WIDTH if last else max(round(_WIDTH * number / total), 1 if number else 0)
        bar.append(("░" if last else "█") * min(cells, _WIDTH - len(bar)), colour)
        if number or name.startswith("KV"):
            legend.append("■ ", colour).append(f"{name} ").append(f"{size(number)}   ", "bold")
    legend.rstrip()
    disk = memory["disk"]
    if disk["state"] == "on" and whole:
        legend.append(f"   disk {size(disk['used_bytes'])} of {size(disk['budget_bytes'])}")
    return [bar, legend]


def _blocks(model: Model) -> list[Text]:
    from rich.text import Text

    cells, block_tokens = model["cells"], model["model"]["block_tokens"]
    number = len(cells["rows"]) + cells["num_more"]
    lines = [
        Text(
            f"{count(number, 'block')} of {block_tokens} tokens: ● in use  ◆ pinned  ■ reusable  □ open",
            "dim",
        )
    ]
    for start in range(0, min(len(cells["rows"]), _MAX_ROWS * _WIDTH), _WIDTH):
        line = Text()
        for _, kind, cell_state, _, names, *_ in cells["rows"][start : start + _WIDTH]:
            glyph = "□" if kind == "open" and cell_state == "reusable" else _GLYPHS[cell_state]
            line.append(glyph, _colour(names[0]) if names else "dim")
        lines.append(line)
    return lines


def _conversations(model: Model) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in (
        "conversation",
        "turns",
        "blocks",
        "shared",
        "memory",
        "prompt",
        "reused",
        "first token",
        "tok/s",
    ):
        table.add_column(title, justify="left" if title == "conversation" else "right")
    newest = sorted(model["conversations"].items(), key=lambda item: -item[1]["used_s"])
    for name, one in newest[:_MAX_CONVERSATIONS]:
        last = one["turns"][-1] if one["turns"] else None
        marks = (" pinned" if one["is_pinned"] else "") + (" answering" if one["num_running"] else "")
        table.add_row(
            Text.assemble(("■ ", _colour(name)), name, (marks, "dim")),
            f"{one['num_turns']:,}",
            f"{one['num_blocks']:,}",
            f"{one['num_shared_blocks']:,}",
            size(one["num_bytes"]),
            *(
                ("", "", "", "")
                if last is None
                else (
                    f"{last['prompt_tokens']:,}",
                    f"{last['cached_tokens'] / max(1, last['prompt_tokens']):.0%}",
                    duration(last["ttft_s"]),
                    f"{last['tokens_per_s']:,.0f}",
                )
            ),
        )
    return table


def _colour(name: str) -> str:
    return _COLOURS[int(name[1:]) % len(_COLOURS)]
