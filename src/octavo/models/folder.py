"""A folder with `config.json` and safetensors: what is in it, checked before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from octavo.errors import InvalidModelFile, UnsupportedModel

CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000
"""Bytes; the format itself allows no more."""


@dataclass(frozen=True, slots=True)
class FolderContent:
    """Files that make up the model, and how many weights they hold.

    Attributes:
        files: `config.json` and the safetensors files, by name.
        num_parameters: values in the safetensors files.
        config: `config.json`, parsed.
    """

    files: tuple[str, ...]
    num_parameters: int
    config: dict[str, Any]


def read_folder(folder: Path) -> FolderContent:
    """What a model folder holds, from its config and the headers of its weights.

    Raises:
        InvalidModelFile: a file is missing, cut short or not what its name says.
        UnsupportedModel: the weights are pickled, quantised by another library, or need code from the folder.
    """
    if not (folder / CONFIG).is_file():
        others = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f"; name one of its files, for example {folder / others[0]}" if others else ""
        raise InvalidModelFile(
            f"{folder} has no {CONFIG}, so it is not a model folder{hint}. Name a folder with {CONFIG}, "
            "safetensors and a tokenizer."
        )
    config = read_json(folder / CONFIG)
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise InvalidModelFile(f"{folder / CONFIG} has no model_type. Download the model's folder again.")
    if "auto_map" in config and not is_known(model_type):
        raise UnsupportedModel(
            f"{folder} is of type {model_type!r}, which needs Python code that comes with the model. Such "
            "code is never run; take a model of a type that transformers knows."
        )
    if config.get("quantization_config"):
        settings = config["quantization_config"]
        method = settings.get("quant_method") if isinstance(settings, dict) else settings
        raise UnsupportedModel(
            f"The weights in {folder} are quantised with {method}, which cannot be run. Take the unquantised "
            "model, or a GGUF file of it."
        )
    names = _weight_files(folder)
    return FolderContent((CONFIG, *names), sum(_count_weights(folder / name) for name in names), config)


def is_known(model_type: str) -> bool:
    """Whether the installed transformers knows a type of model."""
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; raises InvalidModelFile if it holds none."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidModelFile(f"{path} is not JSON: {error}. Download the model's folder again.") from error
    if not isinstance(content, dict):
        raise InvalidModelFile(f"{path} is not a JSON object. Download the model's folder again.")
    return content


def _weight_files(folder: Path) -> list[str]:
    """Names of the safetensors files, all of which are there."""
    if (folder / _WEIGHTS).is_file():
        return [_WEIGHTS]
    if (folder / _INDEX).is_file():
        weight_map = read_json(folder / _INDEX).get("weight_map")
        found = list(weight_map.values()) if isinstance(weight_map, dict) else []
        if not all(isinstance(name, str) for name in found):
            raise InvalidModelFile(
                f"{folder / _INDEX} names a weight file by something else than a string. Download the model's folder "
                "again."
            )
        names = sorted(set(found))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing or not names:
            raise InvalidModelFile(
                f"{folder} is not complete: {len(missing)} of {len(names)} weight files are missing"
                + (f", the first is {missing[0]}" if missing else "")
                + ". Download the model's folder again."
            )
        return names
    if pickled := sorted(
        path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth"))
    ):
        raise UnsupportedModel(
            f"{folder} has pickled weights only ({pickled[0]}). Such files can run code when they are opened "
            "and are never loaded; take a version of the model with safetensors."
        )
    raise InvalidModelFile(f"{folder} has no {_WEIGHTS} and no {_INDEX}. Download the model's folder again.")


def _count_weights(path: Path) -> int:
    """Values in a safetensors file, from its header, having checked that the file is whole."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, _MAX_HEADER):
            raise InvalidModelFile(
                f"{path} is cut short or not safetensors: its header would have {length:,} bytes, and the "
                f"file has {size:,}. Download the file again."
            )
        header = file.read(length)
    try:
        tensors = [fields for name, fields in json.loads(header).items() if name != "__metadata__"]
        end = 8 + length + max((fields["data_offsets"][1] for fields in tensors), default=0)
        count = sum(int(prod(fields["shape"])) for fields in tensors)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise InvalidModelFile(f"{path} is not a safetensors file. Download the file again.") from error
    if end > size:
        raise InvalidModelFile(
            f"{path} is cut short: it has {size:,} bytes and its tensors end at byte {end:,}. Download the "
            "file again."
        )
    return count
