"""Who gets the next place, who gives it up, and what a failing step does to whom; on a core without its thread."""

from __future__ import annotations

import pytest
from core_driver import CoreDriver, prompt_of

from octavo.engine.sequence import MAX_OVERTAKEN
from octavo.errors import InvalidRequest


@pytest.fixture(scope="module")
def lone():
    """A greedy answer that was computed alone, in a roomy cache."""
    driver = CoreDriver()
    known: dict[tuple, tuple] = {}

    def answer(prompt, max_tokens=4):
        key = (tuple(prompt), max_tokens)
        if key not in known:
            driver.add("lone", prompt, max_tokens=max_tokens)
            driver.run()
            known[key] = driver.replies["lone"].token_ids
        return known[key]

    return answer


# Order


def test_the_more_urgent_goes_first_then_who_came_first():
    driver = CoreDriver(max_running=1)
    for seed, urgency in enumerate((0, 0, 2, -1, 2)):
        driver.add(str(seed), prompt_of(seed, 40), urgency=urgency)
    driver.run()
    assert driver.order == ["2", "4", "0", "1", "3"]
    assert driver.is_clean()


def test_tenants_take_turns_however_much_one_asks():
    driver = CoreDriver(max_running=1)
    for seed in range(6):
        driver.add(f"a{seed}", prompt_of(seed, 40), cache_namespace="a")
    for seed in range(2):
        driver.add(f"b{seed}", prompt_of(10 + seed, 40), cache_namespace="b")
    driver.run()
    assert driver.order == ["a0", "b0", "a1", "b1", "a2", "a3", "a4", "a5"]


def test_a_tenant_that_was_away_has_saved_up_no_claim():
    driver = CoreDriver(max_running=1)
    driver.add("b", prompt_of(90, 40), cache_namespace="b")
    driver.run()
    for seed in range(4):
        driver.add(f"a{seed}", prompt_of(seed, 200), cache_namespace="a")
    while len(driver.replies) < 3:
        driver.step()
    for seed in range(4):
        driver.add(f"b{seed}", prompt_of(10 + seed, 200), cache_namespace="b")
    driver.run()
    assert driver.order[-6:] == ["a2", "b0", "a3", "b1", "b2", "b3"]


def test_of_a_tenant_the_conversation_with_fewer_answers_goes_first():
    driver = CoreDriver(max_running=2)
    for i in range(3):  # turns of one conversation, which each go on from the last prompt
        driver.add(f"many{i}", prompt_of(0, 40 + i), max_tokens=8 + 8 * i)
    driver.add("one", prompt_of(9, 40))
    driver.run()
    assert driver.order == ["many0", "one", "many1", "many2"]


def test_of_a_tenant_what_the_cache_knows_goes_first():
    driver = CoreDriver(max_running=1)
    driver.add("before", prompt_of(5, 100))
    driver.run()
    for seed in (3, 4, 5):
        driver.add(str(seed), prompt_of(seed, 110))
    driver.run()
    assert driver.order == ["before", "5", "3", "4"]


def test_nobody_is_overtaken_for_ever():
    driver = CoreDriver(max_running=1)
    driver.add("running", prompt_of(0, 40))
    driver.step()
    driver.add("patient", prompt_of(1, 40), urgency=-4, max_tokens=1)
    for seed in range(2 * MAX_OVERTAKEN):
        driver.add(f"urgent{seed}", prompt_of(2 + seed, 33), urgency=4, max_tokens=1)
    driver.run()
    assert driver.order.index("patient") == MAX_OVERTAKEN + 1


def test_a_more_urgent_request_takes_the_place_of_a_less_urgent_one(lone):
    driver = CoreDriver(max_running=2)
    driver.add("low", prompt_of(1, 50), urgency=-1, max_tokens=40)
    driver.add("high", prompt_of(2, 50), urgency=1, max_tokens=40)
    for _ in range(5):
        driver.step()
    driver.add("urgent", prompt_of(3, 50), urgency=2, max_tokens=5)
    driver.step()
    assert [s.state.request.request_id for s in driver.scheduler.waiting] == ["low"]
    driver.run()
    assert driver.replies["low"].token_ids == lone(prompt_of(1, 50), 40)
    assert driver.replies["high"].token_ids == lone(prompt_of(2, 50), 40)


