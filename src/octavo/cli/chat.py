"""`octavo chat`: a conversation, at the keyboard or from a script."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli import commands
from octavo.cli.load import opened
from octavo.cli.options import EngineOptions, Model, OutputOptions, Overflow, SamplingOptions, System, grouped
from octavo.cli.render import count, size
from octavo.cli.run import INTERRUPTED
from octavo.cli.terminal import Terminal
from octavo.cli.text import check_text, read_file, read_stdin, script_turns
from octavo.errors import EngineStopped, InvalidRequest

if TYPE_CHECKING:
    from octavo.cli.editor import Editor
    from octavo.sessions.conversation import Conversation
    from octavo.sessions.engine import Engine


@grouped
def chat(
    model: Model,
    engine: EngineOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
    system: System = None,
    script: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take the turns from a file, one a line; - is standard input."),
    ] = None,
    load: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Go on with a conversation that /save wrote.")
    ] = None,
    save: Annotated[
        bool, typer.Option("--save", help="Keep the conversation on disk after each turn, to be resumed.")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Go on with a conversation that is kept; last is the latest one."),
    ] = None,
    overflow: Annotated[
        Overflow | None,
        typer.Option(
            show_default=False,
            help="When the window is full: stop refuses the turn (the default), drop-oldest forgets whole "
            "turns, and says so.",
        ),
    ] = None,
) -> int:
    """Talk with a model.

    Enter sends; Alt-Enter, or a backslash at the end of a line, starts a new line. Ctrl-C stops an answer
    and keeps the chat, Ctrl-D quits, /help lists the commands.

    In a script, or when standard input is not a terminal, each line is a turn or a command. Empty lines and
    lines that begin with # are left out, a line that ends with a backslash goes on with the next one, and a
    space before a / or # at the beginning makes it plain text. The first turn that fails ends the script.
    """
    settings, params = engine.settings(), sampling.settings()
    if system is not None:
        check_text(system)
    if load is not None and system is not None:
        raise InvalidRequest(
            "A saved conversation has its own system prompt, so --load takes no --system. "
            "Leave out one of them."
        )
    if resume is not None and (system is not None or load is not None):
        raise InvalidRequest(
            "--resume takes a whole conversation, system prompt included. Leave out --system and --load."
        )
    saved = None if load is None else _read_saved(load)
    item = None
    turns = _scripted(script)
    terminal = Terminal(json=output.json, quiet=output.quiet)
    options = {**params, **({} if overflow is None else {"overflow": overflow.value})}
    with opened(model, settings, terminal) as llm:
        if resume is not None:
            item = llm.kept(resume)
            conversation = llm.restore(item.data, **options)
        elif saved is not None:
            conversation = llm.restore(saved, **options)
        else:
            conversation = llm.conversation(system=system, **options)
        session = commands.Chat(llm, terminal, conversation, params, load)
        if item is not None:
            session.kept_id = item.id
        elif save:
            session.kept_id = llm.keep(conversation)
        try:
            if turns is not None:
                return _play(session, turns)
            from octavo.cli.editor import Editor

            _greet(llm, terminal, conversation)
            return _talk(session, Editor(commands.NAMES))
        finally:
            if session.kept_id is not None:
                terminal.say(
                    f"Kept as {session.kept_id}; go on with: octavo chat {model} --resume {session.kept_id}"
                )


def _play(session: commands.Chat, turns: Iterable[str]) -> int:
    """Takes turns from a script; the first failure ends it."""
    for turn in turns:
        session.terminal.remark(f"{session.prompt}{turn}")
        reply = session.take(turn)
        session.terminal.remark("")
        if session.ended:
            break
        if reply is not None and reply.finish_reason == "abort":
            return INTERRUPTED
    return 0


def _talk(session: commands.Chat, editor: Editor) -> int:
    """Takes turns from the keyboard; a turn that fails is told and changes nothing."""
    terminal = session.terminal
    while not session.ended:
        try:
            turn = editor.read(session.prompt)
        except KeyboardInterrupt:
            terminal.remark("Ctrl-D or /quit ends the chat.")
            continue
        if turn is None:
            break
        if not turn.strip():
            continue
        try:
            session.take(turn)
        except KeyboardInterrupt:
            terminal.say("Stopped.")
        except EngineStopped:
            raise
        except Exception as error:
            terminal.error(error)
        terminal.remark("")
    return 0


def _scripted(script: Path | None) -> list[str] | None:
    """The turns of a script, or None when a person types them."""
    if script is None and sys.stdin.isatty():
        return None
    if script is None or script == Path("-"):
        text = read_stdin()
    else:
        text = read_file(script, "The script")
    return list(script_turns(text.split("\n")))


def _read_saved(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(read_file(path, "The conversation"))
    except ValueError as error:
        raise InvalidRequest(
            f"{path} is not a saved conversation: {error}. Give a file that /save wrote."
        ) from error
    if not isinstance(data, dict):
        raise InvalidRequest(f"{path} is not a saved conversation. Give a file that /save wrote.")
    return data


def _greet(engine: Engine, terminal: Terminal, conversation: Conversation) -> None:
    memory = engine.memory()
    terminal.remark(
        f"{engine.name} · {engine.context:,} tokens of context · weights {size(memory.weights_bytes)} "
        f"({memory.weights}) · /help for help, Ctrl-D to quit"
    )
    if conversation.num_turns:
        terminal.remark(f"The conversation goes on after {count(conversation.num_turns, 'turn')}.")
