"""The tokens with which models of code write a text with a gap, as their tokenizers name them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from octavo.errors import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FimOrder = Literal["prefix-first", "suffix-first", "suffix-mark-first"]
"""How prefix P and suffix S are laid out with the marks PRE, SUF and MID:

- `prefix-first`: PRE P SUF S MID. Text that grows behind MID only appends; another P moves all of S.
- `suffix-first`: PRE SUF S MID P. Any text that grows before the gap only appends.
- `suffix-mark-first`: SUF S PRE P. The same, for models without MID.
"""


@dataclass(frozen=True, slots=True)
class FimTokens:
    """The marks of a model, as token ids.

    Attributes:
        middle: None where the order has none.
        repo, file: begin a project's name and a file's name, in prompts with several files.
        ends: tokens that end the text of a gap.
        spellings: how clients write the marks in a prompt, and the ids that are meant.
    """

    order: FimOrder
    prefix: int
    suffix: int
    middle: int | None
    repo: int | None
    file: int | None
    ends: tuple[int, ...]
    spellings: tuple[tuple[str, int], ...]

    @property
    def marks(self) -> frozenset[int]:
        return frozenset(id_ for _, id_ in self.spellings)


@dataclass(frozen=True, slots=True)
class _Family:
    order: FimOrder
    prefix: str
    suffix: str
    middle: str | None
    repo: tuple[str, ...] = ()
    file: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()


_FAMILIES = (
    # Qwen2.5-Coder and Qwen3-Coder, CodeGemma (whose files are separated by another token), Granite from version 3 on
    _Family(
        "prefix-first",
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|repo_name|>",),
        ("<|file_sep|>", "<|file_separator|>"),
        ("<|fim_pad|>", "<|endoftext|>"),
    ),
    # StarCoder, StarCoder2 and Granite Code were trained on both orders
    _Family(
        "suffix-first",
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ("<repo_name>", "<reponame>"),
        ("<file_sep>", "<filename>"),
        ("<fim_pad>", "<|endoftext|>"),
    ),
    _Family("suffix-first", "<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<fim-pad>",)),
    # DeepSeek-Coder: the hole stands where the gap is
    _Family("prefix-first", "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    # Codestral
    _Family("suffix-mark-first", "[PREFIX]", "[SUFFIX]", None),
    # CodeLlama, trained on both orders
    _Family("suffix-first", "▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),
)


def find_fim_tokens(
    tokenizer: PreTrainedTokenizerFast, names: Sequence[str] = (), order: str | None = None
) -> FimTokens | None:
    """The marks that the tokenizer has; None if it has none that are known.

    Args:
        names: the tokens to take as PRE, SUF and MID in place of known ones, which the tokenizer must have.
        order: to write in, instead of the one that the model is known for.

    Raises:
        InvalidRequest: a named token does not exist, or there is no such order.
    """
    orders = get_args(FimOrder)
    if order is not None and order not in orders:
        raise InvalidRequest(f"The FIM order is {order!r}; it must be one of {', '.join(orders)}.")
    ids: dict[str, int] = tokenizer.get_vocab()
    if names:
        if len(names) != 3:
            raise InvalidRequest(
                f"{len(names)} FIM tokens are named; name three: those before the prefix, before the suffix, and "
                "before the middle."
            )
        for name in names:
            if name not in ids:
                raise InvalidRequest(
                    f"The tokenizer has no token {name!r}, which is to be a FIM token. Take one that it has."
                )
        families: Sequence[_Family] = (_Family("prefix-first", names[0], names[1], names[2]),)
    else:
        families = [
            family
            for family in _FAMILIES
            if all(name in ids for name in (family.prefix, family.suffix, family.middle) if name is not None)
        ]
    if not families:
        return None
    family = families[0]
    repo, file = (
        next((ids[name] for name in known if name in ids), None) for known in (family.repo, family.file)
    )
    middle = None if family.middle is None else ids[family.middle]
    asked: FimOrder | None = next((one for one in orders if one == order), None)
    if asked is not None and (middle is None) != (asked == "suffix-mark-first"):
        asked = None  # such a model can be written in one order only
    marks = {name: ids[name] for name in (family.prefix, family.suffix, family.middle) if name is not None}
    others = [name for name in (*family.repo, *family.file, *family.ends) if name in ids]
    return FimTokens(
        order=asked or family.order,
        prefix=ids[family.prefix],
        suffix=ids[family.suffix],
        middle=middle,
        repo=repo,
        file=file,
        ends=tuple(dict.fromkeys([*(ids[name] for name in others), *marks.values()])),
        spellings=tuple(marks.items()) + tuple((name, ids[name]) for name in others),
    )


def mark_pattern(tokens: FimTokens) -> re.Pattern[str]:
    """Finds marks in a prompt. SentencePiece writes a space as `▁`, and clients leave it out or write a space."""
    parts = []
    for name, _ in sorted(tokens.spellings, key=lambda one: -len(one[0])):
        if name.startswith("▁"):
            bare = re.escape(name[1:])
            parts.append(f"[▁ ]?{bare}{' ?' if name == '▁<PRE>' else ''}")
        else:
            parts.append(re.escape(name))
    return re.compile("|".join(f"({part})" for part in parts))
