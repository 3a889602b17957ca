"""Tools for models whose template has no place for them."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from octavo.server.chat.messages import Call, ChatMessage, Tool
from octavo.server.tools.formats import OWN, format_of
from octavo.sessions.template import ChatTemplate

STRICT = """{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif -%}
{%- for message in messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate') }}{%- endif -%}
<{{ message['role'] }}>{{ message['content'] }}</>
{%- endfor -%}<assistant>"""
LOOSE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</>{% endfor %}<assistant>"
)
TOOLS = [Tool("f"), Tool("g")]
ASKED = [
    ChatMessage("user", "Weather and time?"),
    ChatMessage("assistant", "", (Call("1", "f", "{}"), Call("2", "g", "{}"))),
    ChatMessage("tool", "sun", call_id="1"),
    ChatMessage("tool", "noon", call_id="2"),
    ChatMessage("user", "And?"),
]


def template(source: str) -> ChatTemplate:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: id_ for id_, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = source
    return ChatTemplate(tokenizer)


@pytest.mark.parametrize(("source", "in_user"), [(STRICT, True), (LOOSE, False)], ids=["strict", "loose"])
def test_results_of_calls_are_one_turn_and_tools_stand_where_the_template_has_a_place(
    source: str, in_user: bool
) -> None:
    found = template(source)
    tool_format = format_of(found)
    assert (tool_format.own_prompt, tool_format.in_user) == (True, in_user)
    written = tool_format.written(ASKED, TOOLS)
    text = found.render(written.messages, written.tools)
    assert text.count("<tool_response>") == 2
    assert text.index("# Tools") < text.index("Weather and time?") < text.index("sun") < text.index("noon")
    assert text.index("noon") < text.index("And?")
    roles = [written.messages[place]["role"] for place in written.places]
    assert roles == ["user", "assistant", "user", "user", "user"]
    assert written.places[2:] == [written.places[2]] * 3
    after = found.after(written.messages, written.places[1], written.tools)
    assert after is not None


def test_what_a_user_says_in_a_row_is_left_to_the_template() -> None:
    twice: list[Any] = [ChatMessage("user", "a"), ChatMessage("user", "b")]
    assert [message["content"] for message in OWN.written(twice, []).messages] == ["a", "b"]
