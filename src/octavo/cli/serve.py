"""`octavo serve` and `octavo key`: the server, and keys for it."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.options import EngineOptions, grouped
from octavo.cli.served import first_engine, loadings
from octavo.cli.terminal import Terminal
from octavo.cli.text import read_file
from octavo.config import parse_bytes
from octavo.errors import InvalidRequest

if TYPE_CHECKING:
    import socket

    from octavo.server.engines import ServedEngine
    from octavo.server.models import Models
    from octavo.server.places import Loading
    from octavo.server.settings import ServerSettings
    from octavo.server.tenants import Keys

_MODELS, _ACCESS, _LIMITS, _GAPS = "Several models", "Access", "Limits", "Text with a gap"


@grouped
def serve(
    model: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            show_default=False,
            help="Bundled names (smollm2), folders, .gguf files, or hub ids such as owner/name. The first one is "
            "loaded at the start, the others when they are asked for.",
        ),
    ],
    engine: EngineOptions,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Address to listen at. Others than this machine's own need a key."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="Port to listen at; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="A key that is accepted; may be repeated. Each key is a tenant of its own. Other users of this "
            "machine can see a command's options; OCTAVO_API_KEY takes keys too, separated by spaces.",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    api_key_file: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="Hashes of keys, as `octavo key` writes them.", rich_help_panel=_ACCESS
        ),
    ] = None,
    metrics_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="Opens /metrics to other machines, and the dashboard's numbers without whose they are; nothing else. "
            "Without it, a server with keys shows its metrics to this machine alone.",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Lets web pages from there read answers, such as http://localhost:3000; * is any page. May be "
            "repeated. Without it, browsers keep answers from pages of other origins.",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    without_key: Annotated[
        bool,
        typer.Option(
            "--without-key",
            help="Let everybody in who can reach the address, also from other machines.",
            rich_help_panel=_ACCESS,
        ),
    ] = False,
    max_body: Annotated[
        str, typer.Option(metavar="SIZE", help="Body of a request at most.", rich_help_panel=_LIMITS)
    ] = "32MiB",
    max_requests: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Requests at once, with waiting ones and those in the background; more are told to come again.",
            rich_help_panel=_LIMITS,
        ),
    ] = 256,
    rate: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Requests a minute of each key. Without it, no limit.", rich_help_panel=_LIMITS
        ),
    ] = None,
    drain: Annotated[
        int,
        typer.Option(
            metavar="SECONDS",
            help="How long running answers may go on after SIGTERM or Ctrl-C.",
            rich_help_panel=_LIMITS,
        ),
    ] = 30,
    warm: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="A system prompt to be read before the first request asks for it; may be repeated.",
        ),
    ] = None,
    shared_prefix: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="A system prompt that is public: it is read once, at the start, and every key's requests may go "
            "on from it. May be repeated.",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    max_loaded: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="What loaded models may take together: weights and the budgets of their caches. Idle ones make room. "
            "Without it, four fifths of the memory that is free at the start.",
            rich_help_panel=_MODELS,
        ),
    ] = None,
    keep_alive: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Unload a model that nobody has used for so long. Without it, models stay while there is room.",
            rich_help_panel=_MODELS,
        ),
    ] = None,
    no_exact_history: Annotated[
        bool,
        typer.Option(
            "--no-exact-history",
            help="Tokenise answers that clients send back as text, instead of reading them as they were generated.",
        ),
    ] = False,
    fim_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="PREFIX,SUFFIX,MIDDLE",
            help="Tokens before the prefix, the suffix and the middle of a text with a gap, for a model whose "
            "tokenizer has none that are known.",
            rich_help_panel=_GAPS,
        ),
    ] = None,
    fim_order: Annotated[
        str | None,
        typer.Option(
            metavar="ORDER",
            help="prefix-first, or suffix-first for models trained on it. Without it, the one the model is known for.",
            rich_help_panel=_GAPS,
        ),
    ] = None,
) -> int:
    """Answer requests over HTTP, by the interfaces of OpenAI, Anthropic and llama.cpp.

    A request's log is one line of JSON on standard error. A first SIGTERM or Ctrl-C lets running answers finish, a
    second one does not.
    """
    from octavo.server.gate import is_loopback
    from octavo.server.settings import ServerSettings
    from octavo.server.tenants import Keys

    settings = ServerSettings(
        host=host,
        port=port,
        max_body_bytes=parse_bytes(max_body),
        max_requests=max_requests,
        requests_per_minute=rate,
        origins=tuple(origin or ()),
        drain_s=drain,
        exact_history=not no_exact_history,
        keep_alive_s=keep_alive,
        fim_tokens=tuple(fim_tokens.split(",")) if fim_tokens else (),
        fim_order=fim_order,
    )
    keys = Keys(
        [*(api_key or ()), *os.environ.get("OCTAVO_API_KEY", "").split()], api_key_file or (), metrics_key
    )
    if not keys and not without_key and not is_loopback(host):
        raise InvalidRequest(
            f"At {host} other machines can reach the server, and no key is set. Set one with --api-key or "
            "--api-key-file, or write --without-key to let everybody in."
        )
    options = engine.settings()
    known, limit = loadings(model, options, None if max_loaded is None else parse_bytes(max_loaded))
    settings = replace(settings, max_loaded_bytes=limit)
    warmed = [read_file(path, "The system prompt") for path in warm or ()]
    shared = [read_file(path, "The shared system prompt") for path in shared_prefix or ()]
    from octavo.server.serve import listen

    listener = listen(settings)
    try:
        _answer(model[0], known, options, settings, keys, listener, warmed, shared)
    finally:
        listener.close()
    return 0


def _answer(
    first: str,
    known: list[Loading[ServedEngine]],
    options: dict[str, Any],
    settings: ServerSettings,
    keys: Keys,
    listener: socket.socket,
    warmed: list[str],
    shared: list[str],
) -> None:
    from octavo.engine.shared import SHARED
    from octavo.kv.storage import default_disk_bytes, open_tier
    from octavo.server.log import log, log_to_stderr
    from octavo.server.models import Model, Models

    def warm(model: Model) -> None:
        for number, text in enumerate(shared):
            num_tokens = model.warm(text, SHARED, pin=f"shared {number}")
            log("shared", model=model.name, tokens=num_tokens)
        for text in warmed:
            for tenant in keys.tenants:
                num_tokens = model.warm(text, tenant.namespace)
                log("warmed", model=model.name, tenant=tenant.name or None, tokens=num_tokens)

    # Nothing here holds the engine, which may be unloaded and loaded again.
    engines = [first_engine(first, options, Terminal())]
    log_to_stderr()
    disk_bytes = options["kv_disk"] if options["kv_disk"] is not None else default_disk_bytes()
    disk = open_tier(disk_bytes if options["cache"] else 0, lambda: None)
    try:
        models = Models(engines, settings, more=known, disk=disk, warm=warm)
        engines.clear()
        try:
            _serve(models, settings, keys, listener)
        finally:
            models.close()
    finally:
        disk.close(10.0)


def _serve(models: Models, settings: ServerSettings, keys: Keys, listener: socket.socket) -> None:
    from octavo.server.app import create_app
    from octavo.server.background import Background
    from octavo.server.log import log
    from octavo.server.serve import serve as run

    stopping, background = threading.Event(), Background()
    app = create_app(models, settings, keys, stopping, background)
    host, port = listener.getsockname()[:2]

    def ready() -> None:
        address = f"[{host}]" if ":" in host else host
        log(
            "serving",
            url=f"http://{address}:{port}",
            model=models.names[0],
            models=models.names,
            keys=len(keys),
        )

    run(app, settings, listener, ready, stopping, models.check, background)


def key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is; it stands in the log.")],
    file: Annotated[
        Path, typer.Option(metavar="FILE", help="The file of hashes, which the new one is added to.")
    ] = Path("octavo-keys.txt"),
) -> int:
    """Make an API key for the server.

    The key is printed once, on standard output. The file gets its hash alone; give it to `octavo serve` with
    --api-key-file.
    """
    from octavo.server.tenants import new_key

    Terminal().print(new_key(name, file))
    return 0
