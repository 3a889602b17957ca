"""How requests end before their answers do: aborts and timeouts in every state."""

from __future__ import annotations

import time

import pytest
from core_driver import CoreDriver, prompt_of

from octavo.errors import InvalidRequest

STATES = [
    "waiting",
    "prefilling",
    "decoding",
    "preempted",
    "awaiting forks",
    "forked",
    "following",
    "suspect",
]


def reach(driver: CoreDriver, state: str) -> None:
    """Brings the request `a` into a state; others may be there as well."""
    prompt = prompt_of(1, 200)
    if state == "waiting":
        for seed in range(4):
            driver.add(f"other{seed}", prompt_of(10 + seed, 40), max_tokens=50)
        driver.step()
    if state == "following":
        driver.add("leader", prompt, max_tokens=50)
        driver.step()
    many = {"n": 3, "temperature": 1.0, "seed": 1} if "fork" in state else {}
    driver.add("a", prompt, max_tokens=50, **many)
    if state == "prefilling":
        driver.step()
    if state in ("decoding", "forked", "preempted", "suspect"):
        while not driver.tokens["a"]:
            driver.step()
    if state in ("preempted", "suspect"):
        (sequence,) = driver.scheduler.running
        driver.scheduler._give_up(sequence)
        if state == "suspect":
            sequence.suspect = True
            driver.scheduler._suspects.append(sequence)


@pytest.mark.parametrize("state", STATES)
def test_an_abort_frees_at_once_and_loses_nothing_reusable(state):
    driver = CoreDriver(max_step_tokens=64)
    reach(driver, state)
    others = {s.state.request.request_id for s in driver.scheduler.running} - {"a"}
    driver.abort("a")
    assert driver.replies["a"].finish_reason == "abort"
    assert {s.state.request.request_id for s in driver.scheduler.running} == others
    assert all(s.state.request.request_id != "a" for s in driver.scheduler.waiting)
    if not others:
        assert driver.is_clean()
    driver.run()
    assert driver.is_clean()
    assert {len(driver.replies[name].token_ids) for name in others} <= {50}
    driver.add("again", prompt_of(1, 200), max_tokens=1)
    driver.run()
    known = {"waiting": 0, "prefilling": 64, "awaiting forks": 0, "following": 199}.get(state, 199)
    assert driver.replies["again"].usage.cached_tokens == known


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "preempted", "forked"])
def test_a_request_ends_when_its_time_is_over(state, monkeypatch):
    driver = CoreDriver(max_step_tokens=64)
    reach(driver, state)
    driver.core._deadlines["a"] = time.perf_counter() - 1
    sequence = driver.core._sequences["a"][0]
    object.__setattr__(sequence.state.request, "timeout_s", 1.5)
    driver.step()
    reply = driver.replies["a"]
    assert {choice.finish_reason for choice in reply.choices} == {"timeout"}
    assert "its time of 1.5 s is over" in reply.notes[-1]
    assert not driver.core._deadlines
    driver.run()
    assert driver.is_clean()


@pytest.mark.parametrize("how", ["abort", "timeout"])
@pytest.mark.parametrize("early", [0, 1])
def test_an_answer_that_has_ended_is_not_ended_again(how, early):
    driver = CoreDriver(speculate="off")
    many = {"max_tokens": 20, "n": 2, "temperature": 1.0, "seed": 1}
    driver.add("before", prompt_of(1, 40), **many)
    driver.run()
    stop = driver.replies["before"].choices[early].token_ids[3]
    driver.add("a", prompt_of(1, 40), stop_token_ids=(stop,), **many)
    while not driver.core._sequences["a"][0].state.choices:
        driver.step()
    if how == "abort":
        events = driver.core.abort("a")
    else:
        driver.core._deadlines["a"] = time.perf_counter() - 1
        object.__setattr__(driver.core._sequences["a"][0].state.request, "timeout_s", 1.5)
        events = driver.core.step()
    assert [(event.index, event.finish_reason) for event in events] == [(1 - early, how)]
    reasons = [choice.finish_reason for choice in events[0].reply.choices]
    assert reasons == (["stop", how] if early == 0 else [how, "stop"])
    assert driver.is_clean()


def test_a_timeout_is_counted_from_the_arrival():
    driver = CoreDriver()
    driver.add("a", prompt_of(1, 40), timeout_s=1e-6)
    driver.add("b", prompt_of(2, 40), timeout_s=1000)
    assert driver.core.patience_s == 0
    driver.step()
    assert driver.replies["a"].finish_reason == "timeout"
    assert 900 < driver.core.patience_s < 1000
    driver.run()
    assert driver.replies["b"].finish_reason == "length"
    assert driver.core.patience_s is None
    with pytest.raises(InvalidRequest, match="timeout_s is 0; it must be above 0"):
        driver.add("c", [5], timeout_s=0)


# Numbers


def test_the_counters_add_up():
    driver = CoreDriver(max_step_tokens=64, speculate="off")
    driver.add("a", prompt_of(1, 100), max_tokens=10)
    driver.add("b", prompt_of(2, 100), max_tokens=10, n=2, temperature=1.0)
    driver.run()
    driver.add("c", prompt_of(1, 100), max_tokens=3)
    driver.add("late", prompt_of(4, 40), timeout_s=1e-6)
    driver.run()
    with pytest.raises(InvalidRequest):
        driver.add("d", [])
    counters = driver.core.counters()
    assert counters.num_read_tokens == 100 + 100 + 1
    assert counters.num_decoded_tokens == 9 + 2 * 9 + 2, "the first token of an answer comes with its prompt"
    assert sum(counters.gaps) == counters.num_decoded_tokens
    assert counters.gap_s > 0
    assert counters.ended == {"length": 4, "timeout": 1}
    assert counters.refused == {"InvalidRequest": 1}
    assert not counters.failed
    assert counters.num_failed_steps == 0
    assert counters.usage == {"memory": 0.0}
    counters.ended["length"] = 0
    assert driver.core.counters().ended["length"] == 4, "what was read is a copy"
