from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import InvalidConversation
from octavo.sessions.conversation import Conversation
from octavo.sessions.history import History, common_length


def said(engine: Any, history: History, user: str, answer: str, shown: str | None = None) -> History:
    ids = engine.ids(answer)
    return history.ask(user).answered(ids, answer if shown is None else shown, "stop")


class TestDifferences:
    """Where a template breaks its own beginning, the model's tokens stay and the place is told."""

    def test_none_in_a_template_that_keeps_all(self, make_engine: Callable[..., Any]) -> None:
        engine = make_engine("chatml")
        history = History(engine.chat_template)
        assert history.ask("Hello").difference() is None
        history = said(engine, history, "Hello", "  <think>Hm.</think> How? \n<|im_end|>", "")
        assert history.ask("Fine.").difference() is None

    def test_dropped_reasoning(self, make_engine: Callable[..., Any]) -> None:
        engine = make_engine("qwen3")
        history = said(
            engine, History(engine.chat_template), "Hello", "<think>\nHm.\n</think>\n\nHow?<|im_end|>"
        )
        draft = history.ask("Fine.")
        difference = draft.difference()
        assert difference is not None
        text = engine.text(draft.ids)
        assert difference.position == text.index("<think>")
        assert difference.token_index == draft.ids.index(engine.ids("<think>")[0])
        assert difference.expected == text[difference.position :][:40]
        assert difference.rendered == "How?<|im_end|>\n<|im_start|>user\nFine.<|im_end|>\n"[:40]
        assert "in the answer of turn 1" in difference.message
        assert f"character {difference.position}" in difference.message

    def test_trimmed_answer(self, make_engine: Callable[..., Any]) -> None:
        engine = make_engine("gemma")
        history = said(engine, History(engine.chat_template), "Hello", "How? \n<end_of_turn>")
        draft = history.ask("Fine.")
        difference = draft.difference()
        assert difference is not None
        assert engine.text(draft.ids[: difference.token_index]).endswith("How?")
        assert difference.expected.startswith(" \n<end_of_turn>\n")
        assert difference.rendered.startswith("<end_of_turn>\n")

    def test_a_space_that_the_model_does_not_say(self, make_engine: Callable[..., Any]) -> None:
        engine = make_engine("llama2")
        history = said(engine, History(engine.chat_template), "Hello", " How?</s>")
        draft = history.ask("Fine.")
        assert draft.ids.count(engine.tokenizer.eos_token_id) == 1
        difference = draft.difference()
        assert difference is not None
        assert (difference.expected[:4], difference.rendered[:5]) == ("</s>", " </s>")

    def test_another_date(self, make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
        class Clock(datetime.datetime):
            day_now = 27

            @classmethod
            def now(cls, tz: datetime.tzinfo | None = None) -> Clock:  # noqa: ARG003
                return cls(2026, 7, cls.day_now)

        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
        engine = make_engine("llama3")
        history = said(engine, History(engine.chat_template, "Be kind."), "Hello", "How?<|eot_id|>")
        history = said(engine, history, "Fine.", "Good.<|eot_id|>")
        assert history.ask("Yes.").difference() is None
        Clock.day_now = 28
        draft = history.ask("Yes.")
        assert draft.ids[: len(history.ids)] == history.ids
        assert "27 Jul 2026" in engine.text(draft.ids)
        assert "28 Jul 2026" not in engine.text(draft.ids)
        difference = draft.difference()
        assert difference is not None
        assert difference.expected.startswith("7 Jul 2026\n")
        assert difference.rendered.startswith("8 Jul 2026\n")
        assert "in the prompt of turn 1" in difference.message
        assert "7" in engine.text(draft.ids[difference.token_index : difference.token_index + 1])

    def test_a_later_turn_is_named(self, make_engine: Callable[..., Any]) -> None:
        engine = make_engine("qwen3")
        history = said(engine, History(engine.chat_template), "Hello", "How?<|im_end|>")
        history = said(engine, history, "Fine.", "<think>Hm.</think>Good.<|im_end|>")
        draft = history.ask("Yes.")
        difference = draft.difference()
        assert difference is not None
        assert "in the answer of turn 2" in difference.message
        assert draft.ids[difference.token_index] == engine.ids("<think>")[0]

    def test_a_template_that_refuses_its_own_answer_ends_nothing(
        self, make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = make_engine("chatml")
        source = engine.tokenizer.chat_template
        check = (
            "{% for m in messages %}{% if '!!' in m.content %}{{ raise_exception('No shouting') }}{% endif %}"
        )
        monkeypatch.setattr(engine.tokenizer, "chat_template", check + "{% endfor %}" + source)
        history = said(engine, History(engine.chat_template), "Hello", "How!!<|im_end|>")
        difference = history.ask("Fine.").difference()
        assert difference is not None
        assert "No shouting" in difference.message

    def test_a_conversation_tells_it_once(self, make_engine: Callable[..., Any]) -> None:
        engine = make_engine("qwen3")
        conversation = Conversation(engine)
        engine.will_say("<think>Hm.</think>How?", "<think>Hm.</think>Good.", "Bye.", "Bye.")
        assert conversation.ask("Hello").notes == ()
        assert conversation.difference is None
        reply = conversation.ask("Fine.")
        assert conversation.difference is not None
        assert reply.notes == (conversation.difference.message,)
        assert conversation.ask("Yes.").notes == ()
        assert conversation.difference is not None
        conversation.rewind(3)
        assert conversation.difference is None
        assert conversation.ask("Hello").notes == ()


def test_common_length() -> None:
    assert [common_length("abc", other) for other in ("", "ab", "abc", "abcd", "abd", "b")] == [
        0,
        2,
        3,
        3,
        2,
        0,
    ]


TEXT = st.one_of(
    st.text(max_size=20),
    st.text(alphabet=" \t\n\r\u00a0\u3000\u200b", max_size=6),
    st.text(alphabet="aé漢🙂\u0301\u202e\x00�\ue000\ue001", max_size=8),
    st.lists(
        st.sampled_from(["<|im_end|>", "<|im_start|>", "</s>", "<think>", "</think>", "\n", "a", "[INST]"]),
        max_size=5,
    ).map("".join),
)
ANSWER = st.lists(st.integers(0, 400), min_size=1, max_size=8)
TURNS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), TEXT, ANSWER, st.booleans()),
        st.tuples(st.just("stop"), TEXT, ANSWER, st.booleans()),
        st.tuples(st.just("edit"), TEXT, ANSWER, st.integers(1, 5)),
        st.tuples(st.just("rewind"), st.integers(1, 3)),
        st.tuples(st.just("fork")),
        st.tuples(st.just("save")),
    ),
    max_size=7,
)


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@pytest.mark.parametrize("name", ["chatml", "llama3", "qwen3", "mistral", "llama2", "gemma", "none"])
@settings(max_examples=25)
@given(steps=TURNS)
def test_whatever_is_said_the_next_prompt_begins_with_it(
    make_engine: Callable[..., Any], name: str, kind: str, steps: list[Any]
) -> None:
    """Random ids as answers, any text as questions; a plain list of ids a turn is the model of the test."""
    engine = make_engine(name, kind, context=100_000)
    eos = engine.tokenizer.eos_token_id
    conversation = Conversation(engine)
    ends: list[list[int]] = []  # everything up to the end of each turn
    for step in steps:
        match step:
            case ("rewind", count) if count > len(ends):
                with pytest.raises(InvalidConversation):
                    conversation.rewind(count)
            case ("rewind", count):
                conversation.rewind(count)
                del ends[len(ends) - count :]
            case ("fork",):
                conversation = conversation.fork()
            case ("save",):
                conversation = Conversation.from_dict(engine, conversation.to_dict())
            case (verb, text, answer, option):
                before = ends
                if verb == "edit" and option > len(ends):
                    continue
                if verb == "edit":
                    events, before = conversation.edit(option, text), ends[: option - 1]
                else:
                    events = conversation.say(text)
                engine.answers = [[*answer, eos] if option is True else answer]
                count = 0
                for event in events:
                    count += len(event.token_ids)  # type: ignore[union-attr]
                    if verb == "stop":
                        break
                del event, events
                prompt = engine.prompts[-1]
                seen = before[-1] if before else []
                assert prompt[: len(seen)] == seen
                ends = [*before, [*prompt, *engine_answer(answer, eos, option)[:count]]]
                history = conversation.history
                harmless = history.kept(len(history.turns) - 1).ask("x")
                assert history.turns[-1].piece.ids.count(eos) == harmless.piece.ids.count(eos)
        assert conversation.token_ids == (ends[-1] if ends else [])
        assert conversation.num_turns == len(ends)
    assert engine.num_open == 0


def engine_answer(answer: list[int], eos: int, option: object) -> list[int]:
    return [*answer, eos] if option is True else answer
