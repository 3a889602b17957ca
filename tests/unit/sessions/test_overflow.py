from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config import SamplingParams
from octavo.errors import PromptTooLong
from octavo.sessions.conversation import Conversation
from octavo.sessions.overflow import fit


def fill(engine: Any, conversation: Conversation, num_turns: int) -> None:
    for number in range(num_turns):
        engine.will_say(f"Answer {number}.")
        conversation.ask(f"Question {number}?")


class TestStop:
    def test_a_prompt_too_long_is_refused_and_nothing_is_computed(
        self, make_engine: Callable[..., Any]
    ) -> None:
        engine = make_engine(context=100)
        conversation = Conversation(engine)
        fill(engine, conversation, 1)
        before = conversation.token_ids
        with pytest.raises(PromptTooLong, match="The message alone is too long") as caught:
            conversation.ask("dog " * 100)
        assert caught.value.max_tokens == 100
        assert caught.value.num_tokens > 100
        assert len(engine.prompts) == 1
        assert conversation.token_ids == before

    def test_dropping_turns_is_advised_where_it_helps(self, make_engine: Callable[..., Any]) -> None:
        engine = make_engine(context=1000)
        conversation = Conversation(engine)
        fill(engine, conversation, 3)
        alone = len(conversation.history.ask("And now?", drop=3).ids)
        engine.context = alone + 1
        with pytest.raises(PromptTooLong, match=r"\(overflow='drop-oldest', --overflow drop-oldest\)"):
            conversation.ask("And now?")
        engine.context = alone
        with pytest.raises(PromptTooLong, match="The message alone is too long"):
            conversation.ask("And now?")

    def test_the_last_token_of_the_window_is_for_the_answer(self, make_engine: Callable[..., Any]) -> None:
        engine = make_engine()
        engine.will_say("Hello")
        Conversation(engine).ask("Hi")
        num_tokens = len(engine.prompts[0])
        engine = make_engine(context=num_tokens)
        with pytest.raises(PromptTooLong, match="The message alone is too long") as caught:
            Conversation(engine).ask("Hi")
        assert caught.value.num_tokens == num_tokens
        engine.context += 1
        engine.will_say("Hello there")
        conversation = Conversation(engine)
        reply = conversation.ask("Hi")
        assert (reply.finish_reason, len(reply.token_ids)) == ("length", 1)
        assert conversation.num_turns == 1


