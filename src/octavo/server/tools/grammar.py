"""Grammars for llguidance, in its Lark: answers that are JSON of a schema, and answers that call tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import InvalidRequest
from octavo.server.chat.messages import Tool
from octavo.server.tools.formats import ToolFormat

Specials = Mapping[str, int]
"""Special tokens by their text."""

_TEXT = r"/(.|\n)*/"


def json_grammar(schema: Mapping[str, Any], *, strict: bool = True) -> str:
    """An answer that is JSON of a schema and nothing else.

    Without `strict`, keywords that llguidance does not know are passed over; with it they are an error.
    """
    return f"start: {_json(schema, strict)}\n"


def call_grammar(
    tools: Sequence[Tool],
    tool_format: ToolFormat,
    specials: Specials,
    *,
    required: bool,
    parallel: bool,
    text_schema: Mapping[str, Any] | None = None,
) -> str:
    """An answer with calls of `tools`.

    Args:
        required: at least one call and nothing but calls; otherwise text, calls, or calls behind text.
        parallel: more than one call is allowed.
        text_schema: an answer without calls is JSON of this schema.

    Raises:
        InvalidRequest: the model's calls cannot be told from other JSON, and either may come.
    """
    literal = _Literals(specials)
    rules = [f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}"]
    for number, tool in enumerate(tools):
        head = tool_format.before_name + tool.name + tool_format.after_name
        # Arguments are an object, also where a schema leaves that to be understood.
        schema = _json({**tool.parameters, "type": "object"}, tool.strict)
        rules.append(f"call_{number}: {literal(head)} args_{number} {literal(tool_format.after_call)}")
        rules.append(f"args_{number}: {schema}")
    more = f"({literal(tool_format.between)} call)*" if parallel else ""
    rules.append(f"calls: call {more} {literal(tool_format.end)}")
    begin = literal(tool_format.begin)
    if required:
        start = f"{begin} calls"
    elif text_schema is not None and not tool_format.anywhere:
        raise InvalidRequest(
            "This model's calls begin like any JSON, so an answer cannot be either a call or JSON of a schema. Ask "
            "for a schema without tools, or for tools with tool_choice 'required' or without a schema."
        )
    elif text_schema is not None:
        rules.append(f"answer: {_json(text_schema, True)}")
        start = f"answer | {begin} calls"
    elif not tool_format.anywhere:
        rules.append(r"TEXT: /([^{](.|\n)*)?/")
        lead = f"{literal(tool_format.optional)}? " if tool_format.optional in specials else ""
        start = f"TEXT | {lead}calls"
    else:
        rules.append(f"TEXT: {_TEXT}")
        trigger = next((token for token in specials if tool_format.begin.startswith(token)), None)
        if trigger is not None:
            start = f"TEXT | TEXT {begin} calls"
        else:
            # A lexeme that ends where the call begins: from there on the grammar of calls holds.
            rules.append(f"lead[lazy]: /(.|\\n)*{_regex(tool_format.begin)}/")
            start = "TEXT | lead calls"
    return "\n".join([f"start: {start}", *rules, ""])


class _Literals:
    """Text as a terminal; special tokens in it stand for their ids."""

    def __init__(self, specials: Specials) -> None:
        self._specials = specials
        spelled = "|".join(map(re.escape, sorted(specials, key=len, reverse=True)))
        self._pattern = re.compile(f"({spelled})") if spelled else None

    def __call__(self, text: str) -> str:
        parts = self._pattern.split(text) if self._pattern else [text]
        return " ".join(
            f"<[{self._specials[part]}]>" if part in self._specials else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )


def _json(schema: Mapping[str, Any], strict: bool) -> str:
    # White space is fixed: a small model that may write it for ever does.
    style = {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
        **({} if strict else {"lenient": True}),
    }
    return f"%json {json.dumps({**schema, 'x-guidance': style})}"


def _regex(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\n", "n")
