"""Prompts with a gap, laid out so that what is typed at the gap leaves as much as possible as it was."""

from __future__ import annotations

import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from octavo.server.infill.tokens import FimTokens, mark_pattern

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

STEP = 256
"""Tokens by which a prefix that is too long is cut. So its beginning stays for as many tokens as are typed."""
_SNIPPET = "\n\n--- snippet ---\n\n"
_KEPT_BYTES = 32 << 20
_LONG_LINE = 400


@dataclass(frozen=True, slots=True)
class Gap:
    """What a plugin sends.

    Attributes:
        prefix, suffix: text before and behind the gap.
        typed: what stands directly before the gap, and grows while somebody types: the line's beginning.
        extra: names and texts of other pieces of the project, the oldest first.
    """

    prefix: str
    suffix: str
    typed: str = ""
    extra: tuple[tuple[str, str], ...] = ()


class FimPrompts:
    """Writes gaps as token ids, for one model.

    Text of files is text: what looks like a special token in it does not become one. In a raw prompt it does.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, tokens: FimTokens) -> None:
        self.tokens = tokens
        self._tokenizer = tokenizer
        self._texts: OrderedDict[bytes, array[int]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def infill(self, gap: Gap, *, room: int, namespace: str) -> list[int]:
        """The prompt of a gap.

        Args:
            room: tokens that it may have. What does not fit goes: the oldest extra pieces, then the prefix's
                beginning and the suffix's end. A `typed` that does not fit is left to the engine to refuse.
            namespace: of the tenant; texts that are tokenised already are not shared across it.
        """
        tokens = self.tokens
        before, line = gap.prefix, gap.typed
        if not line:
            before, line = _at_line(gap.prefix)
        typed = self._plain(line)
        prefix, suffix = (self._known(text, namespace) for text in (before, gap.suffix))
        head = self._begin
        room -= len(head) + len(typed) + 3
        prefix, suffix = _cut(prefix, suffix, room)
        extra = self._extra(gap.extra, room - _rounded(len(prefix) + len(suffix)), namespace)
        middle = [] if tokens.middle is None else [tokens.middle]
        if tokens.order == "prefix-first":
            gap_ids = [tokens.prefix, *prefix, tokens.suffix, *suffix, *middle, *typed]
        elif tokens.order == "suffix-first":
            gap_ids = [tokens.prefix, tokens.suffix, *suffix, *middle, *prefix, *typed]
        else:
            gap_ids = [tokens.suffix, *suffix, tokens.prefix, *prefix, *typed]
        return [*head, *extra, *gap_ids]

    def raw(self, text: str) -> list[int]:
        """A prompt in which marks are written out."""
        pattern = mark_pattern(self.tokens)
        ids: list[int] = []
        end = 0
        for match in pattern.finditer(text):
            ids += self._piece(text[end : match.start()], first=end == 0)
            name = match.group().strip(" ▁")
            ids += [id_ for spelling, id_ in self.tokens.spellings if spelling.lstrip("▁") == name][:1]
            end = match.end()
        return ids + self._piece(text[end:], first=end == 0)

    def _piece(self, text: str, *, first: bool) -> list[int]:
        if first:
            return list(self._tokenizer.encode(text)) if text else list(self._begin)
        return list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []

    def _extra(self, extra: Sequence[tuple[str, str]], room: int, namespace: str) -> list[int]:
        """The pieces that fit, the newest ones, in their order."""
        tokens = self.tokens
        if not extra:
            return []
        head: list[int] = []
        if tokens.file is not None and tokens.repo is not None:
            head = [tokens.repo, *self._known("project\n", namespace)]
        tail = [] if tokens.file is None else [tokens.file, *self._known("file\n", namespace)]
        room -= len(head) + len(tail)
        pieces: list[list[int]] = []
        for name, text in reversed(extra):
            ids = self._known(text, namespace)
            if tokens.file is None:
                ids = [*self._known(_SNIPPET, namespace), *ids]
            else:
                ids = [tokens.file, *self._known(f"{name}\n", namespace), *ids]
            if len(ids) > room:
                break
            room -= len(ids)
            pieces.append(ids)
        if not pieces:
            return []
        return [*head, *(id_ for piece in reversed(pieces) for id_ in piece), *tail]

    def _known(self, text: str, namespace: str) -> list[int]:
        """`_plain`, remembered: files come again at every keystroke."""
        key = blake2b(
            text.encode("utf-8", "surrogatepass"), key=blake2b(namespace.encode()).digest()
        ).digest()
        with self._lock:
            known = self._texts.get(key)
            if known is not None:
                self._texts.move_to_end(key)
                return list(known)
        ids = self._plain(text)
        with self._lock:
            if key not in self._texts:
                self._texts[key] = kept = array("i", ids)
                self._num_bytes += kept.itemsize * len(kept)
            while self._num_bytes > _KEPT_BYTES:
                _, old = self._texts.popitem(last=False)
                self._num_bytes -= old.itemsize * len(old)
        return ids

    def _plain(self, text: str) -> list[int]:
        if not text:
            return []
        lead = self._lead
        ids = self._backend.encode("\n" + text, add_special_tokens=False).ids if lead else []
        if lead and ids[: len(lead)] == lead:
            return list(ids[len(lead) :])
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    @cached_property
    def _backend(self) -> Tokenizer:
        """The tokenizer without its special tokens, so that no text is taken for one."""
        state = json.loads(self._tokenizer.backend_tokenizer.to_str())
        marks = self.tokens.marks
        state["added_tokens"] = [
            token for token in state["added_tokens"] if not token["special"] and token["id"] not in marks
        ]
        state["post_processor"] = state["truncation"] = state["padding"] = None
        return Tokenizer.from_str(json.dumps(state))

    @cached_property
    def _lead(self) -> list[int]:
        """What a line break becomes where a tokenizer puts a space before every text; else nothing."""
        ids = list(self._backend.encode("\n", add_special_tokens=False).ids)
        return ids if (self._backend.id_to_token(ids[0]) or "").startswith("▁") else []

    @cached_property
    def _begin(self) -> list[int]:
        """The tokens that the tokenizer puts before every prompt."""
        begin = self._tokenizer.bos_token_id
        return [begin] if begin is not None and begin in self._tokenizer.encode("")[:1] else []


def _at_line(text: str) -> tuple[str, str]:
    """The text before the line that is being typed, and that line, unless it is very long."""
    begin = text.rfind("\n") + 1
    return (text, "") if len(text) - begin > _LONG_LINE else (text[:begin], text[begin:])


def _rounded(count: int) -> int:
    return -(-count // STEP) * STEP


def _cut(prefix: list[int], suffix: list[int], room: int) -> tuple[list[int], list[int]]:
    """As much of both as there is room for: the suffix has a quarter, or what the prefix leaves."""
    if len(prefix) + len(suffix) <= room:
        return prefix, suffix
    kept = max(0, min(len(suffix), max(room // 4, room - _rounded(len(prefix)))))
    drop = min(_rounded(max(0, len(prefix) - (room - kept))), len(prefix))
    return prefix[drop:], suffix[:kept]
