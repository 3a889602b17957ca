"""What Prometheus reads at `/metrics`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.engine.counters import GAP_BOUNDS_S, Counters
from octavo.engine.messages import Reply
from octavo.errors import EngineStopped

if TYPE_CHECKING:
    from octavo.server.engines import ServedEngine

_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_POSITIONS = (0, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class Metrics:
    """Counters of one server.

    Args:
        engines: by the name of the model; asked at every reading.
        num_open: requests that are being answered.
    """

    def __init__(self, engines: Callable[[], dict[str, ServedEngine]], num_open: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_State(engines, num_open))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"octavo_{name}", text, labels, registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"octavo_{name}", text, ("model",), registry=self._registry, buckets=buckets)

        self.requests = counter("requests", "HTTP requests that were answered", "method", "status")
        self.gone = counter("requests_gone", "Requests whose client closed the connection before the end")
        self._queries = counter("cache_query_tokens", "Prompt tokens looked for in the cache", "model")
        self._hits = counter("cache_hit_tokens", "Prompt tokens found in the cache", "model")
        self._computed = counter("prefill_tokens", "Prompt tokens that were computed", "model")
        self._generated = counter("decode_tokens", "Tokens that were generated", "model")
        self._replies = counter("replies", "Prompts that were answered to the end", "model")
        self._why = counter(
            "recomputed_replies", "Answers whose prompt was not reused whole, by cause", "model", "cause"
        )
        self._recomputed = counter(
            "recomputed_tokens", "Known tokens that were computed again, by cause", "model", "cause"
        )
        self._differs = Histogram(
            "octavo_first_difference_position",
            "Token of a prompt that first differs from what was known, or that had to be computed again, by cause",
            ("model", "cause"),
            registry=self._registry,
            buckets=_POSITIONS,
        )
        self._histories = counter("histories", "Chats by how their history was read", "model", "history")
        self._first = histogram("first_token_seconds", "From the request to its first token", _FIRST_TOKEN_S)
        self._queue = histogram("queue_seconds", "From the request to its first step", _FIRST_TOKEN_S)

    def note(self, model: str, reply: Reply, history: str | None) -> None:
        """Counts an answer."""
        usage, timings = reply.usage, reply.timings
        self._queries.labels(model).inc(usage.prompt_tokens)
        self._hits.labels(model).inc(usage.cached_tokens)
        self._computed.labels(model).inc(usage.computed_tokens)
        self._generated.labels(model).inc(usage.completion_tokens)
        self._replies.labels(model).inc()
        if reply.why is not None:
            self._why.labels(model, reply.why.cause).inc()
            self._recomputed.labels(model, reply.why.cause).inc(reply.why.num_recomputed_tokens)
            differs = reply.why.difference
            position = reply.why.position if differs is None else differs.position
            self._differs.labels(model, reply.why.cause).observe(position)
        if history is not None:
            self._histories.labels(model, history).inc()
        self._first.labels(model).observe(timings.ttft_s)
        self._queue.labels(model).observe(timings.queue_s)

    async def read(self) -> bytes:
        """All of it, in Prometheus' text format."""
        num_tasks = len(asyncio.all_tasks())
        text = await asyncio.to_thread(generate_latest, self._registry)
        return text + (
            b"# HELP octavo_tasks Tasks of the event loop\n# TYPE octavo_tasks gauge\n"
            b"octavo_tasks %d\n" % num_tasks
        )


class _State(Collector):
    """What is so now, asked when it is read."""

    def __init__(self, engines: Callable[[], dict[str, ServedEngine]], num_open: Callable[[], int]) -> None:
        self._engines = engines
        self._num_open = num_open

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("octavo_requests_open", "Requests that are being answered", self._num_open())
        sequences = GaugeMetricFamily("octavo_sequences", "Answers in the engine", labels=("model", "state"))
        held = GaugeMetricFamily(
            "octavo_memory_bytes",
            "Bytes by what holds them; the cache apart from the weights",
            labels=("model", "of"),
        )
        done: dict[str, Counters] = {}
        for name, engine in self._engines().items():
            try:
                report, counters = engine.memory(), engine.counters()
                running, waiting = engine.num_sequences
            except EngineStopped:
                continue
            done[name] = counters
            sequences.add_metric((name, "running"), running)
            sequences.add_metric((name, "waiting"), waiting)
            for of in ("weights", "kv_used", "kv_reusable", "kv_allocated", "kv_budget", "workspace"):
                held.add_metric((name, of), getattr(report, f"{of}_bytes"))
        yield sequences
        yield held
        yield from _done(done)


def _done(by_model: Mapping[str, Counters]) -> Iterator[Metric]:
    """What the engines have done since their start."""
    for name, text, attribute in (
        ("steps", "Steps of the engine", "num_steps"),
        ("failed_steps", "Steps that failed", "num_failed_steps"),
        ("step_seconds", "Time spent in steps", "step_s"),
        ("step_prefill_tokens", "Tokens of prompts that steps computed", "num_read_tokens"),
        ("step_decode_tokens", "Tokens of answers that steps computed", "num_decoded_tokens"),
        ("drafted_tokens", "Guessed tokens that steps checked", "num_drafted_tokens"),
        ("preemptions", "Places given up for want of memory", "num_preempted"),
        ("evictions", "Blocks whose memory was taken for others", "num_evicted"),
        ("demotions", "Blocks and tails written to the disk", "num_demoted"),
        ("restores", "Blocks and tails loaded from the disk", "num_restored"),
    ):
        family = CounterMetricFamily(f"octavo_{name}", text, labels=("model",))
        for model, one in by_model.items():
            family.add_metric((model,), getattr(one, attribute))
        yield family
    for name, text, label, attribute in (
        ("requests_refused", "Requests refused at once, by error", "error", "refused"),
        ("requests_failed", "Requests that failed, by error", "error", "failed"),
        ("answers", "Answers that ended, by reason", "reason", "ended"),
    ):
        family = CounterMetricFamily(f"octavo_{name}", text, labels=("model", label))
        for model, one in by_model.items():
            for key, count in getattr(one, attribute).items():
                family.add_metric((model, key), count)
        yield family
    usage = GaugeMetricFamily(
        "octavo_cache_usage_ratio", "Share of a tier's budget in use", labels=("model", "tier")
    )
    gaps = HistogramMetricFamily(
        "octavo_inter_token_seconds", "Between two tokens of an answer", labels=("model",)
    )
    for model, one in by_model.items():
        for tier, share in one.usage.items():
            usage.add_metric((model, tier), share)
        bounds = [*map(str, GAP_BOUNDS_S), "+Inf"]
        gaps.add_metric((model,), list(zip(bounds, accumulate(one.gaps), strict=True)), one.gap_s)
    yield usage
    yield gaps
