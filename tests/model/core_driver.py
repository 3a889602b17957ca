"""An engine's core without its thread: the test says what comes when, and takes the steps."""

from __future__ import annotations

from collections import defaultdict

from families import tiny_loaded

from octavo.config import EngineConfig, SamplingParams
from octavo.engine.core import EngineCore
from octavo.engine.messages import Delta, Failure, Reply, Request
from octavo.errors import RequestTooLarge
from octavo.kv.storage.tier import NullTier


class CoreDriver:
    """A core over a tiny model; `replies`, `errors` and `tokens` by request, `order` of first tokens."""

    def __init__(self, budget_bytes: int = 8 << 20, **settings) -> None:
        settings = {"max_running": 4, "kv_format": "raw", "debug_fill": True, **settings}
        self.core = EngineCore(
            tiny_loaded("llama"), EngineConfig(**settings), budget_bytes, NullTier(), lambda work: work()
        )
        self.replies: dict[str, Reply] = {}
        self.errors: dict[str, Exception] = {}
        self.tokens: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.order: list[str] = []

    @property
    def scheduler(self):
        return self.core._scheduler

    @property
    def manager(self):
        return self.core._cache.manager

    def add(self, request_id: str, prompt, *, max_tokens: int = 4, **options) -> None:
        """A greedy request that goes past the end token; `options` are those of `SamplingParams` and `Request`."""
        names = SamplingParams.__dataclass_fields__
        sampling = {name: options.pop(name) for name in list(options) if name in names}
        params = SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **sampling})
        self.core.add(Request(request_id, tuple(prompt), params, **options))

    def add_if_it_fits(self, request_id: str, prompt, **options) -> bool:
        """`add`; False if the whole cache is too small for it, which is told at once."""
        try:
            self.add(request_id, prompt, **options)
        except RequestTooLarge:
            return False
        return True

    def abort(self, request_id: str) -> None:
        self._take(self.core.abort(request_id))

    def step(self) -> None:
        self._take(self.core.step())

    def run(self, max_steps: int = 2_000) -> None:
        """Steps until nothing is left. Fails if that takes more than `max_steps`."""
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"work is left after {max_steps} steps")

    def is_clean(self) -> bool:
        """Whether nothing is held, and the bookkeeping adds up."""
        self.core.check_integrity()
        return self.manager.num_used_blocks == self.manager.num_used_slots == 0

    def _take(self, events) -> None:
        for event in events:
            if isinstance(event, Failure):
                self.errors[event.request_id] = event.error
            if isinstance(event, Delta):
                if event.token_ids and event.request_id not in self.order:
                    self.order.append(event.request_id)
                self.tokens[event.request_id][event.index] += event.token_ids
                if event.reply is not None:
                    self.replies[event.request_id] = event.reply


def prompt_of(seed: int, length: int) -> list[int]:
    """Token ids that no other seed begins with."""
    return [(37 * seed + 11 * i * (seed + 1) + i * i) % 300 + 10 for i in range(length)]
