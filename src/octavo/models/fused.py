"""A decoder whose layers run as one native call a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from octavo import _native
from octavo.errors import OctavoError
from octavo.kernels import AttentionBatch
from octavo.kernels.linear import PackedMatrix
from octavo.kernels.native import ACTIVATIONS, DTYPE_NAMES, NativeKernels, NativeStep
from octavo.models.adapter import StepContext
from octavo.models.exact import RotaryTable, give_back_freed_memory
from octavo.models.fuse import DecoderParts, LayerParts, NormPart, NotFusable, take_apart
from octavo.models.packed import PackedEmbedding
from octavo.spec import BLOCK_SIZE, CacheSpec

Addresses = np.ndarray[tuple[int], np.dtype[np.int64]]

PHASES = ("norms", "linear", "rotary", "attention", "activation", "lm_head")
"""Where a step's time goes, in the order of `phase_s`."""


class FusedDecoder:
    """Runs the layers of a transformers model natively, the residual stream in float32.

    The model's own layers are let go: afterwards it can only run here.

    Args:
        model: of a kind that `take_apart` knows.
        kernels: its attention; their compute dtype is that of keys, values and dense weights.
        spec: its cache.
        keep: wait with letting the layers go until `let_go` is called.

    Attributes:
        phase_s: `[len(PHASES)]` seconds spent in each phase since it was set to an array; None to not measure.

    Raises:
        NotFusable: it is built differently; nothing was changed then.
    """

    def __init__(self, model: Any, kernels: NativeKernels, spec: CacheSpec, *, keep: bool = False) -> None:
        parts = take_apart(model)
        self._model = model
        self._kernels = kernels
        self._spec = spec
        self._keep = keep
        self.phase_s: np.ndarray[tuple[int], np.dtype[np.float64]] | None = None
        self._kept: list[torch.Tensor] = []
        self._embedding = parts.embedding
        self._embedding_factor = parts.embedding_factor
        self._rotary = _Rotary(parts)
        head_dim = spec.groups[0].page.head_dim
        if not 0 < self._rotary.dim <= head_dim:
            raise NotFusable(f"it rotates {self._rotary.dim} of the {head_dim} channels of a head")
        self._matrices: list[tuple[str, PackedMatrix]] = []
        head = self._projection(parts.head)
        self.vocab_size = self._matrices[-1][1].num_outputs
        self._native = _native.Decoder(
            len(parts.final_norm.weight),
            int(parts.layers[0].down.in_features),  # type: ignore[arg-type]
            self.vocab_size,
            self._rotary.dim,
            ACTIVATIONS[parts.activation],
            parts.layers[0].residual_factor,
            parts.logit_factor,
            parts.logit_softcap,
            self._norm(parts.final_norm),
            head,
        )
        for layer in parts.layers:
            self._add(layer)
        self._pages: tuple[list[torch.Tensor], Addresses, Addresses] | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._input_bytes = 0  # of the largest step
        if not keep:
            self.let_go()

    def let_go(self) -> None:
        """Lets the model's own layers go."""
        self._model.model.layers = nn.ModuleList([_LetGo()])
        self._model.lm_head = _LetGo()
        give_back_freed_memory()

    @property
    def held_bytes(self) -> int:
        """Bytes of all weights that are held here: those of the model's embedding are not."""
        return self.matrix_bytes + sum(tensor.numel() * tensor.element_size() for tensor in self._kept)

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the linear layers' weights, all of which a decode step reads."""
        return sum(matrix.num_bytes for _, matrix in self._matrices)

    @property
    def workspace_bytes(self) -> int:
        return self._scratch.numel() + self._input_bytes

    @property
    def matrices(self) -> dict[str, PackedMatrix]:
        """The distinct linear layers by kind and size; what the start-up check goes over."""
        return dict(self._matrices)

    def turn(self, distance: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Float32 cosines and sines `[half of the channels that turn]` that move a key by so many positions.

        None where layers turn in different ways.
        """
        return self._rotary.turn(distance)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        context: StepContext,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One packed step; see `octavo.models.adapter.forward`. Logits are float32; `out` is where they go."""
        step = context.step
        assert isinstance(step, NativeStep)
        step.check_pages(context.sealed[-1].numel(), context.opened[-1].numel())
        x = self._embed(token_ids)
        self._input_bytes = max(self._input_bytes, x.nbytes)
        logits = torch.empty((len(rows), self.vocab_size), dtype=torch.float32) if out is None else out
        if self._pages is None or self._pages[0] is not context.sealed:
            self._pages = (context.sealed, _addresses(context.sealed), _addresses(context.opened))
        needed = self._native.workspace_bytes(step.native, len(token_ids), len(rows))
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed + needed // 4, dtype=torch.uint8)
        self._native.decode(
            step.native,
            self._pages[1],
            self._pages[2],
            self._rotary.tables(int(positions.max()) + 1),
            positions.numpy(),
            x.data_ptr(),
            rows.numpy(),
            logits.data_ptr(),
            self._scratch.data_ptr(),
            step.scratch.data_ptr(),
            0 if self.phase_s is None else self.phase_s.ctypes.data,
        )
        return logits

    @torch.inference_mode()
    def compute_alone(self, token_ids: list[int]) -> torch.Tensor:
        """Logits `[vocabulary]` after these tokens, computed at once with a cache made for them."""
        count, kernels = len(token_ids), self._kernels
        num_blocks, num_layers = count // BLOCK_SIZE, self._spec.num_layers
        offsets = np.arange(num_blocks, dtype=np.int64) * kernels.page_bytes
        batch = AttentionBatch(
            query_starts=np.array([0, count], dtype=np.int64),
            context_lens=np.zeros(1, dtype=np.int64),
            table_starts=np.array([0, num_blocks], dtype=np.int64),
            block_offsets=offsets,
            slots=np.zeros(1, dtype=np.int64),
        )

        def pages(num_bytes: int) -> list[torch.Tensor]:
            return [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(num_layers)]

        context = StepContext(
            kernels.begin(batch),
            pages(num_blocks * kernels.page_bytes),
            pages(kernels.open_page_bytes),
            count,
        )
        last = torch.tensor([count - 1])
        return self.forward(torch.tensor(token_ids), torch.arange(count), last, context)[0]

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if isinstance(self._embedding, PackedEmbedding):
            x = self._embedding.rows(token_ids)
        else:
            x = self._embedding(token_ids).float()
        return x.mul_(self._embedding_factor) if self._embedding_factor != 1.0 else x

    def _add(self, layer: LayerParts) -> None:
        self._native.add_layer(
            [self._norm(norm) for norm in (*layer.norms, layer.query_norm, layer.key_norm)],
            layer.whole_rows,
            [self._projection(module) for module in layer.qkv],
            self._projection(layer.out),
            [self._projection(module) for module in layer.gate_up],
            self._projection(layer.down),
            self._rotary.keys.index(layer.rotary),
            layer.scale,
            layer.softcap,
            layer.window,
        )

    def _norm(self, norm: NormPart | None) -> tuple[int, float]:
        if norm is None:
            return 0, 0.0
        self._kept.append(norm.weight)
        return norm.weight.data_ptr(), norm.eps

    def _projection(self, module: Any) -> tuple[_native.Matrix, int]:
        """The native matrix of a linear module and the address of its bias."""
        bias = module.bias
        if isinstance(module, nn.Linear):
            matrix = PackedMatrix.from_dense(module.weight.detach(), DTYPE_NAMES[self._kernels.dtype])
            if not self._keep:  # its dense weight goes at once, so that a model is never held twice
                module.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        else:
            matrix = module.matrix
        if bias is not None:
            bias = bias.detach().float().contiguous()
            self._kept.append(bias)
        self._matrices.append((f"{matrix.num_inputs} -> {matrix.num_outputs} {matrix.packing}", matrix))
        return matrix.native, 0 if bias is None else bias.data_ptr()


class _LetGo(nn.Module):
    """Where layers were."""

    def forward(self, *_: object, **__: object) -> None:
        raise OctavoError("This model belongs to an octavo.Engine; ask the engine, not the model.")


class _Rotary:
    """Tables of cosines and sines as the native code reads them: float32, one half of a head's channels."""

    def __init__(self, parts: DecoderParts) -> None:
        self.keys = list(dict.fromkeys(layer.rotary for layer in parts.layers))
        self._source = parts.rotary if isinstance(parts.rotary, RotaryTable) else RotaryTable(parts.rotary)
        self._halves: list[torch.Tensor] = []
        self._length = 0
        self._addresses = np.empty(0, dtype=np.int64)
        self.tables(1)
        self.dim = 2 * self._halves[0].shape[1]

    def turn(self, distance: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See `FusedDecoder.turn`."""
        if len(self.keys) != 1:
            return None
        self.tables(abs(distance) + 1)
        cos, sin = self._halves
        factor = cos[
            0
        ]  # some embeddings scale queries and keys too, which the keys that are moved are already
        return cos[abs(distance)] / factor, sin[abs(distance)] / factor * (1 if distance >= 0 else -1)

    def tables(self, length: int) -> Addresses:
        """Addresses of the cosines and the sines of each key, for at least `length` positions.

        Raises:
            NotFusable: channels do not turn half by half.
        """
        if length > self._length:
            like = torch.zeros(1, 1, 1)
            whole = [table for key in self.keys for table in self._source.tables(like, length, *key)]
            width = whole[0].shape[1] // 2
            if any(not torch.equal(table[:, :width], table[:, width:]) for table in whole):
                raise NotFusable("its rotary positions do not turn a head's channels half by half")
            self._halves = [table[:, :width].contiguous() for table in whole]
            self._length = min(len(table) for table in whole)
            self._addresses = _addresses(self._halves)
        return self._addresses


def _addresses(tensors: list[torch.Tensor]) -> Addresses:
    return np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
