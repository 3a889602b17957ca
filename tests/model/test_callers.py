"""What callers get and do: streams, aborts, futures that are cancelled, failures of their own, an engine that ends."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest
from tiny_engine import FIRST, SECOND, make_engine

from octavo.engine.messages import Delta, Failure, Progress
from octavo.errors import EngineError, EngineStopped


def test_stream_pieces_make_the_reply(engine):
    deltas = [
        e for e in engine.stream(FIRST, max_tokens=20, ignore_eos=True, logprobs=3) if isinstance(e, Delta)
    ]
    reply = deltas[-1].reply
    assert "".join(d.text for d in deltas) == reply.text
    assert tuple(t for d in deltas for t in d.token_ids) == reply.token_ids
    assert [d.reply for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert len(reply.choices[0].logprobs) == 20
    for token, logprob in zip(reply.token_ids, reply.choices[0].logprobs, strict=True):
        assert logprob.token_id == token == logprob.top[0][0]
        assert len(logprob.top) == 3
        assert logprob.logprob <= 0


def test_astream(engine, expected):
    async def collect():
        return [event async for event in engine.astream(FIRST, max_tokens=40, ignore_eos=True)]

    events = asyncio.run(collect())
    assert events[-1].reply.token_ids == expected[tuple(FIRST)]


def test_abort_frees_and_keeps_what_is_reusable(engine):
    engine.clear()
    stream = engine.stream(SECOND, max_tokens=300, ignore_eos=True)
    first = next(stream)
    assert isinstance(first, Delta | Progress)
    stream.close()
    reply = engine.generate(SECOND, max_tokens=1)  # runs after the abort
    assert reply.usage.cached_tokens == 89
    assert engine.memory().kv_used_bytes == 0
    engine.check_integrity()


@pytest.mark.parametrize("how", ["closed", "dropped", "closed by contextlib"])
def test_a_stream_that_nobody_has_begun_to_read_is_aborted_too(engine, how):
    stream = engine.stream(SECOND, max_tokens=400, ignore_eos=True)
    if how == "closed":
        stream.close()
        stream.close()
        assert list(stream) == []
    elif how == "closed by contextlib":
        with contextlib.closing(stream):
            pass
    else:
        del stream
    assert engine.memory().kv_used_bytes == 0
    assert engine.num_sequences == (0, 0)
    assert not engine._sinks


def test_closing_a_stream_wakes_the_thread_that_reads_it(engine):
    go_on = threading.Event()
    stream = engine.stream(SECOND, max_tokens=1)
    while not isinstance(next(stream), Delta):
        pass
    assert next(stream, None) is None, "it has ended by itself"
    stream = engine.stream(SECOND, max_tokens=400, ignore_eos=True)
    engine._thread.post(go_on.wait)
    reader = threading.Thread(target=lambda: list(stream))
    reader.start()
    stream.close()
    reader.join(60)
    go_on.set()
    assert not reader.is_alive()


def test_abort_by_id_ends_the_stream(engine):
    stream = engine.stream(SECOND, max_tokens=400, ignore_eos=True)
    first = next(stream)
    engine.abort(first.request_id)
    last = list(stream)[-1]
    assert last.finish_reason == "abort"
    assert last.reply.finish_reason == "abort"


def test_a_prefetch_that_is_cancelled_ends_and_harms_nobody(engine, expected):
    engine.clear()
    go_on = threading.Event()
    engine._thread.post(go_on.wait)
    ahead = engine.prefetch(SECOND)
    assert ahead.cancel()
    go_on.set()
    reply = engine.generate(SECOND, max_tokens=40, ignore_eos=True)
    assert reply.token_ids == expected[tuple(SECOND)]
    assert reply.usage.cached_tokens == 0, "nothing of it was computed"
    assert not engine._sinks


def test_a_callers_own_failure_ends_its_request_only(engine, expected, caplog):
    def broken(event):
        raise ValueError("the caller is on fire")

    engine.submit("broken", SECOND, None, {"max_tokens": 400, "ignore_eos": True}, sink=broken).result(60)
    assert engine.generate(FIRST, max_tokens=40, ignore_eos=True).token_ids == expected[tuple(FIRST)]
    assert "on fire" in caplog.text
    assert engine.memory().kv_used_bytes == 0
    assert not engine._sinks


def test_whoever_waits_is_told_of_the_end_whatever_becomes_of_the_others():
    engine = make_engine()
    heard = []

    def broken(event):
        if isinstance(event, Failure):
            raise ValueError("the caller is on fire")

    options = {"max_tokens": 400, "ignore_eos": True}
    engine.submit("broken", FIRST, None, options, sink=broken).result(60)
    engine.submit("whole", SECOND, None, options, sink=heard.append).result(60)
    go_on = threading.Event()
    engine._thread.post(go_on.wait)
    ahead = [engine.prefetch(SECOND[number:]) for number in range(2)]
    ahead[0].cancel()
    engine._thread.post(None)  # as `close` does
    go_on.set()
    engine.close()
    assert isinstance(heard[-1], Failure)
    assert isinstance(ahead[1].exception(0), EngineStopped)


def test_a_closed_engine_says_so_and_running_streams_end():
    engine = make_engine()
    stream = engine.stream(FIRST, max_tokens=400, ignore_eos=True)
    next(stream)
    engine.close()
    engine.close()
    with pytest.raises(EngineStopped):
        list(stream)
    with pytest.raises(EngineStopped, match="closed"):
        engine.generate(FIRST)


def test_a_dead_thread_is_reported(monkeypatch):
    engine = make_engine()

    def die():
        raise SystemError("gone")

    monkeypatch.setattr(engine._core, "step", die)
    with pytest.raises(EngineStopped, match="gone") as waited:
        engine.generate(FIRST)
    with pytest.raises(EngineStopped, match="gone") as asked:
        engine.memory()
    for caught in (waited, asked):
        assert isinstance(caught.value.__cause__, SystemError)


def test_the_engines_own_thread_does_not_wait_for_itself(engine):
    raised = []

    def ask():
        with pytest.raises(EngineError, match="wait for itself") as caught:
            engine.memory()
        raised.append(caught)

    engine._thread.post(ask)
    engine.memory()
    assert raised
