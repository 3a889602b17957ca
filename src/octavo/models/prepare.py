"""From a loaded model to one that computes exactly: refusals, module swaps, the attention hook, its key."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from octavo.errors import InvalidRequest, UnsupportedModel
from octavo.formats import PageFormat, get_format
from octavo.kernels import AttentionKernels
from octavo.kernels.native import NativeKernels
from octavo.kernels.reference import ReferenceKernels
from octavo.models import adapter
from octavo.models.adapter import StepContext
from octavo.models.exact import make_exact
from octavo.models.fuse import NotFusable
from octavo.models.fused import FusedDecoder
from octavo.models.loaded import LoadedModel
from octavo.models.packed import kinds_of, weights_bytes
from octavo.models.support import TESTED_FAMILIES, cache_spec, refuse_unsupported
from octavo.spec import BLOCK_SIZE, DTYPE_BYTES, CacheSpec, ComputeDtype

_PROBE_LENGTH = 70

KERNEL_VERSION = 2
"""Raised whenever a kernel's results change by as much as a bit."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A few tokens and the logits `[vocabulary]` that transformers itself computed after them."""

    token_ids: list[int]
    logits: torch.Tensor

    def check(self, logits: torch.Tensor, kind: str) -> None:
        """Compares our logits with transformers' own.

        Raises:
            UnsupportedModel: they differ by more than rounding explains.
        """
        if not self.agrees(logits):
            raise UnsupportedModel(
                f"Octavo does not run {kind} models yet: computed through the cache, their logits differ from "
                f"transformers' own by {(logits - self.logits).abs().max().item():.3g} where the largest is "
                f"{self.logits.abs().max().item():.3g}."
            )

    def agrees(self, logits: torch.Tensor) -> bool:
        """Whether logits are transformers' own but for rounding."""
        scale = max(self.logits.abs().max().item(), 1e-6)
        bound = 1e-3 if self.logits.dtype == torch.float32 else 0.05
        return (logits - self.logits).abs().max().item() <= bound * scale


@dataclass(eq=False, slots=True)
class PreparedModel:
    """A model that attends through the cache.

    Attributes:
        fused: runs the layers as one native call; None where they run module by module.
        unfused_reason: why they do.
        identity: the fields that a bit of its keys and values can depend on; part of every block hash.
        probe: of a family that the tests do not cover; to be checked before the first request.
    """

    model: Any
    spec: CacheSpec
    page_format: PageFormat
    kernels: AttentionKernels
    context: int
    weights_bytes: int
    identity: dict[str, str | int]
    probe: Probe | None
    fused: FusedDecoder | None
    unfused_reason: str

    @property
    def workspace_bytes(self) -> int:
        """Bytes held for intermediate results."""
        return self.kernels.workspace_bytes + (0 if self.fused is None else self.fused.workspace_bytes)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        context: StepContext,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One packed step; see `octavo.models.adapter.forward`. `out`, of the logits' shape, may be used for them."""
        if self.fused is not None:
            return self.fused.forward(token_ids, positions, rows, context, out)
        return adapter.forward(self.model, token_ids, positions, rows, context)


def resolve_dtype(choice: str, device: str = "cpu", weights: str = "auto") -> ComputeDtype:
    """The compute dtype for `auto`, `bf16` or `fp32`: that of dense weights, and bf16 only where the hardware has it.

    Raises:
        InvalidRequest: there is no such dtype.
    """
    if choice == "auto" and weights in DTYPE_BYTES:
        choice = weights
    if choice == "bf16" or choice == "fp32":
        return choice  # type: ignore[return-value]
    if choice != "auto":
        raise InvalidRequest(f"There is no compute dtype {choice!r}. Choose auto, bf16 or fp32.")
    if device != "cpu":
        return "bf16"
    return "bf16" if torch.cpu._is_avx512_bf16_supported() else "fp32"


