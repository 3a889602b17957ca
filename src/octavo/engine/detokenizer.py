"""Turn tokens into text while they come, without ever taking back a character.

Text is *final* when no later token can change it. It is not yet final when a character is incomplete, or
when it could be the beginning of a stop string. The pieces together are what
`tokenizer.decode(ids, clean_up_tokenization_spaces=False)` gives for all ids, cut at the stop string.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from octavo.engine.stops import StopStrings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MAX_PARTIAL_TOKENS = 16
"""Tokens that may end in U+FFFD before it is taken for what it is: no character is so long."""


class Detokenizer:
    """The text of one answer.

    Args:
        tokenizer: a tokenizer of transformers with a `backend_tokenizer`.
        stop: strings that end the answer, none empty. They are looked for in the text as it is given out:
            a special token that is skipped is no part of it.
        skip_special_tokens: leave out the text of special tokens.
        shown: special tokens whose text is not left out.

    Attributes:
        stopped: the stop string that ended the answer, once one has.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        shown: Collection[str] = (),
    ) -> None:
        backend: Tokenizer = tokenizer.backend_tokenizer
        special = backend.get_added_tokens_decoder().values() if skip_special_tokens else ()
        self._backend = backend
        self._skipped = {token.content for token in special if token.special} - set(shown)
        steps = _decoder_steps(backend)
        self._decoder = _ByteLevel() if steps == ["ByteLevel"] else _Window(backend, steps)
        self._stops = StopStrings(stop)

    @property
    def stopped(self) -> str | None:
        return self._stops.stopped

    def push(self, token_id: int) -> str:
        """Add a token; the text that became final by it, which may be empty.

        After a stop string, tokens are ignored.
        """
        token = self._backend.id_to_token(token_id)
        if self.stopped is not None or token is None or token in self._skipped:
            return ""
        return self._stops.release(self._decoder.push(token_id, token))

    def finish(self) -> str:
        """The rest of the text, when no token will follow. It may turn out that a stop string ended it."""
        if self.stopped is not None:
            return ""
        return self._stops.release(self._decoder.flush(), last=True)


class _ByteLevel:
    """Byte-level BPE: a token is a string of bytes, and the text is what they are in UTF-8.

    An invalid sequence becomes U+FFFD as soon as no byte can complete it.
    """

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int, token: str) -> str:  # noqa: ARG002 (the same call as _Window's)
        try:
            data = bytes([_BYTE_OF_CHAR[char] for char in token])
        except KeyError:  # an added token, which is written as it reads
            data = token.encode()
        return self._utf8.decode(data)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _Window:
    """Any other decoder: decode the new tokens behind the ones before them, and take what is added.

    The ones before them are there because a decoder drops a space at the beginning of its text. A run of
    byte tokens such as `<0xE2>` is decoded when it has ended: one invalid byte in it turns all of them into
    U+FFFD.
    """

    def __init__(self, backend: Tokenizer, steps: Sequence[str]) -> None:
        self._backend = backend
        self._has_byte_tokens = "ByteFallback" in steps
        self._has_partial_characters = "ByteLevel" in steps
        self._before: list[int] = []
        self._before_text = ""
        self._new: list[int] = []

    def push(self, token_id: int, token: str) -> str:
        self._new.append(token_id)
        if self._has_byte_tokens and len(token) == 6 and token.startswith("<0x"):
            return ""
        return self._settle(last=False)

    def flush(self) -> str:
        return self._settle(last=True)

    def _settle(self, *, last: bool) -> str:
        window = self._before + self._new
        text = self._decode(window)
        partial = self._has_partial_characters and text.endswith("\ufffd")
        if partial and not last and len(self._new) < _MAX_PARTIAL_TOKENS:
            return ""
        added = text[len(self._before_text) :]
        # With some text in it, the window has met its dropped space, and drops nothing of what follows.
        keep = self._new
        while not (keep_text := self._decode(keep)) and len(keep) < len(window):
            keep = window[-len(keep) - 1 :]
        self._before, self._before_text, self._new = keep, keep_text, []
        return added

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)


def _decoder_steps(backend: Tokenizer) -> list[str]:
    """Types of the decoders that `backend` applies, in order."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return [step["type"] for step in state.get("decoders", [state])]


def _bytes_of_chars() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for.

    Bytes that are printable in Latin-1 stand for themselves; the others are counted up from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _bytes_of_chars()


def token_bytes(tokenizer: PreTrainedTokenizerFast, token_id: int) -> bytes:
    """The bytes that a token stands for in the middle of a text; special tokens are what they read."""
    backend: Tokenizer = tokenizer.backend_tokenizer
    token = backend.id_to_token(token_id)
    if token is None:
        return b""
    if token_id in backend.get_added_tokens_decoder():
        return str(token).encode()
    if _decoder_steps(backend) == ["ByteLevel"]:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    if len(token) == 6 and token.startswith("<0x"):
        return bytes([int(token[3:5], 16)])
    # Behind another token, so that a decoder does not drop the space at the beginning.
    lead = backend.decode([token_id], skip_special_tokens=False)
    both = backend.decode([token_id, token_id], skip_special_tokens=False)
    return str(both[len(lead) :]).encode()
