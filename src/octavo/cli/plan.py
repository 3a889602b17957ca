"""`octavo plan`: what a model's keys and values take, and what fits, before anything is loaded."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.options import KvFormat, Weights, WeightsOption
from octavo.cli.render import count, size, table
from octavo.cli.terminal import Terminal
from octavo.config import EngineConfig, parse_bytes
from octavo.errors import InvalidRequest

if TYPE_CHECKING:
    from octavo.formats import PageFormat
    from octavo.models.outline import Outline
    from octavo.spec import CacheGroup, CacheSpec

_CONTEXTS = (2_048, 8_192, 32_768, 131_072)


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            help="As for other commands, or the path of a config.json. Only that, or the header of a GGUF file, is "
            "read.",
        ),
    ],
    context: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", help="Tokens of each user. Without it, several lengths.", min=1),
    ] = None,
    users: Annotated[
        int, typer.Option(metavar="N", help="Conversations that are in memory at the same time.", min=1)
    ] = 1,
    kv_format: Annotated[
        KvFormat | None,
        typer.Option(help="The format to spell out. All are in the tables.", show_default=False),
    ] = None,
    weights: WeightsOption = Weights.auto,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="What there is for all of it, such as 16GiB. Without it, what is free now."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on one line.")] = False,
) -> None:
    """Say what fits: bytes of a token's keys and values, of contexts, and of the weights, in every cache format.

    The arithmetic is the engine's own. Models that do not run here are planned as well, and the plan says so.
    """
    total = None if memory is None else parse_bytes(memory)
    if total is not None and total < 1:
        raise InvalidRequest(f"--memory is {memory!r}; it must be above 0.")
    terminal = Terminal(json=json)
    from octavo.models.outline import outline
    from octavo.models.prepare import resolve_dtype

    dtype = resolve_dtype("auto", weights=weights.value)
    found = outline(model)
    if total is None:
        import psutil

        total = psutil.virtual_memory().available
    values = make_plan(
        found,
        found.spec(dtype),
        contexts=(context,) if context is not None else _contexts(found),
        users=users,
        kv_format=None if kv_format is None else kv_format.value,
        weights_bytes=found.weights_bytes(weights.value, dtype),
        memory_bytes=total,
    )
    if json:
        terminal.print_json(values)
        return
    for line in _lines(found, values, weights.value):
        terminal.print(line)


def make_plan(
    found: Outline,
    spec: CacheSpec,
    *,
    contexts: tuple[int, ...],
    users: int,
    kv_format: str | None,
    weights_bytes: int | None,
    memory_bytes: int,
) -> dict[str, Any]:
    """The plan as JSON values; bytes, tokens and users."""
    from octavo.formats import get_format
    from octavo.formats.page_format import FORMATS
    from octavo.kv.planner import block_bytes_of, longest_context, most_users, sequence_bytes
    from octavo.spec import BLOCK_SIZE, STATE_BYTES

    chosen = get_format(kv_format or EngineConfig().kv_format, spec)
    max_running = EngineConfig().max_running
    budget = max(memory_bytes - (weights_bytes or 0), 0)
    formats = {}
    for name, page_format in FORMATS.items():
        formats[name] = {
            "bytes_per_token": block_bytes_of(spec, page_format) // BLOCK_SIZE,
            "sequence_bytes": {str(n): sequence_bytes(spec, page_format, n) for n in contexts},
            "windowed_bytes": {
                str(n): sequence_bytes(type(spec)(found.groups, spec.dtype), page_format, n, windowed=True)
                for n in contexts
            },
            "most_users": {str(n): most_users(spec, page_format, budget, n, max_running) for n in contexts},
            "longest_context": _within(
                longest_context(spec, page_format, budget, users, max_running), found.context
            ),
        }
    needs = {str(n): users * sequence_bytes(spec, chosen, n) + (weights_bytes or 0) for n in contexts}
    return {
        "model": found.name,
        "model_type": found.model_type,
        "runs_here": not found.refusal,
        "refusal": found.refusal,
        "context": found.context,
        "num_parameters": found.num_parameters,
        "groups": [asdict(group) for group in found.groups],
        "dtype": spec.dtype,
        "weights_bytes": weights_bytes,
        "state_bytes": sum(group.num_layers * group.state_elements * STATE_BYTES for group in spec.groups),
        "format": chosen.name,
        "formula": [_formula(group, chosen) for group in found.groups],
        "memory_bytes": memory_bytes,
        "kv_budget_bytes": budget,
        "users": users,
        "formats": formats,
        "needed_bytes": needs,
    }


def _contexts(found: Outline) -> tuple[int, ...]:
    limit = found.context or _CONTEXTS[-1]
    return tuple(sorted({min(n, limit) for n in _CONTEXTS}))


def _within(num_tokens: int, limit: int | None) -> int:
    return num_tokens if limit is None else min(num_tokens, limit)


def _formula(group: CacheGroup, page_format: PageFormat) -> str:
    """What the layers of a group keep, as a sum that can be checked by hand."""
    from octavo.spec import BLOCK_SIZE, STATE_BYTES

    page, layers = group.page, count(group.num_layers, "layer")
    if group.kind == "recurrent":
        total = group.num_layers * group.state_elements * STATE_BYTES
        return (
            f"{layers} x a state of {group.state_elements:,} numbers x {STATE_BYTES} bytes = {total:,} bytes a "
            "conversation, however long it is"
        )
    total = group.num_layers * page_format.page_bytes(page) // BLOCK_SIZE
    parts = page_format.head_bytes(page)
    key, value = (parts[at] // BLOCK_SIZE for at in (0, 3))
    key_scales, value_scales = ((parts[at] + parts[at + 1]) / BLOCK_SIZE for at in (1, 4))
    codes = f"{key:g} + {key_scales:g}" if key_scales else f"{key:g}"
    if group.kind == "latent":
        return f"{layers} x a latent of {page.head_dim} channels ({codes} bytes) = {total:,} bytes a token"
    if value_scales:
        codes = f"(key {codes}, value {value:g} + {value_scales:g} bytes of codes and scales)"
    else:
        codes = f"(key {codes}, value {value:g} bytes)"
    heads = f"{count(page.num_kv_heads, 'head')} of {page.head_dim} channels"
    return f"{layers} x {heads} x {codes} = {total:,} bytes a token"


def _lines(found: Outline, values: dict[str, Any], weights: str) -> list[str]:
    limit = f", made for {found.context:,} tokens" if found.context else ""
    parameters = values["num_parameters"]
    size_text = f", {parameters / 1e6:,.0f} million weights" if parameters else ""
    lines = [f"{found.name}: {found.model_type}{size_text}{limit}."]
    if found.refusal:
        lines.append(f"Octavo does not run it: {found.refusal}. This is what it keeps.")
    held = values["weights_bytes"]
    lines.append(
        f"Weights  {size(held)} ({weights})"
        if held is not None
        else "Weights  not known from the config alone"
    )
    lines += ["", f"A token in the format {values['format']}:"]
    lines += [f"  {text}" for text in values["formula"]]
    lines += [f"  {text}" for text in _lessons(found)]
    contexts = list(next(iter(values["formats"].values()))["sequence_bytes"])
    heads = [f"{int(n):,} TOKENS" for n in contexts]
    rows = [("FORMAT", "A TOKEN", *heads)]
    rows += [
        (name, f"{item['bytes_per_token']:,} B", *(size(item["sequence_bytes"][n]) for n in contexts))
        for name, item in values["formats"].items()
    ]
    lines += ["", "One conversation, full blocks in the format and the open one raw:"]
    lines += table(rows, right=range(1, len(rows[0])))
    if any(group.window for group in found.groups) and not found.refusal:
        item = values["formats"][values["format"]]
        saved = ", ".join(f"{size(item['windowed_bytes'][n])} at {int(n):,}" for n in contexts)
        lines.append(
            f"Octavo keeps the blocks behind a window too; without them {values['format']} would take {saved}."
        )
    rows = [("FORMAT", *(f"USERS AT {int(n):,}" for n in contexts), f"LONGEST OF {values['users']:,}")]
    for name, item in values["formats"].items():
        users = (f"{item['most_users'][n]:,}" for n in contexts)
        rows.append((name, *users, f"{item['longest_context']:,}"))
    lines += [
        "",
        f"With {size(values['memory_bytes'])}, of which the cache may have {size(values['kv_budget_bytes'])} "
        f"(--kv-memory):",
    ]
    lines += table(rows, right=range(1, len(rows[0])))
    lines.append("Python and its libraries take about 200 MiB besides, and loading takes more for a while.")
    if values["users"] > 1 or len(contexts) == 1:
        need = ", ".join(f"{size(values['needed_bytes'][n])} at {int(n):,} tokens" for n in contexts)
        lines.append(f"{count(values['users'], 'user')} in {values['format']}, weights included: {need}.")
    return lines


def _lessons(found: Outline) -> list[str]:
    """Why it is so much, or so little."""
    lessons = []
    for group in found.groups:
        shared = group.num_heads // max(group.page.num_kv_heads, 1)
        if group.kind == "latent":
            lessons.append(
                f"One latent stands for the keys and values of all {group.num_heads} heads, which are computed from it."
            )
        elif group.kind == "recurrent":
            lessons.append(
                "A state is summed up over the text, so it does not grow; it cannot be cut off at a token either."
            )
        elif group is found.groups[0] and shared > 1:
            lessons.append(
                f"{group.num_heads} query heads share {count(group.page.num_kv_heads, 'key-value head')} (grouped "
                f"queries): 1/{shared} of what heads of their own would take."
            )
        elif group is found.groups[0]:
            lessons.append(
                f"Each of the {group.num_heads} query heads has keys and values of its own; sharing one among four, as "
                "newer models do, would take a quarter."
            )
        if group.window:
            lessons.append(
                f"{count(group.num_layers, 'layer')} look at the last {group.window:,} tokens only."
            )
    return lessons
