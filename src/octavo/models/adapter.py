"""The seam to transformers: its attention interface, asked with our own keyword.

A packed step is `model(input_ids[1, T], position_ids[1, T], use_cache=False, octavo=StepContext)`. No mask
function is registered under our name, so transformers builds no mask; the sequences' ends travel in the
context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from octavo.errors import OctavoError, UnsupportedModel
from octavo.kernels import AttentionStep, Scoring
from octavo.kernels.native import KernelArgumentError

ATTENTION_NAME = "octavo"


class _NotHandedOn(OctavoError):
    """The keyword did not arrive: somebody else called the model, or the model drops it on the way."""


@dataclass(slots=True)
class StepContext:
    """One step's attention and the pages of every layer.

    `calls` counts the layers that asked: fewer than the model has would mean that a layer attended by
    itself, without the cache.
    """

    step: AttentionStep
    sealed: list[torch.Tensor]
    opened: list[torch.Tensor]
    num_rows: int
    calls: int = 0


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    octavo: StepContext | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: `[1, heads, T, dim]` in, `[1, T, heads, dim]` out."""
    if octavo is None:
        raise _NotHandedOn("This model belongs to an octavo.Engine; ask the engine, not the model.")
    if module.training or dropout or (torch.is_grad_enabled() and query.requires_grad):
        raise OctavoError("Octavo only infers: call model.eval() and run without gradients.")
    if attention_mask is not None:
        raise UnsupportedModel(f"{type(module).__name__} builds an attention mask of its own.")
    layer = module.layer_idx
    _refuse_unknown(module, kwargs)
    _check_window(module, layer, sliding_window)
    octavo.calls += 1
    rows = octavo.num_rows
    out = octavo.step.attend(
        query[0].transpose(0, 1)[:rows],
        key[0].transpose(0, 1)[:rows],
        value[0].transpose(0, 1)[:rows],
        octavo.sealed[layer],
        octavo.opened[layer],
        Scoring(
            scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            softcap=softcap or 0.0,
            window=sliding_window or 0,
            sinks=None if s_aux is None else s_aux.float(),
        ),
    )
    if rows < query.shape[2]:  # the row that keeps experts from running on one row alone
        out = torch.cat((out, out[-1:]))
    return out[None], None


def _refuse_unknown(module: Any, kwargs: dict[str, Any]) -> None:
    """Refuses keywords that may change scores in a way that is not known here: biases, masks, chosen keys.

    Switches are for what a model returns, and positions for attention that takes packed sequences apart by them;
    the step's context does that here.
    """
    if kwargs.get("is_causal") is False:
        raise UnsupportedModel(f"{type(module).__name__} attends to later tokens too.")
    for name, value in kwargs.items():
        if value is not None and not isinstance(value, bool) and name != "position_ids":
            raise UnsupportedModel(
                f"{type(module).__name__} gives its attention {name!r}, which is not supported yet."
            )


def window_of(config: Any, layer: int) -> int:
    """Tokens that a layer's attention sees, as transformers' own mask would follow the config; 0 for all.

    Raises:
        UnsupportedModel: the layer slides over a window, and the config does not say how wide it is.
    """
    width = int(getattr(config, "sliding_window", None) or 0)
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        if layer_types[layer] != "sliding_attention":
            return 0
        if width == 0:
            raise UnsupportedModel(
                f"Layer {layer} slides over a window, and no sliding_window says how wide it is."
            )
        return width
    return width if getattr(config, "use_sliding_window", True) else 0


def _check_window(module: Any, layer: int, told: int | None) -> None:
    """Refuses a layer whose config and attention disagree: transformers' own mask follows the config."""
    slides = window_of(module.config, layer) > 0
    if slides != bool(told):
        raise UnsupportedModel(
            f"{type(module).__name__} slides over a window and does not say how wide it is."
            if slides
            else f"{type(module).__name__} asks for a window of {told} tokens in a layer of full attention."
        )


AttentionInterface.register(ATTENTION_NAME, _attention)


def attach(model: Any) -> None:
    """Makes `model` attend through the cache and its experts independent of the batch's routing."""
    model.set_attn_implementation(ATTENTION_NAME)
    if _has_experts(model):
        model.set_experts_implementation("batched_mm")


def _has_experts(model: Any) -> bool:
    return hasattr(model.config, "num_experts") or hasattr(model.config, "num_local_experts")


def forward(
    model: Any, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, context: StepContext
) -> torch.Tensor:
    """One packed step.

    Args:
        token_ids, positions: int64 `[T]`.
        rows: int64 `[R]`, the rows whose logits are wanted.

    Returns:
        Logits `[R, vocabulary]` in the compute dtype.

    Raises:
        UnsupportedModel: a layer did not go through the cache, or with other shapes than the config tells.
    """
    context.calls = 0
    num_wanted = len(rows)
    if num_wanted == 0:  # the head does not take no rows at all
        rows = torch.zeros(1, dtype=torch.int64, device=rows.device)
    if len(token_ids) == 1 and _has_experts(model):
        token_ids, positions = token_ids.expand(2), positions.expand(2)
    kind = type(model).__name__
    try:
        out = model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            attention_mask=None,
            use_cache=False,
            logits_to_keep=rows,
            octavo=context,
        )
    except _NotHandedOn as error:
        raise UnsupportedModel(f"{kind} does not hand keywords on to its attention.") from error
    except KernelArgumentError as error:
        raise UnsupportedModel(f"{kind} has other keys or values than its config tells: {error}") from error
    if context.calls != len(context.sealed):
        raise UnsupportedModel(
            f"{kind} has {len(context.sealed)} layers and {context.calls} of them attended through "
            "the cache; the others would compute wrong answers."
        )
    logits: torch.Tensor = out.logits[0, :num_wanted]
    return logits
