"""Options that several commands share, each defined once, with its help and its default."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from typing import Annotated, Any, cast, get_type_hints

import typer

from octavo.config import EngineConfig, SamplingParams, parse_bytes

_ENGINE, _SAMPLING, _OUTPUT = "Model and cache", "Sampling", "Output"

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="A bundled name (smollm2), a folder, a .gguf file, or a hub id such as owner/name.",
    ),
]
System = Annotated[
    str | None, typer.Option(metavar="TEXT", help="The system prompt. Without it, the model's own.")
]


class Dtype(StrEnum):
    """The choices of `--dtype`."""

    auto = "auto"
    bf16 = "bf16"
    fp32 = "fp32"


class Weights(StrEnum):
    """The choices of `--weights`."""

    auto = "auto"
    bf16 = "bf16"
    fp32 = "fp32"
    int8 = "int8"
    int4 = "int4"


WeightsOption = Annotated[
    Weights,
    typer.Option(
        help="How weights are held: auto leaves those of a GGUF file packed and takes the compute dtype for others; "
        "bf16 and fp32 unpack a file; int8 and int4 quantise dense weights.",
        rich_help_panel=_ENGINE,
    ),
]


class KvFormat(StrEnum):
    """The choices of `--kv-format`."""

    int8 = "int8"
    k8v4 = "k8v4"
    int4 = "int4"
    bf16 = "bf16"
    fp32 = "fp32"
    raw = "raw"


class Speculate(StrEnum):
    """The choices of `--speculate`."""

    auto = "auto"
    off = "off"


class Overflow(StrEnum):
    """The choices of `--overflow`."""

    stop = "stop"
    drop_oldest = "drop-oldest"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the model is loaded and how much its cache may hold."""

    dtype: Annotated[
        Dtype,
        typer.Option(help="Compute dtype; auto is bf16 where the CPU has it.", rich_help_panel=_ENGINE),
    ] = Dtype.auto
    weights: WeightsOption = Weights.auto
    kv_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Budget of the KV cache, such as 512MiB or 4GiB. Without it, a share of free memory.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    kv_disk: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="What keys and values may take on disk, where they outlive the program; 0 keeps them off it. "
            "Without it, OCTAVO_KV_DISK or 10GiB.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    kv_format: Annotated[
        KvFormat,
        typer.Option(
            help="How full blocks of the cache are encoded, whatever the precision of the weights; raw keeps the "
            "compute dtype.",
            rich_help_panel=_ENGINE,
        ),
    ] = KvFormat.int8
    context: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="Context window. Without it, the model's own.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    no_cache: Annotated[
        bool,
        typer.Option(
            "--no-cache",
            help="Compute every token again at every step: the same answer, slowly.",
            rich_help_panel=_ENGINE,
        ),
    ] = False
    speculate: Annotated[
        Speculate,
        typer.Option(
            help="Compute tokens that earlier text makes likely beside the one that is due, where it pays. The answers "
            "are the same.",
            rich_help_panel=_ENGINE,
        ),
    ] = Speculate.auto
    device: Annotated[str, typer.Option(metavar="NAME", help="A torch device.", rich_help_panel=_ENGINE)] = (
        "cpu"
    )
    threads: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Threads to compute with. Without it, torch's own number.",
            rich_help_panel=_ENGINE,
        ),
    ] = None

    def settings(self) -> dict[str, Any]:
        """Keywords of `Engine`.

        Raises:
            InvalidRequest: a value is out of range.
        """
        settings: dict[str, Any] = {
            "dtype": self.dtype.value,
            "weights": self.weights.value,
            "kv_format": self.kv_format.value,
            "context": self.context,
            "cache": not self.no_cache,
            "speculate": self.speculate.value,
            "device": self.device,
            "threads": self.threads,
        }
        budget = None if self.kv_memory is None else parse_bytes(self.kv_memory)
        disk = None if self.kv_disk is None else parse_bytes(self.kv_disk)
        EngineConfig(kv_memory_bytes=budget, kv_disk_bytes=disk or 0, **settings)  # a mistake is told at once
        return {"kv_memory": budget, "kv_disk": disk, **settings}


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are chosen."""

    max_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Tokens of an answer at most. Without it, until the window is full.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    temperature: Annotated[
        float,
        typer.Option(
            metavar="T",
            help="0 takes the likeliest token, so that an answer can be repeated; 0.7 is lively.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 0.0
    top_k: Annotated[
        int,
        typer.Option(
            metavar="K", help="Keep the K likeliest tokens; 0 keeps all.", rich_help_panel=_SAMPLING
        ),
    ] = 0
    top_p: Annotated[
        float,
        typer.Option(
            metavar="P",
            help="Keep the fewest tokens whose probabilities add up to P.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        typer.Option(
            metavar="P",
            help="Keep tokens at least P times as likely as the likeliest.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        typer.Option(
            metavar="R",
            help="Above 1: tokens that were there already become less likely.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        typer.Option(
            metavar="R", help="Taken once from tokens the answer has already.", rich_help_panel=_SAMPLING
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        typer.Option(
            metavar="R", help="Taken for each time the answer has a token.", rich_help_panel=_SAMPLING
        ),
    ] = 0.0
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Of the noise: the same seed gives the same answer. Without it, one is drawn and shown.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Ends the answer before this text; may be repeated.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Show the log-probability of each token and of the N likeliest in its place.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None

    beams: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Above 1: search for the likeliest answer with N beams, and show it when it is found.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 1
    best_of: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Draw N answers, and show the one whose tokens are the likeliest.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None

    def settings(self) -> dict[str, Any]:
        """Fields of `SamplingParams`.

        Raises:
            InvalidRequest: a value is out of range.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["stop"] = tuple(self.stop or ())
        SamplingParams(**values)  # a mistake is told before the model is loaded
        return values


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What is printed."""

    json: Annotated[
        bool,
        typer.Option(
            "--json", help="One JSON object a reply, on one line; nothing else.", rich_help_panel=_OUTPUT
        ),
    ] = False
    quiet: Annotated[
        bool,
        typer.Option("--quiet", help="Answers, notes and errors only.", rich_help_panel=_OUTPUT),
    ] = False


def grouped(command: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a command take a dataclass: the parameter stands for one option per field of it."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        kind = groups.get(parameter.name)
        if kind is None:
            parameters.append(
                parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
            )
            continue
        types = get_type_hints(kind, include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=types[field.name],
            )
            for field in fields(kind)
        ]

    @functools.wraps(command)
    def call(**values: Any) -> Any:
        for name, kind in groups.items():
            values[name] = cast(type, kind)(**{field.name: values.pop(field.name) for field in fields(kind)})
        return command(**values)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call
