"""What goes between the server and an engine's process, without either."""

from __future__ import annotations

import pickle
import signal
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

import octavo.kernels.native
import octavo.kv.integrity  # noqa: F401 (their errors are tested too)
from octavo.config import SamplingParams
from octavo.engine.messages import Delta, Event, Failure, Progress, TokenLogprob
from octavo.errors import EngineStopped, InvalidRequest, NotEnoughMemory, OctavoError, PromptTooLong
from octavo.server.problems import problem_of
from octavo.server.remote.process import how_it_ended
from octavo.server.remote.wire import Channel, Ended, pack_event, portable, unpack_events


def classes(of: type[OctavoError]) -> Iterator[type[OctavoError]]:
    yield of
    for below in of.__subclasses__():
        yield from classes(below)


ERRORS = list(dict.fromkeys(classes(OctavoError)))


def made(kind: type[OctavoError]) -> OctavoError:
    error = (
        PromptTooLong(1200, 512, "Say less.")
        if kind is PromptTooLong
        else kind(f"{kind.__name__} of a test.")
    )
    error.add_note("Where it came from.")
    return error


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_is_the_same_on_the_other_side(kind: type[OctavoError]) -> None:
    error = made(kind)
    again = pickle.loads(pickle.dumps(portable(error)))
    assert type(again) is kind
    assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))
    assert problem_of(again) == problem_of(error)


def test_there_are_errors_of_every_kind() -> None:
    assert {PromptTooLong, NotEnoughMemory, EngineStopped} < set(ERRORS)
    assert len(ERRORS) >= 15


class Foreign(Exception):
    """As of a library that the server does not load."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} is not {two}")


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (Foreign(1, 2), RuntimeError, "Foreign: 1 is not 2"),
        (KeyError("a"), KeyError, "'a'"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"), UnicodeDecodeError, "'utf-8' codec"),
        (ValueError(threading.Lock()), RuntimeError, "ValueError: <unlocked"),
        (KeyboardInterrupt(), RuntimeError, "KeyboardInterrupt: "),
    ],
)
def test_other_errors_come_as_what_the_server_knows(error: BaseException, kind: type, said: str) -> None:
    try:
        raise error
    except BaseException as raised:
        again = pickle.loads(pickle.dumps(portable(raised)))
    assert type(again) is kind
    assert str(again).startswith(said)
    assert "test_remote.py" in again.__notes__[0]


def test_the_cause_of_an_end_stands_in_the_notes() -> None:
    error = EngineStopped("The engine does not run any more.")
    error.__cause__ = RuntimeError("a bug")
    again = pickle.loads(pickle.dumps(portable(error)))
    assert "RuntimeError: a bug" in again.__notes__[0]


def test_settings_of_sampling_are_the_same_on_the_other_side() -> None:
    params = SamplingParams(temperature=0.5, logit_bias={3: -1.5}, stop="x", n=2, best_of=3, seed=7)
    again = pickle.loads(pickle.dumps(params))
    assert again == params
    with pytest.raises(TypeError):
        again.logit_bias[3] = 0.0


names = st.text("request-0123456789", max_size=12)
logprobs = st.builds(TokenLogprob, st.integers(0, 9), st.floats(-9, 0), st.just(((1, -0.5),)))
deltas = st.builds(
    Delta,
    names,
    st.integers(0, 9),
    st.text(),
    st.lists(st.integers(0, 1 << 20)).map(tuple),
    st.lists(logprobs, max_size=2).map(tuple),
    st.sampled_from([None, "stop", "length", "abort"]),
    st.none(),
    st.one_of(st.none(), st.text(), st.integers(0, 9)),
    st.integers(0, 1 << 20),
)
failures = st.builds(Failure, names, st.just(InvalidRequest("No.")))


@given(st.lists(st.one_of(deltas, st.builds(Progress, names, st.integers(), st.integers()), failures)))
def test_events_are_the_same_on_the_other_side(events: list[Event]) -> None:
    ends = socket.socketpair()
    here, there = map(Channel, ends)
    here.send("events", [pack_event(event) for event in events])
    kind, packed = there.receive()
    here.close()
    with pytest.raises(Ended):
        there.receive()
    with pytest.raises(Ended):
        there.send("nobody hears this", bytes(1 << 22))
    there.close()
    assert kind == "events"
    found = unpack_events(packed)
    assert [event for event in found if not isinstance(event, Failure)] == [
        event for event in events if not isinstance(event, Failure)
    ]
    assert [str(event.error) for event in found if isinstance(event, Failure)] == [
        "No." for event in events if isinstance(event, Failure)
    ]


def test_a_message_that_is_cut_short_is_none() -> None:
    here, there = socket.socketpair()
    channel = Channel(there)
    here.sendall(b"\x10" + bytes(7) + b"only a part")
    here.close()
    with pytest.raises(Ended):
        channel.receive()
    channel.close()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (3, "exit code 3"),
        (-signal.SIGKILL, "SIGKILL, which the system sends when memory runs out"),
        (-signal.SIGSEGV, "SIGSEGV"),
        (-63, "signal 63"),
    ],
)
def test_the_end_of_a_process_is_a_sentence(code: int, said: str) -> None:
    assert said in how_it_ended(code)
    assert "Start the server again" in how_it_ended(code)
