"""The formats of sealed pages, by name."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import InvalidRequest
from octavo.spec import DTYPE_BYTES, CacheSpec, ComputeDtype, PageShape


@dataclass(frozen=True, slots=True)
class PageFormat:
    """A raw format: keys channel-major `[num_kv_heads, head_dim, 32]`, then values `[num_kv_heads, 32, v_head_dim]`."""

    name: str
    dtype: ComputeDtype

    def page_bytes(self, page: PageShape) -> int:
        """Bytes of one sealed page of this shape."""
        return page.elements * DTYPE_BYTES[self.dtype]


def get_format(name: str, spec: CacheSpec) -> PageFormat:
    """The format called `name` for a model's cache; `auto` keeps the compute dtype.

    Raises:
        InvalidRequest: there is no such format, or it does not go with the compute dtype.
    """
    if name not in ("auto", *DTYPE_BYTES):
        raise InvalidRequest(f"There is no cache format {name!r}. Choose auto, {' or '.join(DTYPE_BYTES)}.")
    if name not in ("auto", spec.dtype):
        raise InvalidRequest(
            f"The cache format {name} does not go with {spec.dtype} arithmetic. Use auto, or set the dtype to {name}."
        )
    return PageFormat(spec.dtype, spec.dtype)
