"""The engine on a tiny random model: batching, limits, errors, memory."""

from __future__ import annotations

import threading

import pytest
import torch
from families import answers_at_once, tiny_loaded
from tiny_engine import FIRST, SECOND, make_engine

from octavo.engine.engine import TokenEngine
from octavo.engine.messages import Progress
from octavo.errors import (
    InvalidRequest,
    NumericalError,
    PromptTooLong,
    RequestTooLarge,
    UnsupportedModel,
)


def test_cache_changes_no_token_and_saves_work(engine, expected):
    engine.clear()
    cold = engine.generate(FIRST, max_tokens=40, ignore_eos=True)
    warm = engine.generate(FIRST, max_tokens=40, ignore_eos=True)
    bare = engine.generate(FIRST, max_tokens=40, ignore_eos=True, cache=False)
    assert cold.token_ids == warm.token_ids == bare.token_ids == expected[tuple(FIRST)]
    assert (cold.usage.cached_tokens, cold.usage.computed_tokens) == (0, 50)
    assert (warm.usage.cached_tokens, warm.usage.computed_tokens) == (49, 1)
    assert bare.usage.computed_tokens == sum(range(50, 90))
    assert cold.why is not None
    assert cold.why.cause == "new"
    assert warm.why is None
    assert bare.why.cause == "no_cache"


def test_no_cache_leaves_nothing_behind(engine):
    engine.clear()
    engine.generate(SECOND, max_tokens=5, cache=False)
    assert engine.memory().kv_reusable_bytes == 0
    assert engine.generate(SECOND, max_tokens=1).usage.cached_tokens == 0


@pytest.mark.parametrize("max_step_tokens", [7, 512])
def test_a_scored_prompt_is_computed_whole_and_can_be_reused(expected, max_step_tokens):
    with make_engine(max_step_tokens=max_step_tokens) as engine:
        plain = engine.generate(FIRST, max_tokens=40, ignore_eos=True)
        scored = engine.generate(FIRST, max_tokens=40, ignore_eos=True, prompt_logprobs=1)
        bare = engine.generate(FIRST, max_tokens=1, ignore_eos=True, prompt_logprobs=1, cache=False)
        assert plain.token_ids == scored.token_ids == expected[tuple(FIRST)]
        assert (scored.usage.cached_tokens, scored.usage.computed_tokens) == (0, 50)
        assert scored.prompt_logprobs == bare.prompt_logprobs
        assert [None if one is None else one.token_id for one in bare.prompt_logprobs] == [None, *FIRST[1:]]
        engine.clear()
        engine.generate(SECOND, max_tokens=1, prompt_logprobs=0)
        after = engine.generate(SECOND, max_tokens=40, ignore_eos=True)
        assert after.usage.cached_tokens == len(SECOND) - 1
        assert after.token_ids == expected[tuple(SECOND)]
        engine.check_integrity()


def test_the_next_turn_reuses_prompt_and_answer(engine):
    prompt = list(range(150, 200))
    first = engine.generate(prompt, max_tokens=30, ignore_eos=True)
    second = engine.generate([*prompt, *first.token_ids, 11, 12, 13], max_tokens=5)
    assert second.usage.prompt_tokens == 83
    assert second.usage.cached_tokens == 79  # the last sampled token has no key yet
    assert second.why is None


def test_why_names_the_cause(engine):
    engine.clear()
    engine.generate(SECOND, max_tokens=1)
    changed = [*SECOND[:70], 5, *SECOND[71:]]
    reply = engine.generate(changed, max_tokens=1)
    assert reply.usage.cached_tokens == 64 + 6  # raw rows up to the changed token are exact
    assert engine.clear() > 0
    why = engine.generate(SECOND, max_tokens=1).why
    assert why.cause == "cleared"
    assert why.num_recomputed_tokens == 89


def test_many_at_once_answer_as_if_alone(engine, expected):
    prompts = [FIRST, SECOND] * 6
    replies = answers_at_once(engine, prompts, max_tokens=40)
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply.token_ids == expected[tuple(prompt)]


@pytest.mark.parametrize("max_step_tokens", [1, 7, 64])
def test_any_step_size_answers_the_same(expected, max_step_tokens):
    with make_engine(max_step_tokens=max_step_tokens) as engine:
        events = list(engine.stream(SECOND, max_tokens=40, ignore_eos=True))
        assert events[-1].reply.token_ids == expected[tuple(SECOND)]
        steps = [event for event in events if isinstance(event, Progress)]
        assert [s.num_computed_tokens for s in steps] == list(range(max_step_tokens, 90, max_step_tokens))
        engine.check_integrity()