def test_an_urgency_out_of_range_is_refused():
    driver = CoreDriver()
    with pytest.raises(InvalidRequest, match="urgency is 5; it must be from -4 to 4"):
        driver.add("a", [5], urgency=5)


# Sharing


@pytest.mark.parametrize("length", [64, 100, 301])
def test_equal_prompts_that_come_together_are_computed_once(lone, length):
    driver = CoreDriver(max_running=4, max_step_tokens=64)
    prompt = prompt_of(1, length)
    for name in "abcd":
        driver.add(name, prompt)
    driver.run()
    assert sum(reply.usage.computed_tokens for reply in driver.replies.values()) == length + 3
    assert {reply.token_ids for reply in driver.replies.values()} == {lone(prompt)}


def test_a_shared_beginning_is_computed_once_and_tails_apart(lone):
    driver = CoreDriver(max_running=4, max_step_tokens=64)
    prompts = [prompt_of(1, 200) + prompt_of(2 + i, 30) for i in range(4)]
    for i, prompt in enumerate(prompts):
        driver.add(str(i), prompt)
    driver.run()
    shared = 200 // 32 * 32
    assert sum(r.usage.computed_tokens for r in driver.replies.values()) == shared + 4 * (230 - shared)
    assert [driver.replies[str(i)].token_ids for i in range(4)] == [lone(prompt) for prompt in prompts]


def test_who_waits_for_another_goes_on_when_that_one_is_aborted(lone):
    driver = CoreDriver(max_running=4, max_step_tokens=32)
    prompt = prompt_of(1, 200)
    driver.add("a", prompt)
    driver.add("b", prompt)
    driver.step()
    driver.step()
    assert len(driver.scheduler.running) == 1
    driver.abort("a")
    driver.run()
    assert driver.replies["b"].usage.cached_tokens == 64
    assert driver.replies["b"].token_ids == lone(prompt)
    assert driver.is_clean()


def test_other_tenants_share_no_computing():
    driver = CoreDriver(max_running=4, max_step_tokens=64)
    for name in "ab":
        driver.add(name, prompt_of(1, 100), cache_namespace=name)
    driver.run()
    assert [reply.usage.computed_tokens for reply in driver.replies.values()] == [100, 100]


# Room


def small(num_blocks: int, **settings) -> CoreDriver:
    """A core whose cache has that many blocks, or a few more."""
    for kib in range(200, 2000, 10):
        try:
            driver = CoreDriver(kib << 10, **settings)
        except InvalidRequest:
            continue
        if driver.core._cache.plan.num_blocks >= num_blocks:
            return driver
    raise AssertionError("no budget is large enough")


def test_a_prompt_is_taken_in_when_all_of_it_fits_beside_those_that_are_half_read():
    driver = small(8, max_step_tokens=32)
    blocks = driver.core._cache.plan.num_blocks
    assert blocks < 12
    driver.add("a", prompt_of(1, 32 * 5))
    driver.add("b", prompt_of(2, 32 * 5))
    while True:
        driver.step()
        if "a" in driver.replies:
            break
        assert [s.state.request.request_id for s in driver.scheduler.running] == ["a"]
    driver.run()
    assert driver.scheduler.num_preempted == 0
    assert driver.is_clean()


