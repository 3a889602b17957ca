"""Random operations on the cache, checked against the naive model after each."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from octavo.spec import BLOCK_SIZE as B

from .kv_model import NAMESPACES, NUM_SLOTS, Model, Sequence


@st.composite
def chunks(draw: st.DrawFn, max_size: int = 70) -> list[int]:
    """1 to 70 tokens of an alphabet of two, mostly alike, so that sequences often share their beginning."""
    token_ids = [draw(st.integers(0, 1))] * draw(st.integers(1, max_size))
    changed = draw(st.integers(0, 3 * max_size))
    if changed < len(token_ids):
        token_ids[changed] ^= 1
    return token_ids


class CacheMachine(RuleBasedStateMachine):
    """Drives a model with random operations, and checks everything after each."""

    collide = False
    by_value = False
    num_steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(collide=self.collide, by_value=self.by_value)
        CacheMachine.num_steps -= 1  # everything is checked once before the first operation

    def sequence(self, number: int) -> Sequence:
        return self.model.running[number % len(self.model.running)]

    def prompt(self, old: int | None, cut: int, chunk: list[int]) -> tuple[bytes, list[int]]:
        """A sequence that was seen before, up to `cut`, and new tokens."""
        seen = self.model.seen + [(seq.namespace, seq.token_ids) for seq in self.model.running]
        namespace, token_ids = (
            seen[old % len(seen)] if old is not None and seen else (NAMESPACES[cut % 2], [])
        )
        return namespace, token_ids[:cut] + chunk

    def teardown(self) -> None:
        for seq in list(self.model.running):
            self.model.free(seq)
        self.model.check()
        assert self.model.kv.num_used_blocks == self.model.kv.num_used_slots == 0
        self.model.clear()
        self.model.check()
        assert not self.model.kv.allocated_blocks()
        assert not self.model.kv.allocated_slots()

    @invariant()
    def everything_is_right(self) -> None:
        CacheMachine.num_steps += 1
        self.model.check()

    @precondition(lambda self: len(self.model.running) < NUM_SLOTS + 2)
    @rule(old=st.none() | st.integers(0, 99), cut=st.integers(0, 200), chunk=chunks(), fails=st.booleans())
    def start(self, old: int | None, cut: int, chunk: list[int], fails: bool) -> None:
        namespace, prompt = self.prompt(old, cut, chunk)
        seq = self.model.start(namespace, prompt)
        self.model.step([(seq, prompt[len(seq.token_ids) :], fails and cut % 4 == 0)])

    @precondition(lambda self: len(self.model.running) < NUM_SLOTS + 2)
    @rule(old=st.none() | st.integers(0, 99), cut=st.integers(0, 200), chunk=chunks(), answer=chunks())
    def whole_request(self, old: int | None, cut: int, chunk: list[int], answer: list[int]) -> None:
        namespace, prompt = self.prompt(old, cut, chunk)
        seq = self.model.start(namespace, prompt)
        for token_ids in (prompt[len(seq.token_ids) :], answer):
            self.model.step([(seq, token_ids, False)])
            self.model.keep_tail(seq)
        self.model.free(seq)

    @precondition(lambda self: self.model.running)
    @rule(batch=st.lists(st.tuples(st.integers(0, 9), chunks(), st.integers(0, 5)), min_size=1, max_size=4))
    def step(self, batch: list[tuple[int, list[int], int]]) -> None:
        chosen = {self.sequence(number): (chunk, fails == 5) for number, chunk, fails in batch}
        self.model.step([(seq, chunk, fails) for seq, (chunk, fails) in chosen.items()])

    @precondition(lambda self: self.model.running)
    @rule(number=st.integers(0, 9), token_ids=chunks(max_size=8), keep=st.booleans())
    def decode(self, number: int, token_ids: list[int], keep: bool) -> None:
        seq = self.sequence(number)
        for token_id in token_ids:
            self.model.step([(seq, [token_id], False)])
        if keep:
            self.model.keep_tail(seq)

    @precondition(lambda self: self.model.running)
    @rule(number=st.integers(0, 9), times=st.integers(1, 2))
    def fork(self, number: int, times: int) -> None:
        for _ in range(times):
            if len(self.model.running) < NUM_SLOTS + 2:
                self.model.fork(self.sequence(number))

    @precondition(lambda self: self.model.running)
    @rule(number=st.integers(0, 9), num_less=st.integers(0, 40), to_block_start=st.booleans())
    def truncate(self, number: int, num_less: int, to_block_start: bool) -> None:
        seq = self.sequence(number)
        num_tokens = max(0, len(seq.token_ids) - num_less)
        self.model.truncate(seq, num_tokens // B * B if to_block_start else num_tokens)

    @precondition(lambda self: self.model.running)
    @rule(number=st.integers(0, 9), chunk=chunks(), num_less=st.integers(0, 8))
    def go_on_and_back(self, number: int, chunk: list[int], num_less: int) -> None:
        seq = self.sequence(number)
        num_tokens = max(0, len(seq.token_ids) - num_less)
        self.model.keep_tail(seq)
        self.model.step([(seq, chunk, False)])
        self.model.truncate(seq, num_tokens)

    @precondition(lambda self: self.model.running)
    @rule(number=st.integers(0, 9))
    def keep_tail(self, number: int) -> None:
        self.model.keep_tail(self.sequence(number))

    @precondition(lambda self: self.model.running)
    @rule(number=st.integers(0, 9), keep=st.booleans())
    def free(self, number: int, keep: bool) -> None:
        seq = self.sequence(number)
        if keep:
            self.model.keep_tail(seq)
        self.model.free(seq)

    @rule(old=st.integers(0, 99), cut=st.integers(0, 200), chunk=chunks())
    def match(self, old: int, cut: int, chunk: list[int]) -> None:
        self.model.match(*self.prompt(old, cut, chunk))

    @precondition(lambda self: self.model.exact and self.model.seen)
    @rule(old=st.integers(0, 99), first=st.integers(0, 3))
    def forget_blocks(self, old: int, first: int) -> None:
        namespace, token_ids = self.model.seen[old % len(self.model.seen)]
        self.model.forget_blocks(namespace, token_ids, first, [])

    @precondition(lambda self: self.model.exact and self.model.running)
    @rule(numbers=st.lists(st.integers(0, 9), min_size=1, max_size=3), first=st.integers(0, 3))
    def forget_running(self, numbers: list[int], first: int) -> None:
        own = [self.sequence(number) for number in set(numbers)]
        own = [seq for seq in dict.fromkeys(own) if seq.namespace == own[0].namespace]
        self.model.forget_blocks(own[0].namespace, own[0].token_ids, first, own)

    @precondition(lambda self: self.model.published)
    @rule(namespace=st.sampled_from(NAMESPACES), sure=st.integers(0, 3))
    def forget(self, namespace: bytes, sure: int) -> None:
        if sure == 3:
            self.model.forget(namespace)

    @precondition(lambda self: self.model.published)
    @rule(sure=st.integers(0, 7))
    def clear(self, sure: int) -> None:
        if sure == 7:
            self.model.clear()


class CollidingCacheMachine(CacheMachine):
    """The same with hashes that collide all the time."""

    collide = True


class ByValueCacheMachine(CacheMachine):
    """The same with eviction by value."""

    by_value = True


def drive(machine: type[CacheMachine], num_steps: int) -> None:
    """Run a machine for at least `num_steps` operations, 50 or fewer in each example."""
    CacheMachine.num_steps = 0
    while CacheMachine.num_steps < num_steps:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=num_steps // 50,
                stateful_step_count=50,
                database=None,
                print_blob=True,
                suppress_health_check=list(HealthCheck),
            ),
        )


@pytest.mark.parametrize("machine", [CacheMachine, CollidingCacheMachine, ByValueCacheMachine])
def test_random_operations_agree_with_the_naive_model(machine: type[CacheMachine]) -> None:
    drive(machine, num_steps=1_500)
