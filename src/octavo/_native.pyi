from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK_SIZE: int
PARTITION_BLOCKS: int

_Ints = npt.NDArray[np.int64]

def isa() -> str: ...
def set_isa(name: str) -> None: ...
def head_bytes(format: int, head_dim: int, v_head_dim: int) -> int: ...
def read_pages(base: int, offsets: _Ints, page_bytes: int, num_threads: int) -> int: ...
def release_threads() -> None: ...
def activate(kind: int, dtype: int, input: int, output: int, count: int, num_threads: int) -> None: ...

class Step:
    def __init__(
        self,
        dtype: int,
        format: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        query_starts: _Ints,
        context_lens: _Ints,
        table_starts: _Ints,
        block_offsets: _Ints,
        slots: _Ints,
        num_threads: int,
        /,
    ) -> None: ...
    @property
    def workspace_bytes(self) -> int: ...
    @property
    def bytes_read(self) -> int: ...
    def attend(self, *args: Any) -> None: ...

class Matrix:
    data: int
    @staticmethod
    def of_type(type_id: int, dense_packing: int, num_outputs: int, num_inputs: int) -> Matrix: ...
    @property
    def packing(self) -> int: ...
    @property
    def stepped(self) -> bool: ...
    @property
    def has_minimum(self) -> bool: ...
    @property
    def num_outputs(self) -> int: ...
    @property
    def num_inputs(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def pack(self, type_id: int, rows: int, order: int, num_threads: int, /) -> None: ...
    def unpack(self, row_ids: int, count: int, out: int, /) -> None: ...

def packed_row_bytes(type_id: int, num_inputs: int) -> int: ...
def unpack_rows(type_id: int, rows: int, row_ids: int, count: int, num_inputs: int, out: int, /) -> None: ...
def quantise_rows(
    type_id: int, x: int, rows: int, num_inputs: int, out: int, num_threads: int, /
) -> None: ...
def activation_bytes(packing: int, rows: int, num_inputs: int) -> int: ...
def multiply_rows(
    weights: list[Matrix],
    x: int,
    stride: int,
    rows: int,
    bias: int,
    out: int,
    out_stride: int,
    activations: int,
    num_threads: int,
) -> None: ...

class Decoder:
    def __init__(
        self,
        hidden: int,
        intermediate: int,
        vocab: int,
        rotary_dim: int,
        activation: int,
        residual_factor: float,
        logit_factor: float,
        logit_softcap: float,
        final_norm: tuple[int, float],
        head: tuple[Matrix, int],
        /,
    ) -> None: ...
    def add_layer(
        self,
        norms: list[tuple[int, float]],
        whole_rows: bool,
        qkv: list[tuple[Matrix, int]],
        out: tuple[Matrix, int],
        gate_up: list[tuple[Matrix, int]],
        down: tuple[Matrix, int],
        rotary: int,
        scale: float,
        softcap: float,
        window: int,
        /,
    ) -> None: ...
    def workspace_bytes(self, step: Step, num_rows: int, num_wanted: int, /) -> int: ...
    def decode(
        self,
        step: Step,
        sealed: _Ints,
        open: _Ints,
        rotary: _Ints,
        positions: _Ints,
        x: int,
        wanted: _Ints,
        logits: int,
        workspace: int,
        attend_scratch: int,
        phase_s: int,
        /,
    ) -> None: ...
