"""Turns of a patient thread beside a busy one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from octavo.kv.storage.turns import Turns

LONG_S = 30.0


class Worker:
    """A patient thread that notes each turn it takes; it ends one when it is let."""

    def __init__(self, turns: Turns, patience_s: float = LONG_S) -> None:
        self.taken, self.let = threading.Semaphore(0), threading.Semaphore(0)
        self._turns, self._patience_s, self._stopped = turns, patience_s, False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._turns.take(self._patience_s)
            if self._stopped:
                return
            self.taken.release()
            self.let.acquire()
            self._turns.end()

    def stop(self) -> None:
        self._stopped = True
        self._turns.rest()
        self.let.release()
        self._thread.join(LONG_S)
        assert not self._thread.is_alive()


@pytest.fixture
def turns() -> Turns:
    turns = Turns()
    turns.give(0.0)  # from here on the busy thread is busy
    return turns


@pytest.fixture
def worker(turns: Turns) -> Iterator[Worker]:
    worker = Worker(turns)
    yield worker
    worker.stop()


def until_wanted(turns: Turns) -> None:
    while not turns._wanted:
        time.sleep(0.001)


def test_nobody_waits_for_a_turn_that_nobody_wants() -> None:
    turns = Turns()
    assert turns.are_free
    turns.give(LONG_S)  # returns at once, or the test would not end
    assert not turns.are_free


def test_a_turn_is_waited_for_until_it_ends(turns: Turns, worker: Worker) -> None:
    until_wanted(turns)
    assert not worker.taken.acquire(timeout=0.02), "there is no turn yet"
    for _ in range(3):
        until_wanted(turns)
        worker.let.release()  # it ends as soon as it has begun
        turns.give(LONG_S)
        assert worker.taken.acquire(timeout=LONG_S)
        assert not worker.taken.acquire(timeout=0.02), "one turn is one turn"


def test_a_long_turn_is_not_waited_for(turns: Turns, worker: Worker) -> None:
    until_wanted(turns)
    turns.give(0.001)
    assert worker.taken.acquire(timeout=LONG_S)
    turns.give(LONG_S)  # the worker is still in its turn and wants no other
    worker.let.release()


def test_there_are_as_many_turns_as_are_wanted_while_the_busy_thread_rests(
    turns: Turns, worker: Worker
) -> None:
    until_wanted(turns)
    turns.rest()
    for _ in range(5):
        assert worker.taken.acquire(timeout=LONG_S)
        worker.let.release()
    assert worker.taken.acquire(timeout=LONG_S)
    turns.give(0.0)
    worker.let.release()
    until_wanted(turns)
    assert not worker.taken.acquire(timeout=0.02)


def test_patience_ends(turns: Turns) -> None:
    worker = Worker(turns, patience_s=0.01)
    assert worker.taken.acquire(timeout=LONG_S)
    worker.stop()
