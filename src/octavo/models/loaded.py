"""What model loading takes and gives: a source, an entry of the list, a loaded model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from octavo.spec import ComputeDtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

Progress = Callable[[str, int, int], None]
"""Called with a stage (`download`, `hash`, `load`, `check`), the bytes done, and the bytes in all."""

SourceKind = Literal["bundled", "folder", "gguf", "hub"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model comes from. `path` is `None` while it has to be downloaded first."""

    kind: SourceKind
    name: str
    path: Path | None


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that can be named. `path` is `None` when it is not on this machine yet."""

    name: str
    kind: SourceKind
    path: Path | None
    size_bytes: int


@dataclass(eq=False, slots=True)
class LoadedModel:
    """A model ready to run, on the CPU, without gradients. Linear layers are dense or `PackedLinear`.

    Attributes:
        name: how people call it: the bundled name, the hub id, or the name of the file or folder.
        model: in evaluation mode; weights that are not packed are ordinary parameters in the compute dtype.
        dtype: that it computes in.
        tokenizer: with the model's chat template, if it has one.
        fingerprint: 32 bytes that depend on the content of weights and config only.
        context_length: tokens that the model was made for.
        eos_token_ids: tokens that end an answer.
        weights_bytes: bytes of all weights and buffers as they are held, shared ones once.
        source: the file or folder that was read.
        notices: sentences about weights that are not held as they might be expected.
    """

    name: str
    model: PreTrainedModel
    dtype: ComputeDtype
    tokenizer: PreTrainedTokenizerFast
    fingerprint: bytes
    context_length: int
    eos_token_ids: frozenset[int]
    weights_bytes: int
    source: str
    notices: tuple[str, ...] = ()
