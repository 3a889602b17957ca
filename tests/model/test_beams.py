"""Beam search and best-of against a search in a few lines of plain Python, and what they hold in memory."""

from __future__ import annotations

import math

import pytest
from core_driver import CoreDriver, prompt_of
from families import tiny_loaded

from octavo.config import SamplingParams
from octavo.engine.engine import TokenEngine
from octavo.engine.messages import Delta
from octavo.errors import InvalidRequest

PROMPT = prompt_of(3, 50)


@pytest.fixture(scope="module")
def engine():
    with TokenEngine(tiny_loaded("llama"), kv_memory="16MiB", debug_fill=True) as engine:
        yield engine
        engine.check_integrity()
        assert engine.memory().kv_used_bytes == 0


def naive_search(engine, prompt, width, number, max_tokens, penalty=1.0, ends=(), **sampling):
    """The (score, tokens) of the best answers, from the engine's log-probabilities of whole prompts."""
    live, done = [(0.0, ())], []
    while live:
        offers = []
        for total, tokens in live:
            reply = engine.generate(
                [*prompt, *tokens], max_tokens=1, logprobs=2 * width, cache=False, ignore_eos=True, **sampling
            )
            offers += [
                (total + logprob, (*tokens, token)) for token, logprob in reply.choices[0].logprobs[0].top
            ]
        offers.sort(key=lambda offer: -offer[0])
        live = []
        for rank, (total, tokens) in enumerate(offers[: 2 * width]):
            score = total / math.pow(len(tokens), penalty)
            if tokens[-1] in ends:
                done += [(score, tokens)] if rank < width else []
            elif len(live) < width:
                live.append((total, tokens))
        length = len(live[0][1])
        if length == max_tokens:
            done += [(total / math.pow(length, penalty), tokens) for total, tokens in live]
            live = []
        done = sorted(done, key=lambda one: -one[0])[:width]
        if live and len(done) == width and live[0][0] / math.pow(length, penalty) <= done[-1][0]:
            live = []
    return done[:number]


@pytest.mark.parametrize(("width", "number", "penalty"), [(2, 1, 1.0), (3, 3, 0.0), (4, 2, 2.0), (5, 5, 1.0)])
def test_a_search_finds_what_a_naive_one_finds(engine, width, number, penalty):
    ends = tuple(range(10, 40))  # so many that answers of different lengths end
    reply = engine.generate(
        PROMPT,
        beams=width,
        n=number,
        max_tokens=9,
        length_penalty=penalty,
        stop_token_ids=ends,
        ignore_eos=True,
    )
    expected = naive_search(engine, PROMPT, width, number, 9, penalty, ends)
    assert [(choice.score, choice.token_ids) for choice in reply.choices] == expected
    assert [choice.index for choice in reply.choices] == list(range(number))
    for choice in reply.choices:
        ended = choice.token_ids[-1] in ends
        assert choice.finish_reason == ("stop" if ended else "length")
        assert choice.stop == (choice.token_ids[-1] if ended else None)
        assert choice.logprobs is None


def test_a_search_beside_others_under_pressure_finds_the_same(engine):
    expected = naive_search(engine, PROMPT, 4, 4, 40)
    for kib in range(100, 400, 10):
        try:
            driver = CoreDriver(kib << 10, max_running=5, kv_format="int8")
        except InvalidRequest:
            continue
        break
    assert driver.core._cache.plan.num_blocks < 5, "both together must be too much"
    driver.add("other", prompt_of(9, 30), max_tokens=60)
    driver.step()
    driver.add("search", PROMPT, beams=4, n=4, max_tokens=40)
    driver.run()
    reply = driver.replies["search"]
    assert [(choice.score, choice.token_ids) for choice in reply.choices] == expected
    assert driver.scheduler.num_preempted
    assert driver.is_clean()


def test_penalties_and_logprobs_are_those_of_each_beam(engine):
    sampling = {"repetition_penalty": 1.3, "max_tokens": 8, "ignore_eos": True}
    reply = engine.generate(PROMPT, beams=3, n=3, logprobs=2, **sampling)
    for choice in reply.choices:
        assert sum(token.logprob for token in choice.logprobs) / 8 == pytest.approx(choice.score, rel=1e-12)
        assert [token.token_id for token in choice.logprobs] == list(choice.token_ids)
        assert {len(token.top) for token in choice.logprobs} == {2}
    best = engine.generate(PROMPT, beams=3, **sampling)
    assert best.choices[0].token_ids == reply.choices[0].token_ids
    plain = engine.generate(PROMPT, beams=3, max_tokens=8, ignore_eos=True)
    assert plain.token_ids != best.token_ids