def test_the_victim_is_who_loses_least_and_the_first_goes_on(lone):
    driver = small(16, max_running=3)
    blocks = driver.core._cache.plan.num_blocks
    sizes = (blocks // 2 * 32, 32 * 2, (blocks - blocks // 2 - 7) * 32)
    for seed, size in enumerate(sizes):
        driver.add(str(seed), prompt_of(seed, size), max_tokens=32 * 4)
    gave_up = []
    give_up = driver.scheduler._give_up
    driver.scheduler._give_up = lambda s: gave_up.append(s.state.request.request_id) or give_up(s)
    driver.run()
    assert gave_up
    assert gave_up[0] == str(min((1, 2), key=lambda seed: sizes[seed]))
    assert "0" not in gave_up
    for seed, size in enumerate(sizes):
        assert driver.replies[str(seed)].token_ids == lone(prompt_of(seed, size), 32 * 4)
    assert driver.is_clean()


# Failing


def failing(driver: CoreDriver, monkeypatch, guilty: int, when: int = 0) -> list[int]:
    """Makes every step fail that computes a token of a sequence whose first token is `guilty`, from `when` on."""
    run, sizes = driver.core._cache.runner.run, []

    def broken(chunks, rows):
        sizes.append(len(chunks))
        for chunk in chunks:
            ids = [*chunk.table.token_ids, *chunk.token_ids]
            if ids[0] == guilty and len(ids) > when:
                run(chunks, rows)  # half a step has left its traces
                raise RuntimeError("the machine is on fire")
        return run(chunks, rows)

    monkeypatch.setattr(driver.core._cache.runner, "run", broken)
    return sizes


@pytest.mark.parametrize("when", [0, 45, 64])
def test_a_failing_step_fails_the_guilty_request_only(lone, monkeypatch, when):
    driver = CoreDriver(max_running=4)
    prompts = [prompt_of(seed, 40 + seed) for seed in range(4)]
    sizes = failing(driver, monkeypatch, prompts[2][0], when)
    for seed, prompt in enumerate(prompts):
        driver.add(str(seed), prompt, max_tokens=60)
    driver.run()
    assert list(driver.errors) == ["2"]
    assert "on fire" in str(driver.errors["2"])
    for seed in (0, 1, 3):
        assert driver.replies[str(seed)].token_ids == lone(prompts[seed], 60)
    assert max(sizes) == 4
    assert driver.is_clean()


def test_suspects_are_tried_one_by_one_also_while_one_of_them_is_loading(lone, monkeypatch):
    driver = CoreDriver(max_running=4)
    prompts = [prompt_of(seed, 40 + seed) for seed in range(3)]
    sizes = failing(driver, monkeypatch, prompts[2][0])
    loads = []

    def load(load):
        """Keeps the first sequence waiting that starts again."""
        if not sizes or loads:
            return False
        loads.append(load)
        return True

    monkeypatch.setattr(driver.core._cache.tiers.tier, "load", load)
    for seed, prompt in enumerate(prompts):
        driver.add(str(seed), prompt, max_tokens=20)
    driver.run()
    assert list(driver.replies) == ["1"]
    assert list(driver.errors) == ["2"]
    assert max(sizes[1:]) == 1
    loads[0].deliver(loads[0], [], True)
    driver.core.wake()
    driver.run()
    assert list(driver.errors) == ["2"]
    for seed in (0, 1):
        assert driver.replies[str(seed)].token_ids == lone(prompts[seed], 20)
    assert driver.is_clean()


def test_a_machine_that_always_fails_fails_everybody(monkeypatch):
    driver = CoreDriver(max_running=4)

    def broken(chunks, rows):
        raise RuntimeError("the machine is on fire")

    monkeypatch.setattr(driver.core._cache.runner, "run", broken)
    for seed in range(6):
        driver.add(str(seed), prompt_of(seed, 40))
    driver.run(max_steps=20)
    assert sorted(driver.errors) == list("012345")
    assert driver.is_clean()


def test_what_fails_behind_the_model_fails_its_own_request_only(lone, monkeypatch):
    driver = CoreDriver(max_running=4)
    for seed in range(2):
        driver.add(str(seed), prompt_of(seed, 40), n=2 - seed, max_tokens=20)
    sequence = next(s for s in driver.scheduler.waiting if s.state.request.request_id == "0")
    push = type(sequence.detokenizer).push

    def broken(self, token):
        return 1 / 0 if self is sequence.detokenizer else push(self, token)

    monkeypatch.setattr(type(sequence.detokenizer), "push", broken)
    driver.run()
    assert isinstance(driver.errors["0"], ZeroDivisionError)
    assert driver.replies["1"].token_ids == lone(prompt_of(1, 40), 20)
    assert driver.is_clean()
