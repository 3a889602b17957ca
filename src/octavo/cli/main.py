"""The program `octavo`: its commands, and what it says and returns when one of them fails.

Exit codes: 0; 2 for a mistake that the user can mend; 130 for Ctrl-C; 1 for everything else.
Model libraries are imported by a command once it needs a model, so that everything else is quick.
"""

from __future__ import annotations

import atexit
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, NoReturn

import typer

from octavo.cli.batch import batch
from octavo.cli.bench import bench
from octavo.cli.cache import cache
from octavo.cli.chat import chat
from octavo.cli.compare import compare
from octavo.cli.doctor import doctor
from octavo.cli.explain import explain
from octavo.cli.models import models, pull
from octavo.cli.plan import plan
from octavo.cli.run import INTERRUPTED, run
from octavo.cli.serve import key, serve
from octavo.cli.terminal import Terminal
from octavo.cli.top import top
from octavo.cli.verify import verify
from octavo.cli.why import why
from octavo.errors import UserError

app = typer.Typer(
    name="octavo",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run language models. What was computed once is kept and reused, and an answer says how much was.",
    epilog="Start with: octavo run smollm2 'Hello'",
)


def _paragraphs(text: str) -> str:
    """A docstring with one line a paragraph, which typer then breaks to the terminal's width."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


for _command in (
    run,
    chat,
    serve,
    batch,
    key,
    pull,
    models,
    plan,
    compare,
    explain,
    verify,
    why,
    top,
    doctor,
):
    app.command(help=_paragraphs(_command.__doc__ or ""))(_command)
app.add_typer(bench)
app.add_typer(cache)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        Terminal().print(f"octavo {version('octavo')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _octavo(
    context: typer.Context,
    _asked: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        Terminal().print(context.get_help())


def main() -> NoReturn:
    """Entry point of the program."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    code = invoke(sys.argv[1:])
    atexit._run_exitfuncs()
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # without taking the model libraries down object by object, which takes most of a second


def invoke(arguments: Sequence[str]) -> int:
    """Runs the command line `arguments` and returns its exit code."""
    terminal = Terminal()
    try:
        result = typer.main.get_command(app).main(list(arguments), prog_name="octavo", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        return _nobody_reads()
    except SystemExit as error:  # typer's own way to end on a broken pipe
        return _nobody_reads() if error.code == 1 else int(error.code or 0)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        if hasattr(error, "format_message"):  # a usage error, whose class differs by version of typer
            return _usage(error, terminal)
        terminal.error(error)
        return 2 if isinstance(error, UserError) else 1
    return result if isinstance(result, int) else 0


def _usage(error: Exception, terminal: Terminal) -> int:
    said = error.format_message()  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "octavo"
    if not said.endswith((".", "?")):
        said += "."
    terminal.say(f"{said} Run `{command} --help` for what can be written.")
    return 2


def _nobody_reads() -> int:
    """Ends quietly after a broken pipe, also when Python flushes what is left at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 1


if __name__ == "__main__":
    main()
