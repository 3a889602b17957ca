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
    def attend(self, *args: Any) -> None: ...
