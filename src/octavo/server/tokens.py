"""Single tokens as text and bytes, for log-probabilities."""

from __future__ import annotations

import functools
from typing import Any

from octavo.engine.detokenizer import token_bytes


class TokenTexts:
    """The tokens of a tokenizer, one by one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.bytes = functools.lru_cache(maxsize=1 << 16)(self._bytes)

    def text(self, token_id: int) -> str:
        """The token as text; what is only a part of a character is written `bytes:\\xe2`."""
        data = self.bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _bytes(self, token_id: int) -> bytes:
        return token_bytes(self._tokenizer, token_id)