def test_without_the_cache_the_search_is_the_same(engine):
    settings = {"beams": 3, "n": 3, "max_tokens": 6, "ignore_eos": True}
    warm, bare = engine.generate(PROMPT, **settings), engine.generate(PROMPT, cache=False, **settings)
    assert [choice.token_ids for choice in warm.choices] == [choice.token_ids for choice in bare.choices]


def test_memory_grows_by_what_is_generated_only():
    driver = CoreDriver(max_running=8)
    prompt = prompt_of(1, 320)
    driver.add("a", prompt, beams=8, n=8, max_tokens=70)
    most = 0
    while driver.core.has_work:
        driver.step()
        most = max(most, driver.manager.num_used_blocks)
        assert driver.manager.num_used_slots <= 8
    assert most <= 320 // 32 + 8 * (70 // 32)
    assert driver.is_clean()
    driver.add("b", prompt + list(driver.replies["a"].choices[0].token_ids) + [7], max_tokens=1)
    driver.run()
    cached = driver.replies["b"].usage.cached_tokens
    assert cached >= (320 + 69) // 32 * 32, "what the best answer has computed is reused"


def test_an_abort_ends_a_search_with_what_it_has():
    driver = CoreDriver(max_running=4)
    driver.add("early", PROMPT, beams=3, n=2, max_tokens=50)
    driver.abort("early")
    assert driver.replies["early"].choices[0].token_ids == ()
    driver.add("late", PROMPT, beams=3, n=2, max_tokens=50)
    for _ in range(8):
        driver.step()
    driver.abort("late")
    choices = driver.replies["late"].choices
    assert [choice.finish_reason for choice in choices] == ["abort", "abort"]
    assert all(1 < len(choice.token_ids) <= 8 for choice in choices)
    assert driver.is_clean()


def test_a_failing_beam_fails_its_request_only(monkeypatch):
    driver = CoreDriver(max_running=6)
    driver.add("a", PROMPT, beams=3, max_tokens=20)
    driver.add("b", prompt_of(5, 40), max_tokens=20)
    for _ in range(5):
        driver.step()
    broken = driver.core._sequences["a"][1].sampler
    likeliest = type(broken).likeliest
    monkeypatch.setattr(
        type(broken), "likeliest", lambda self, *rest: 1 / 0 if self is broken else likeliest(self, *rest)
    )
    driver.run()
    assert isinstance(driver.errors["a"], ZeroDivisionError)
    assert len(driver.replies["b"].token_ids) == 20
    assert driver.is_clean()


def test_best_of_returns_the_likeliest_of_what_n_draws(engine):
    sampling = {"temperature": 1.2, "seed": 11, "max_tokens": 12, "ignore_eos": True}
    drawn = engine.generate(PROMPT, n=6, logprobs=0, **sampling)
    means = [sum(token.logprob for token in c.logprobs) / len(c.logprobs) for c in drawn.choices]
    order = sorted(range(6), key=lambda index: -means[index])
    events = [e for e in engine.stream(PROMPT, best_of=6, n=2, **sampling) if isinstance(e, Delta)]
    reply = events[-1].reply
    assert [choice.token_ids for choice in reply.choices] == [drawn.choices[i].token_ids for i in order[:2]]
    assert [choice.score for choice in reply.choices] == [means[i] for i in order[:2]]
    assert [choice.logprobs for choice in reply.choices] == [None, None]
    assert [(event.index, event.text) for event in events] == [(c.index, c.text) for c in reply.choices]


def test_what_contradicts_a_search_is_refused(engine):
    for settings, message in (
        ({"beams": 2, "temperature": 1}, "temperature is 1 and beams is 2; temperature must be 0"),
        ({"beams": 2, "n": 3}, "n is 3 and beams is 2; n must be at most the 2 beams"),
        ({"beams": 2, "stop": "x"}, "stop must be left out; stop_token_ids"),
        ({"beams": 2, "best_of": 2}, "best_of must be left out"),
        ({"best_of": 1, "n": 2}, "best_of is 1; it must be from n to 128"),
        ({"beams": 0}, "beams is 0; it must be from 1 to 128"),
        ({"length_penalty": math.inf}, "length_penalty is inf; it must be finite"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            SamplingParams(**settings)
    with pytest.raises(InvalidRequest, match="beams is 17 and at most 16 answers run at once"):
        engine.generate(PROMPT, beams=17)
