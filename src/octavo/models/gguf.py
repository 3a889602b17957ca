"""GGUF files: read once with care, and kept as a table of their tensors for every later start."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

from octavo.errors import EngineError, InvalidModelFile, OctavoError, UnsupportedModel
from octavo.models import gguf_arch, gguf_header, store
from octavo.models.loaded import Progress

_FORMAT = 3
_TABLE = "tensors.json"


@dataclass(frozen=True, slots=True)
class Record:
    """What is kept of a GGUF file.

    Attributes:
        folder: with `config.json` and the tokenizer's files, as transformers saves them.
        sha256: of the file, hexadecimal.
        eos_token_ids: tokens that end an answer.
        weights: parameters and where they lie in the file.
    """

    folder: Path
    sha256: str
    eos_token_ids: frozenset[int]
    weights: tuple[gguf_arch.Weight, ...]

    @property
    def num_parameters(self) -> int:
        return sum(prod(weight.shape) for weight in self.weights)


def is_gguf(path: Path) -> bool:
    """Whether a file says that it is GGUF, by its name or its first bytes."""
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(len(gguf_header.MAGIC)) == gguf_header.MAGIC


def prepare(path: Path, progress: Progress | None = None) -> Record:
    """The record of a GGUF file; the first time its header and tokenizer are read, which takes seconds.

    A file that is refused leaves nothing in the model cache.

    Raises:
        InvalidModelFile: not a GGUF file, cut short, or contradicting itself.
        UnsupportedModel: its architecture, tokenizer or tensor types cannot be read.
        EngineError: the model cache cannot be written.
    """
    with refused_if_broken(path):
        hashed = store.hash_file(path, progress)
        folder = _folder(hashed.sha256)
        record = _read_record(folder, hashed)
        if record is None:
            shutil.rmtree(folder, ignore_errors=True)
            with store.new_folder(folder) as unfinished:
                _write_record(gguf_header.read_header(path), unfinished)
            record = _read_record(folder, hashed)
        hashed.remember()
    if record is None:
        raise EngineError(f"{folder} was changed while it was written. Try again.")
    return record


def seen() -> list[Path]:
    """GGUF files that were read before and are still there."""
    return sorted(
        Path(known.file.path) for known in store.remembered_hashes() if _folder(known.sha256).is_dir()
    )


@contextmanager
def refused_if_broken(path: Path) -> Iterator[None]:
    """Turn whatever a library says of a file that it cannot use into one sentence."""
    try:
        yield
    except OctavoError:
        raise
    except BaseException as error:
        # tokenizers reports a broken vocabulary as a panic, which is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if isinstance(error, OSError) and error.errno is not None:
            raise EngineError(
                f"{path} could not be read, or its header not be kept in {store.model_cache()}: "
                f"{error.strerror}. "
                "Check permissions and free space, or set OCTAVO_CACHE to another folder."
            ) from error
        said = " ".join(str(error).split())[:200]
        raise InvalidModelFile(
            f"{path} cannot be used: its header does not describe a model that can be built "
            f"({type(error).__name__}: {said}). Download it again, or take another conversion of the model."
        ) from error


def _folder(sha256: str) -> Path:
    """Where a file's record is kept. transformers writes config and tokenizer, so its version counts too."""
    return store.model_cache("gguf") / f"{sha256}-{_FORMAT}-{version('transformers')}"


def _read_record(folder: Path, hashed: store.FileHash) -> Record | None:
    """The record kept in `folder`; `None` if there is none that can be used."""
    try:
        table = json.loads((folder / _TABLE).read_bytes())
        for name, sha256 in table["files"].items():
            if hashlib.sha256((folder / name).read_bytes()).hexdigest() != sha256:
                return None
        weights = []
        for fields in table["weights"]:
            tensor = gguf_header.Tensor(**{**fields["tensor"], "shape": tuple(fields["tensor"]["shape"])})
            weights.append(gguf_arch.Weight(**{**fields, "tensor": tensor}))
        return Record(folder, hashed.sha256, frozenset(table["eos_token_ids"]), tuple(weights))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _write_record(header: gguf_header.Header, folder: Path) -> None:
    """Write config, tokenizer and tensor table, having checked that they fit each other."""
    fields = gguf_arch.config_fields(header)
    weights = gguf_arch.weights_of(header)

    from transformers import AutoConfig

    from octavo.models import gguf_tokenizer
    from octavo.models.quiet import quiet_transformers

    with quiet_transformers():
        config = AutoConfig.for_model(**fields)
        _check_shapes(header.path, config, weights)
        config.save_pretrained(folder)
        tokenizer = gguf_tokenizer.build(header)
    if len(tokenizer) > config.vocab_size:
        raise InvalidModelFile(
            f"{header.path} cannot be used: its tokenizer has {len(tokenizer):,} tokens and its model "
            f"embeddings for {config.vocab_size:,}. Take another conversion of the model."
        )
    tokenizer.save_pretrained(folder)
    table = {
        "eos_token_ids": sorted(gguf_tokenizer.eos_token_ids(header)),
        "weights": [asdict(weight) for weight in weights],
        "files": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()},
    }
    (folder / _TABLE).write_text(json.dumps(table))


def _check_shapes(path: Path, config: Any, weights: list[gguf_arch.Weight]) -> None:
    """Raise unless the weights are exactly the parameters of the model that `config` describes."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = {weight.name: weight.shape for weight in weights}
    if gguf_arch.ROPE_FACTORS in found:
        expected[gguf_arch.ROPE_FACTORS] = (config.head_dim // 2,)
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise UnsupportedModel(
            f"{path} does not hold the model that its header describes: {name} should be "
            f"{expected.get(name, 'absent')} and is {found.get(name, 'absent')} ({len(wrong)} such "
            "differences). Take another conversion of the model, or its safetensors folder or hub id."
        )
