"""`octavo why`: what the last requests of a server reused, why not more, and what that cost."""

from __future__ import annotations

import json as json_module
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from octavo.cli.remote import asking
from octavo.cli.render import count, duration
from octavo.cli.terminal import Terminal

_MAX_NUMBER = 256


def why(
    url: Annotated[str, typer.Option(metavar="URL", help="The server's address.")] = "http://127.0.0.1:8000",
    number: Annotated[
        int,
        typer.Option(
            "--number",
            "-n",
            metavar="N",
            help=f"How many requests, {_MAX_NUMBER} at most.",
            min=1,
            max=_MAX_NUMBER,
        ),
    ] = 5,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a request, on one line.")] = False,
) -> None:
    """Say of a server's last requests what each reused, why not more, and what that cost.

    A key sees its own requests only; it is read from OCTAVO_API_KEY. In a chat, /why does the same.
    """
    terminal = Terminal(json=json)
    records = _fetch(url, number)
    if json:
        for record in records:
            terminal.print_json(record)
        return
    if not records:
        terminal.print("No request has finished yet.")
    for record in records:
        terminal.print("\n".join(lines(record)))


def lines(record: Mapping[str, Any]) -> list[str]:
    """A record, as `RequestRecord.as_dict` gives it, for a person."""
    at = time.strftime("%H:%M:%S", time.localtime(record["finished_s"]))
    reused = record["memory_tokens"] + record["disk_tokens"]
    where = [f"{record['memory_tokens']:,} from memory"] if record["memory_tokens"] else []
    where += [f"{record['disk_tokens']:,} from disk"] if record["disk_tokens"] else []
    parts = [
        f"{reused:,} of {count(record['prompt_tokens'], 'prompt token')} reused"
        + (f" ({', '.join(where)})" if where else ""),
        f"{record['computed_tokens']:,} computed",
        f"first token {duration(record['ttft_s'])}",
        count(record["completion_tokens"], "token"),
    ]
    shown = [f"{at}  {record['model']}  {' · '.join(parts)}"]
    reason = record["why"]
    if reason is None:
        return [*shown, "  Everything that was known was reused."]
    shown.append(f"  {reason['cause']}: {reason['message']}")
    if reason["difference"] is not None:
        before = reason["difference"]["before"]
        for name in ("earlier", "now"):
            text = json_module.dumps(reason["difference"][name], ensure_ascii=False)
            shown.append(
                f"    {name:<8} …{json_module.dumps(before, ensure_ascii=False)[1:-1]} | {text[1:-1]}…"
            )
    if reason["cost_s"] >= 0.0005:
        shown.append(f"    cost     about {duration(reason['cost_s'])}")
    if reason["advice"] is not None:
        advice = reason["advice"]
        shown.append(f"    advice   {advice['message']} Saves about {duration(advice['saved_s'])}.")
    return shown


def _fetch(url: str, number: int) -> list[dict[str, Any]]:
    with asking(url) as server:
        reply = server.get("/v1/octavo/requests", params={"limit": number})
        return [dict(record) for record in reply.raise_for_status().json()["data"]]