class TestDropOldest:
    @pytest.mark.parametrize("name", ["chatml", "llama3", "gemma"])
    def test_what_is_left_is_written_as_a_conversation_of_its_own(
        self, make_engine: Callable[..., Any], name: str
    ) -> None:
        engine = make_engine(name, context=1000)
        conversation = Conversation(engine, system="Be kind.", overflow="drop-oldest")
        fill(engine, conversation, 3)
        engine.context = len(conversation.history.ask("And now?", drop=2).ids) + 4
        engine.will_say("Fine.")
        conversation.ask("And now?", max_tokens=4)
        shown = conversation.messages
        assert [message["content"] for message in shown[:-1]] == [
            "Be kind.",
            "Question 2?",
            "Answer 2.",
            "And now?",
        ]
        assert engine.prompts[-1] == engine.ids(engine.chat_template.render(shown[:-1]))
        assert conversation.difference is None

    def test_no_more_than_needed_is_dropped(self, make_engine: Callable[..., Any]) -> None:
        engine = make_engine(context=1000)
        conversation = Conversation(engine, overflow="drop-oldest", max_tokens=8)
        fill(engine, conversation, 4)
        lengths = [len(conversation.history.ask("And now?", drop=drop).ids) for drop in range(5)]
        for drop in range(5):
            for spare, expected in ((0, drop), (-1, drop + 1)):
                engine.context = lengths[drop] + 8 + spare
                if expected == 5:  # nothing is left to drop, and the prompt still fits
                    expected = 4
                engine.will_say("Fine.")
                fork = conversation.fork()
                reply = fork.ask("And now?")
                assert fork.num_turns == 5 - expected
                assert len(engine.prompts[-1]) == lengths[expected]
                if expected:
                    turns = "oldest turn" if expected == 1 else f"{expected} oldest turns"
                    assert reply.notes == (
                        f"Dropped the {turns} ({lengths[0] - lengths[expected]} tokens) to fit the context "
                        f"window of {engine.context} tokens.",
                    )
                    assert reply.why is not None
                    assert reply.why.num_recomputed_tokens <= lengths[expected] - reply.why.position
                else:
                    assert (reply.notes, reply.why) == ((), None)

    @pytest.mark.parametrize(("max_tokens", "reserve"), [(None, 25), (25, 25), (1000, 25), (3, 3)])
    def test_a_quarter_of_the_window_at_most_is_kept_for_the_answer(
        self, make_engine: Callable[..., Any], max_tokens: int | None, reserve: int
    ) -> None:
        engine = make_engine(context=1000)
        conversation = Conversation(engine)
        fill(engine, conversation, 1)
        history, params = conversation.history, SamplingParams(max_tokens=max_tokens)
        message = "x"
        while len(history.ask(message).ids) < 100 - reserve:
            message += "\x00"  # a token of its own
        for text, expected in ((message, 0), (message + "\x00", 1)):
            fitted = fit(history, text, context=100, params=params, overflow="drop-oldest")
            assert fitted.num_dropped_turns == expected

    def test_the_why_names_the_first_token_that_moved(self, make_engine: Callable[..., Any]) -> None:
        engine = make_engine(context=1000)
        conversation = Conversation(engine, overflow="drop-oldest", max_tokens=4)
        fill(engine, conversation, 3)
        before = conversation.history.ask("And now?").ids
        engine.context = len(before) + 3
        engine.will_say("Fine.")
        reply = conversation.ask("And now?")
        position = reply.why.position if reply.why else -1
        prompt = engine.prompts[-1]
        assert prompt[:position] == before[:position]
        assert prompt[position] != before[position]
        assert engine.text(prompt[:position]).endswith("Question ")
        assert reply.why is not None
        kept = len(conversation.history.turns[0].piece.ids) + len(conversation.history.turns[0].answer_ids)
        kept += len(conversation.history.turns[1].piece.ids) + len(conversation.history.turns[1].answer_ids)
        assert reply.why.num_recomputed_tokens == kept - position

    def test_a_newest_message_that_does_not_fit_alone_is_refused(
        self, make_engine: Callable[..., Any]
    ) -> None:
        engine = make_engine(context=150)
        conversation = Conversation(engine, overflow="drop-oldest")
        fill(engine, conversation, 2)
        before = conversation.token_ids
        with pytest.raises(PromptTooLong, match="The message alone is too long"):
            conversation.ask("dog " * 200)
        assert conversation.token_ids == before

    def test_a_failed_answer_drops_nothing(self, make_engine: Callable[..., Any]) -> None:
        engine = make_engine(context=1000)
        conversation = Conversation(engine, overflow="drop-oldest")
        fill(engine, conversation, 3)
        engine.context = len(conversation.token_ids)
        engine.answers = [[KeyboardInterrupt()]]
        with pytest.raises(KeyboardInterrupt):
            conversation.ask("And now?")
        assert conversation.num_turns == 3

    def test_what_a_stopped_answer_could_not_tell_the_next_one_does(
        self, make_engine: Callable[..., Any]
    ) -> None:
        engine = make_engine(context=1000)
        conversation = Conversation(engine, overflow="drop-oldest", max_tokens=4)
        fill(engine, conversation, 3)
        engine.context = len(conversation.history.ask("And now?").ids) + 3
        engine.will_say("Fine, thank you.", "Fine.", "Fine.")
        events = conversation.say("And now?")
        next(events)
        events.close()  # type: ignore[attr-defined]
        assert conversation.num_turns == 3
        engine.context = 1000
        assert conversation.ask("Well?").notes[0].startswith("Dropped the oldest turn (")
        assert conversation.ask("Well?").notes == ()

    @given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=12), context=st.integers(60, 300))
    def test_any_chat_stays_in_its_window(
        self, make_engine: Callable[..., Any], lengths: list[int], context: int
    ) -> None:
        engine = make_engine(context=context)
        conversation = Conversation(engine, overflow="drop-oldest")
        for number, length in enumerate(lengths):
            before = conversation.num_turns
            engine.will_say("x" + " x" * (length // 2), end=length % 2 == 0)
            text = f"{number} " + "y " * length
            try:
                reply = conversation.ask(text)
            except PromptTooLong:
                assert len(Conversation(engine).history.ask(text).ids) >= context
                engine.answers.clear()
                continue
            prompt = engine.prompts[-1]
            assert len(prompt) < context
            dropped = before + 1 - conversation.num_turns
            assert dropped == 0 or reply.notes[0].startswith("Dropped")
            assert conversation.num_turns == 1 or len(prompt) + context // 4 <= context
            assert conversation.messages[-2]["content"] == text
            assert conversation.token_ids == [*prompt, *reply.token_ids]
