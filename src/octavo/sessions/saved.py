"""A conversation as JSON values, ids included, so that it goes on from the same tokens when read again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, cast, get_args

from octavo.config import OverflowChoice
from octavo.engine.messages import FinishReason
from octavo.errors import InvalidConversation
from octavo.sessions.history import History, Turn
from octavo.sessions.template import ChatTemplate, Piece

FORMAT = 1


def dump(history: History, overflow: OverflowChoice, *, model: str, tokenizer: Any) -> dict[str, Any]:
    """`history` as JSON values. The model's name is for people; the vocabulary says whose ids they are."""
    turns = [
        {
            "user": turn.user,
            "prompt": {"text": turn.piece.text, "ids": list(turn.piece.ids), "absorbed": turn.piece.absorbed},
            "answer": {
                "text": turn.answer_text,
                "ids": list(turn.answer_ids),
                "finish_reason": turn.finish_reason,
            },
        }
        for turn in history.turns
    ]
    return {
        "format": FORMAT,
        "model": model,
        "vocabulary": _fingerprint(tokenizer),
        "system": history.system,
        "tools": None if history.tools is None else list(history.tools),
        "overflow": overflow,
        "turns": turns,
    }


def load(
    data: Mapping[str, Any], template: ChatTemplate, *, model: str, tokenizer: Any
) -> tuple[History, OverflowChoice]:
    """What `dump` wrote.

    Raises:
        InvalidConversation: `data` is damaged, of a newer format, or of another vocabulary.
    """
    if not isinstance(data, Mapping) or "format" not in data:
        raise InvalidConversation(
            "This is not a saved conversation. Give what a conversation's to_dict() wrote."
        )
    if data["format"] != FORMAT:
        raise InvalidConversation(
            f"The saved conversation has format {data['format']!r} and this version of Octavo reads "
            f"{FORMAT}. Read it with the version that wrote it."
        )
    fingerprint = _fingerprint(tokenizer)
    if data.get("vocabulary") != fingerprint:
        raise InvalidConversation(
            f"The conversation was saved with the model {data.get('model')!r}, whose tokens are not those of "
            f"{model!r} (vocabulary {data.get('vocabulary')!r}, not {fingerprint!r}). "
            "Open it with the model it was saved with."
        )
    try:
        turns = tuple(_turn(turn, template) for turn in _typed(data, "turns", list))
        system, tools = data["system"], data["tools"]
        if system is not None:
            _typed(data, "system", str)
        if tools is not None:
            tools = tuple(_typed(data, "tools", list))
        overflow = _one_of(data, "overflow", get_args(OverflowChoice))
    except (KeyError, TypeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise InvalidConversation(f"The saved conversation is damaged: {reason}. Save it again.") from error
    return History(template, system, tools, turns), cast(OverflowChoice, overflow)


def _turn(data: Any, template: ChatTemplate) -> Turn:
    prompt, answer = _typed(data, "prompt", dict), _typed(data, "answer", dict)
    piece = Piece(_typed(prompt, "text", str), _ids(prompt), _typed(prompt, "absorbed", str))
    answer_ids = _ids(answer)
    return Turn(
        user=_typed(data, "user", str),
        piece=piece,
        answer_ids=answer_ids,
        answer_text=_typed(answer, "text", str),
        spoken=template.decode(answer_ids),
        finish_reason=cast(FinishReason, _one_of(answer, "finish_reason", get_args(FinishReason))),
    )


def _ids(data: dict[str, Any]) -> tuple[int, ...]:
    ids = _typed(data, "ids", list)
    if not all(type(id_) is int and id_ >= 0 for id_ in ids):
        raise TypeError("'ids' holds something that is not a token id")
    return tuple(ids)


def _typed(data: Any, name: str, kind: type) -> Any:
    value = data[name]
    if not isinstance(value, kind):
        raise TypeError(f"{name!r} is a {type(value).__name__}, not a {kind.__name__}")
    return value


def _one_of(data: Any, name: str, choices: tuple[str, ...]) -> str:
    if data[name] not in choices:
        raise TypeError(f"{name!r} is {data[name]!r}, not one of {', '.join(choices)}")
    return str(data[name])


def _fingerprint(tokenizer: Any) -> str:
    """Of what each token id stands for."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.blake2b(vocabulary.encode(), digest_size=16).hexdigest()