def test_same_seed_same_text_in_any_company(engine):
    sampling = {"temperature": 1.5, "top_p": 0.95, "seed": 7, "max_tokens": 30, "ignore_eos": True}
    alone = engine.generate(FIRST, **sampling)
    results = []
    others = [
        threading.Thread(target=lambda: engine.generate(SECOND, temperature=1.0, max_tokens=40))
        for _ in range(3)
    ]
    others.append(threading.Thread(target=lambda: results.append(engine.generate(FIRST, **sampling))))
    for thread in others:
        thread.start()
    for thread in others:
        thread.join()
    assert results[0].token_ids == alone.token_ids
    assert engine.generate(FIRST, **{**sampling, "seed": 8}).token_ids != alone.token_ids
    unseeded = engine.generate(FIRST, temperature=1.5, max_tokens=5)
    assert (
        engine.generate(FIRST, temperature=1.5, max_tokens=5, seed=unseeded.seed).token_ids
        == unseeded.token_ids
    )


def test_n_answers_fork_one_prefill(engine):
    engine.clear()
    sampling = {"temperature": 1.5, "seed": 3, "max_tokens": 20, "ignore_eos": True}
    many = engine.generate(SECOND, n=4, **sampling)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert len({choice.token_ids for choice in many.choices}) == 4
    assert many.usage.computed_tokens == len(SECOND)
    assert many.usage.completion_tokens == 80
    assert engine.generate(SECOND, **sampling).token_ids == many.choices[0].token_ids
    assert engine.memory().kv_used_bytes == 0


def test_stop_ids_strings_and_end_tokens(engine, expected):
    answer = expected[tuple(FIRST)]
    by_id = engine.generate(FIRST, max_tokens=40, stop_token_ids=[answer[5]], ignore_eos=True)
    assert by_id.token_ids == answer[: answer.index(answer[5]) + 1]
    assert (by_id.finish_reason, by_id.choices[0].stop) == ("stop", answer[5])
    text = engine.generate(FIRST, max_tokens=40, ignore_eos=True).text
    stop = text[6:9]
    by_text = engine.generate(FIRST, max_tokens=40, stop=[stop], ignore_eos=True)
    assert by_text.text == text[: text.index(stop)]
    assert (by_text.finish_reason, by_text.choices[0].stop) == ("stop", stop)
    bias = engine.generate(FIRST, max_tokens=40, logit_bias={2: 1e4})
    assert (bias.token_ids, bias.text, bias.finish_reason) == ((2,), "", "stop")


def test_context_window_ends_the_answer_and_says_so(engine):
    reply = engine.generate(list(range(5, 305)), ignore_eos=True)
    assert reply.finish_reason == "length"
    assert len(reply.token_ids) == 512 - 300
    assert "context window of 512 tokens is full" in reply.notes[0]


def test_mistakes_are_refused_before_anything_is_computed(engine):
    with pytest.raises(PromptTooLong, match=r"600 tokens.*512"):
        engine.generate([5] * 600)
    with pytest.raises(InvalidRequest, match="empty"):
        engine.generate([])
    with pytest.raises(InvalidRequest, match="token id 99999"):
        engine.generate([99999])
    with pytest.raises(InvalidRequest, match="temperature is -1"):
        engine.generate([5], temperature=-1)
    with pytest.raises(InvalidRequest, match="beam_width"):
        engine.generate([5], beam_width=3)
    with pytest.raises(InvalidRequest, match="at most 16"):
        engine.generate([5], n=17)
    assert engine.memory().kv_used_bytes == 0


def test_a_prompt_larger_than_the_cache_is_refused_with_numbers_and_blocks_nobody():
    with make_engine(kv_format="raw") as roomy:
        expected = roomy.generate(FIRST, max_tokens=5).token_ids
    with make_engine(kv_memory="210KiB", max_running=2, kv_format="raw") as engine:
        with pytest.raises(
            RequestTooLarge, match=r"300 tokens needs 163,840 bytes .* holds 131,072, 256 tokens"
        ):
            engine.generate([5] * 300)
        assert engine.generate(FIRST, max_tokens=5).token_ids == expected
    with pytest.raises(InvalidRequest, match="at least"):
        make_engine(kv_memory="100KiB")


def test_short_memory_preempts_and_every_answer_is_that_of_a_lone_run():
    prompts = [[(7 * i + j) % 300 + 10 for j in range(100)] for i in range(6)]
    with make_engine(kv_format="raw") as roomy:
        expected = [roomy.generate(p, max_tokens=120, ignore_eos=True).token_ids for p in prompts]
    with make_engine(kv_memory="640KiB", max_running=6, kv_format="raw") as engine:
        blocks = engine._core._cache.plan.num_blocks
        assert blocks < 6 * 7, "the budget must be too small for all at once"
        assert blocks >= 7
        preempted = []
        scheduler = engine._core._scheduler
        original = scheduler._preempt
        scheduler._preempt = lambda *args: preempted.append(1) or original(*args)
        replies = answers_at_once(engine, prompts, max_tokens=120)
        assert [reply.token_ids for reply in replies] == expected
        assert preempted
        memory = engine.memory()
        assert memory.kv_allocated_bytes <= memory.kv_budget_bytes == 640 << 10
        assert memory.kv_used_bytes == 0
        engine.check_integrity()