def check_device(name: str) -> None:
    """Checks that torch can compute on a device.

    Raises:
        InvalidRequest: there is none of that name, or it cannot be used here.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidRequest(f"Torch has no device {name!r}. Use cpu, or for example cuda.") from error
    try:
        torch.zeros(1, device=device).item()
    except Exception as error:  # each device has its own ways to fail
        said = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".") or type(error).__name__
        raise InvalidRequest(
            f"Torch cannot compute on the device {name!r} here ({said}). Use cpu, or a device that this "
            "torch can use."
        ) from error


def prepare_model(
    loaded: LoadedModel,
    *,
    kv_format: str = "int8",
    context: int | None = None,
    device: str = "cpu",
    kernels: str = "auto",
    fuse: bool = True,
) -> PreparedModel:
    """Makes `loaded.model` run through the cache, in place.

    Raises:
        UnsupportedModel: the model cannot be run exactly; the message names the reason.
        InvalidRequest: the context is longer than the model was made for, or there is no such format.
    """
    model: Any = loaded.model
    context = context or loaded.context_length
    if context > loaded.context_length:
        raise InvalidRequest(
            f"{loaded.name} was made for {loaded.context_length:,} tokens; a context of {context:,} is too long."
        )
    refuse_unsupported(model)
    model.requires_grad_(False)
    spec = cache_spec(model, loaded.dtype)
    page_format = get_format(kv_format, spec)
    torch_dtype = torch.bfloat16 if loaded.dtype == "bf16" else torch.float32
    weights = kinds_of(model, loaded.dtype)
    first = next(model.parameters(), None)
    if first is not None and first.dtype != torch_dtype:
        raise UnsupportedModel(f"{loaded.name} is loaded in {first.dtype}; load it in bf16 or fp32.")
    probe = None if model.config.model_type in TESTED_FAMILIES else _make_probe(model, context)
    native = device == "cpu" and kernels != "reference"
    if kernels == "native" and not native:
        raise InvalidRequest(
            f"The native kernels run on the CPU, not on {device}. Use kernels='reference' there."
        )
    kernel_set: type[NativeKernels] | type[ReferenceKernels] = NativeKernels if native else ReferenceKernels
    attention = kernel_set(spec.group.page, spec.group.num_heads, torch_dtype, page_format)
    fused, unfused_reason = None, "" if native else f"the {attention.name} kernels run module by module"
    if native and not fuse:
        unfused_reason = "it was asked for"
    elif isinstance(attention, NativeKernels):
        try:
            fused = _fuse(model, attention, spec, probe)
        except NotFusable as error:
            unfused_reason = str(error)
    if fused is None:
        if native:
            make_exact(model)
        adapter.attach(model)
        model.to(device)
    held = weights_bytes(model) + (0 if fused is None else fused.held_bytes)
    identity: dict[str, str | int] = {
        "model": loaded.fingerprint.hex(),
        "dtype": spec.dtype,
        "weights": weights,
        "format": page_format.name,
        "block_size": BLOCK_SIZE,
        "kernels": attention.name,
        "kernel_version": KERNEL_VERSION,
        "path": "unfused" if fused is None else "fused",
        "device": str(device),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "rope": repr(getattr(model.config, "rope_parameters", None)),
    }
    return PreparedModel(
        model, spec, page_format, attention, context, held, identity, probe, fused, unfused_reason
    )


def _fuse(model: Any, kernels: NativeKernels, spec: CacheSpec, probe: Probe | None) -> FusedDecoder:
    """The fused form of a model, whose own layers are then let go.

    A family that the tests do not cover keeps them until the fused form has given the logits of its probe.

    Raises:
        NotFusable: it is built differently than any that is known, or computes something else.
    """
    fused = FusedDecoder(model, kernels, spec, keep=probe is not None)
    if probe is not None:
        if not probe.agrees(fused.compute_alone(probe.token_ids)):
            raise NotFusable(f"{type(model).__name__} computes something else than the layers it looks like")
        fused.let_go()
    return fused


@torch.inference_mode()
def _make_probe(model: Any, context: int) -> Probe:
    length = min(_PROBE_LENGTH, context - 1)
    vocab_size = int(model.config.vocab_size)
    token_ids = [(i * 7919 + 13) % vocab_size for i in range(length)]
    logits = model(input_ids=torch.tensor([token_ids]), use_cache=False, logits_to_keep=1).logits[0, -1]
    return Probe(token_ids, logits)
