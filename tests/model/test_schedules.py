"""Random schedules and too many conversations: everything ends, nothing is left, answers are those of lone runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from core_driver import CoreDriver, prompt_of
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from octavo.errors import InvalidRequest


@dataclass(frozen=True)
class Ask:
    """A request. Prompts share beginnings: `seed` names one, of `length` tokens, and `tail` what follows."""

    seed: int
    length: int
    tail: int
    max_tokens: int
    n: int
    urgency: int
    tenant: str
    cache: bool

    @property
    def prompt(self) -> tuple[int, ...]:
        return (*prompt_of(self.seed, self.length), *prompt_of(100 + self.tail, self.tail))

    @property
    def sampling(self) -> dict:
        # Without the cache every token computes the whole sequence again: only a few of them.
        max_tokens = self.max_tokens if self.cache else min(self.max_tokens, 3)
        return {"max_tokens": max_tokens, "n": self.n, "temperature": 0.9, "seed": 5}


asks = st.builds(
    Ask,
    seed=st.integers(0, 1),
    length=st.sampled_from([1, 31, 32, 33, 64, 97, 150]),
    tail=st.sampled_from([0, 0, 1, 33]),
    max_tokens=st.sampled_from([1, 3, 40, 70]),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    urgency=st.sampled_from([0, 0, 0, -1, 2]),
    tenant=st.sampled_from(["", "", "b"]),
    cache=st.sampled_from([True, True, True, True, False]),
)
actions = st.lists(
    st.one_of(asks, st.integers(0, 8), st.tuples(st.just("abort"), st.integers(0, 7))),
    min_size=1,
    max_size=16,
)


def smallest(**options) -> CoreDriver:
    """A core with the smallest budget that is legal."""
    low, high = 16, 4096  # KiB
    while low < high:
        middle = (low + high) // 2
        try:
            CoreDriver(middle << 10, **options)
            high = middle
        except InvalidRequest:
            low = middle + 1
    return CoreDriver(low << 10, **options)


@pytest.fixture(scope="module")
def drivers() -> Iterator[list[CoreDriver]]:
    made = [
        smallest(max_running=3, max_step_tokens=64),
        smallest(max_running=4, max_step_tokens=7, kv_format="int8"),
        CoreDriver(400 << 10, max_running=3, max_step_tokens=1),
        CoreDriver(1 << 20, max_running=6, max_step_tokens=512, kv_format="int8"),
    ]
    yield made
    assert any(driver.scheduler.num_preempted for driver in made), "memory was never short"


@pytest.fixture(scope="module")
def lone():
    """Answers of requests that ran alone in a roomy cache, by cache format."""
    roomy = {kv_format: CoreDriver(kv_format=kv_format) for kv_format in ("raw", "int8")}
    known: dict[tuple, list[tuple[int, ...]]] = {}

    def answers(ask: Ask, kv_format: str) -> list[tuple[int, ...]]:
        key = (ask.prompt, ask.sampling["max_tokens"], ask.n, kv_format)
        if key not in known:
            driver = roomy[kv_format]
            driver.add("lone", ask.prompt, **ask.sampling)
            driver.run()
            known[key] = [choice.token_ids for choice in driver.replies["lone"].choices]
        return known[key]

    return answers


@settings(
    max_examples=200,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # an engine is slow to shrink with
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(which=st.integers(0, 3), actions=actions)
def test_every_schedule_ends_and_answers_as_if_alone(drivers, lone, which, actions):
    driver = drivers[which]
    for name in list(driver.core._sequences):  # what an example that failed has left
        driver.abort(name)
    driver.replies.clear()
    driver.errors.clear()
    driver.tokens.clear()
    asked: dict[str, Ask] = {}
    aborted: set[str] = set()
    for action in actions:
        if isinstance(action, int):
            for _ in range(action):
                driver.step()
        elif isinstance(action, tuple):
            name = str(action[1])
            aborted.add(name)
            driver.abort(name)
        else:
            name = str(len(asked))
            if action.n <= driver.core._config.max_running and driver.add_if_it_fits(
                name,
                action.prompt,
                urgency=action.urgency,
                cache_namespace=action.tenant,
                cache=action.cache,
                **action.sampling,
            ):
                asked[name] = action
    tokens = [ask.n * (len(ask.prompt) + ask.max_tokens) * (1 if ask.cache else 3) for ask in asked.values()]
    note(repr(actions))
    driver.run(max_steps=100 + 10 * sum(tokens))
    assert not driver.errors
    assert driver.is_clean()
    kv_format = driver.core._config.kv_format
    for name, ask in asked.items():
        reply = driver.replies[name]
        for choice, tokens in zip(reply.choices, lone(ask, kv_format), strict=True):
            if choice.finish_reason == "abort":
                assert name in aborted
                assert choice.token_ids == tokens[: len(choice.token_ids)]
            elif choice.token_ids != tokens:
                assert any("the cache of" in note for note in reply.notes), "the answer is another one"
                assert choice.token_ids == tokens[: len(choice.token_ids)]
    driver.core.clear()
    assert not driver.manager.allocated_blocks()
    assert not driver.manager.allocated_slots()


def test_64_conversations_in_room_for_12_answer_as_if_alone():
    """Four turns each; a turn goes on from the whole conversation before."""
    turns, new, answer = 4, 20, 12
    alone: list[list[tuple[int, ...]]] = []
    roomy = CoreDriver(32 << 20)
    length = turns * (new + answer)

    def prompt(conversation: int, before: list[tuple[int, ...]]) -> list[int]:
        ids: list[int] = []
        for turn, said in enumerate([*before, ()]):
            ids += [*prompt_of(conversation * turns + turn, new), *said]
        return ids

    for conversation in range(64):
        said: list[tuple[int, ...]] = []
        for _ in range(turns):
            roomy.add("lone", prompt(conversation, said), max_tokens=answer)
            roomy.run()
            said.append(roomy.replies["lone"].token_ids)
        roomy.core.clear()
        alone.append(said)

    for kib in range(300, 4000, 20):  # room for the blocks of 12 whole conversations
        try:
            driver = CoreDriver(kib << 10, max_running=8)
        except InvalidRequest:
            continue
        if driver.core._cache.plan.num_blocks >= 12 * length // 32:
            break
    blocks = driver.core._cache.plan.num_blocks
    assert blocks < 64 * length // 32 / 4
    said_now: list[list[tuple[int, ...]]] = [[] for _ in range(64)]
    for conversation in range(64):
        driver.add(f"{conversation}/0", prompt(conversation, []), max_tokens=answer)
    steps = 0
    while driver.core.has_work:
        driver.step()
        steps += 1
        assert steps < 20_000
        for name in list(driver.replies):
            conversation = int(name.split("/")[0])
            said_now[conversation].append(driver.replies.pop(name).token_ids)
            if len(said_now[conversation]) < turns:
                turn = len(said_now[conversation])
                driver.add(
                    f"{conversation}/{turn}", prompt(conversation, said_now[conversation]), max_tokens=answer
                )
        if steps % 50 == 0:
            driver.core.check_integrity()
            memory = driver.core.memory()
            assert memory.kv_allocated_bytes <= memory.kv_budget_bytes
    assert said_now == alone
    assert driver.scheduler.num_preempted == 0, (
        "all of a prompt and its answer's next block was there before it began"
    )
    assert driver.is_clean()
    assert driver.manager.num_reusable_blocks == len(driver.manager.allocated_blocks())
