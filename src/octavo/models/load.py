"""Loading a model: weights packed or in the compute dtype, its tokenizer, and what the engine has to know."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.config import WeightsChoice, check_weights
from octavo.errors import InvalidModelFile, NotEnoughMemory, OctavoError, UnsupportedModel
from octavo.models import catalog, folder, gguf, store
from octavo.models.loaded import LoadedModel, Progress, Source
from octavo.models.quiet import quiet_transformers
from octavo.spec import DTYPE_BYTES, ComputeDtype

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_MB = 1_000_000


def load_model(
    name: str | os.PathLike[str] | Source,
    *,
    dtype: ComputeDtype,
    weights: WeightsChoice = "auto",
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model, downloading it first if need be. `EngineConfig` says what `weights` chooses.

    Raises:
        InvalidRequest: its weights cannot be held as asked.
        ModelNotFound: there is no such model.
        InvalidModelFile: a file is cut short, or is not what it should be.
        UnsupportedModel: its architecture or its weights cannot be read.
        NotEnoughMemory: the weights do not fit in the memory that is free.
        NetworkUnavailable: it is not on this machine and cannot be downloaded.
        EngineError: the model cache cannot be used.
    """
    check_weights(weights, dtype)
    source = name if isinstance(name, Source) else catalog.resolve(name)
    if source.path is None or source.kind == "bundled":
        source = catalog.pull(source, progress)
    path = catalog.local_path(source)
    load = _load_gguf if source.kind in ("bundled", "gguf") else _load_folder
    with _no_garbage_collection():
        return load(source.name, path, dtype, weights, progress)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Importing the libraries makes very many objects; going over them again and again takes 0.5 s."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _load_gguf(
    name: str, path: Path, dtype: ComputeDtype, weights: WeightsChoice, progress: Progress | None
) -> LoadedModel:
    record = gguf.prepare(path, progress)

    from transformers import PreTrainedTokenizerFast

    from octavo.models.gguf_model import build_model, needed_bytes, unpacked_notice

    _check_memory(name, needed_bytes(record, dtype, weights))
    with quiet_transformers(), gguf.refused_if_broken(path):
        model = build_model(path, record, _torch_dtype(dtype), weights, progress)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(record.folder, local_files_only=True)
    return _loaded(
        name=name,
        model=model,
        dtype=dtype,
        tokenizer=tokenizer,
        fingerprint=bytes.fromhex(record.sha256),
        eos_token_ids=record.eos_token_ids,
        source=str(path),
        notices=unpacked_notice(name, record, dtype, weights),
    )


def _load_folder(
    name: str, path: Path, dtype: ComputeDtype, weights: WeightsChoice, progress: Progress | None
) -> LoadedModel:
    content = folder.read_folder(path)
    _check_memory(name, content.num_parameters * DTYPE_BYTES[dtype])
    fingerprint = store.hash_files(path, list(content.files), progress)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    notices: tuple[str, ...] = ()
    with quiet_transformers(), _refused_if_unusable(path, content):
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=_torch_dtype(dtype),
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        _check_complete(path, report)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        if weights in ("int8", "int4"):
            from octavo.models.packed import quantise

            quantise(model, weights)
            if any(parameter.ndim > 2 for parameter in model.parameters()):
                notices = (f"The experts of {name} stay in {dtype}: {weights} is for linear layers.",)
    settings = model.generation_config or model.config
    named = settings.eos_token_id if isinstance(settings.eos_token_id, list) else [settings.eos_token_id]
    ends = frozenset(token_id for token_id in (*named, tokenizer.eos_token_id) if token_id is not None)
    return _loaded(
        name=name,
        model=model,
        dtype=dtype,
        tokenizer=tokenizer,
        fingerprint=fingerprint,
        eos_token_ids=ends,
        source=str(path),
        notices=notices,
    )


def _torch_dtype(dtype: ComputeDtype) -> torch.dtype:
    import torch

    return {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]


def _loaded(model: PreTrainedModel, source: str, **fields: Any) -> LoadedModel:
    """The last steps, which all kinds of models share."""
    from octavo.models.exact import give_back_freed_memory
    from octavo.models.packed import weights_bytes

    model.eval().requires_grad_(False)
    give_back_freed_memory()
    context_length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(context_length, int):
        raise UnsupportedModel(
            f"{source} does not say how many tokens the model was made for (max_position_embeddings). Take a "
            "model whose config has it."
        )
    return LoadedModel(
        model=model,
        source=source,
        context_length=context_length,
        weights_bytes=weights_bytes(model),
        **fields,
    )


def _check_memory(name: str, asked: int) -> None:
    """Raise when weights of `asked` bytes would not fit in the memory that is free now."""
    import psutil

    free = psutil.virtual_memory().available
    if asked > free:
        raise NotEnoughMemory(
            f"The weights of {name} need {asked / _MB:,.1f} MB, and {free / _MB:,.1f} MB of memory is free. Close "
            "other programs, or take a smaller model, or a GGUF file of this one."
        )


def _check_complete(path: Path, report: dict[str, Any]) -> None:
    """Raise when transformers made up weights that the files do not hold."""
    missing = sorted(report["missing_keys"])
    if missing:
        raise InvalidModelFile(
            f"{path} lacks {len(missing)} weights of the model that its config describes, the first is "
            f"{missing[0]}. Download it again, or take another version of the model."
        )


@contextmanager
def _refused_if_unusable(path: Path, content: folder.FolderContent) -> Iterator[None]:
    """Turn what transformers says of a folder that it cannot load into one sentence."""
    try:
        yield
    except OctavoError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        model_type = content.config["model_type"]
        if not folder.is_known(model_type) or "Unrecognized configuration class" in said:
            raise UnsupportedModel(
                f"{path} is a model of type {model_type!r}, which the installed transformers cannot load "
                "as a language model. Take a decoder-only model, or a newer transformers if the model is new."
            ) from error
        raise InvalidModelFile(
            f"{path} could not be loaded ({type(error).__name__}: {said}). Check that config, weights and "
            "tokenizer are complete, or download the model's folder again."
        ) from error