def test_an_answer_that_fills_the_cache_ends_with_a_note():
    with make_engine(kv_memory="210KiB", max_running=1, kv_format="raw") as engine:
        blocks = engine._core._cache.plan.num_blocks
        assert blocks * 32 < 400
        reply = engine.generate(FIRST, max_tokens=450, ignore_eos=True)
        assert reply.finish_reason == "length"
        assert "cache" in reply.notes[0]
        assert len(reply.token_ids) >= blocks * 32 - 50
        assert engine.generate(FIRST, max_tokens=3).finish_reason == "length"


def test_memory_grows_with_use_and_shrinks_when_cleared(engine):
    engine.clear()
    empty = engine.memory()
    assert empty.kv_allocated_bytes == empty.kv_reusable_bytes == 0
    # 2 layers, 2 heads: a key code and a 32nd of a channel's scale and zero, a value code and a token's own
    assert empty.kv_bytes_per_token == 2 * 2 * (16 + 16 * 4 // 32 + 16 + 4)
    engine.generate(SECOND, max_tokens=10)
    used = engine.memory()
    assert 0 < used.kv_reusable_bytes <= used.kv_allocated_bytes <= used.kv_budget_bytes
    assert used.weights_bytes == empty.weights_bytes > 0
    assert engine.clear() == used.kv_allocated_bytes
    assert engine.memory().kv_allocated_bytes == 0


def test_tenants_share_nothing(engine):
    engine.clear()
    engine.generate(FIRST, max_tokens=2, cache_namespace="a")
    assert engine.generate(FIRST, max_tokens=2, cache_namespace="b").usage.cached_tokens == 0
    assert engine.generate(FIRST, max_tokens=2, cache_namespace="a").usage.cached_tokens == 49


def test_nan_fails_its_own_request_only(engine, expected, monkeypatch):
    run = engine._core._cache.runner.run

    def poisoned(chunks, rows):
        logits = run(chunks, rows)
        for row, chunk in zip(logits, chunks, strict=True):  # each chunk is the rest of its sequence here
            if chunk.table.token_ids[:1] == [SECOND[0]] or chunk.token_ids[0] == SECOND[0]:
                row[3] = float("nan")
        return logits

    monkeypatch.setattr(engine._core._cache.runner, "run", poisoned)
    errors = []

    def fail():
        try:
            engine.generate(SECOND, max_tokens=5)
        except NumericalError as error:
            errors.append(error)

    thread = threading.Thread(target=fail)
    thread.start()
    assert engine.generate(FIRST, max_tokens=40, ignore_eos=True).token_ids == expected[tuple(FIRST)]
    thread.join()
    assert errors
    assert engine.memory().kv_used_bytes == 0


def test_a_failed_step_is_told_and_the_engine_goes_on(engine, expected, monkeypatch):
    def broken(chunks, rows):
        raise RuntimeError("the machine is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(engine._core._cache.runner, "run", broken)
        with pytest.raises(RuntimeError, match="on fire"):
            engine.generate(FIRST, max_tokens=5)
    assert engine.memory().kv_used_bytes == 0
    assert engine.generate(FIRST, max_tokens=40, ignore_eos=True).token_ids == expected[tuple(FIRST)]


def test_reference_kernels_answer_alike(expected):
    with make_engine(kernels="reference") as engine:
        assert engine.generate(FIRST, max_tokens=40, ignore_eos=True).token_ids == expected[tuple(FIRST)]


def test_settings_that_do_not_exist_or_do_not_fit_are_refused():
    with pytest.raises(InvalidRequest, match="colour"):
        make_engine(colour="red")
    with pytest.raises(InvalidRequest, match="int3"):
        make_engine(kv_format="int3")
    with pytest.raises(InvalidRequest, match="made for 512"):
        make_engine(context=1000)
    with pytest.raises(UnsupportedModel, match="training mode"):
        loaded = tiny_loaded("llama")
        loaded.model.train()
        TokenEngine(loaded)


@pytest.mark.parametrize("fuse", [True, False])
def test_the_model_itself_is_not_to_be_called(fuse):
    loaded = tiny_loaded("llama")
    with TokenEngine(loaded, kv_memory="64MiB", fuse=fuse), pytest.raises(Exception, match="ask the engine"):
        loaded.model(torch.tensor([[5, 6]]), use_cache=False)
