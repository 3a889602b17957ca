"""What Prometheus reads of an engine: its own counters, in its format."""

from __future__ import annotations

import asyncio
from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

from octavo.engine.counters import Counters
from octavo.engine.messages import MemoryReport
from octavo.server.metrics import Metrics


class Engine:
    num_sequences = (2, 3)

    def memory(self) -> MemoryReport:
        return MemoryReport(1, 2, 3, 4, 5, 6, 7, "int8")

    def counters(self) -> Counters:
        counters = Counters(num_steps=7, step_s=1.5, num_preempted=4, ended=Counter(stop=5, timeout=1))
        counters.gaps[0], counters.gaps[3], counters.gaps[-1] = 10, 5, 1
        counters.gap_s = 3.25
        counters.usage = {"memory": 0.25}
        return counters


def test_an_engines_counters_are_read() -> None:
    metrics = Metrics(lambda: {"tiny": Engine()}, lambda: 1)  # type: ignore[dict-item]
    text = asyncio.run(metrics.read()).decode()
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    model = ("model", "tiny")
    assert values["octavo_steps_total", model] == 7
    assert values["octavo_step_seconds_total", model] == 1.5
    assert values["octavo_preemptions_total", model] == 4
    assert values["octavo_answers_total", model, ("reason", "timeout")] == 1
    assert values["octavo_cache_usage_ratio", model, ("tier", "memory")] == 0.25
    assert values["octavo_inter_token_seconds_sum", model] == 3.25
    assert values["octavo_inter_token_seconds_count", model] == 16
    assert values["octavo_inter_token_seconds_bucket", ("le", "0.001"), model] == 10
    assert values["octavo_inter_token_seconds_bucket", ("le", "0.01"), model] == 15
    assert values["octavo_sequences", model, ("state", "waiting")] == 3
