"""An engine on a tiny random model, with prompts for it and their answers."""

from __future__ import annotations

from families import tiny_loaded

from octavo.engine.engine import TokenEngine

FIRST = list(range(10, 60))
SECOND = list(range(200, 290))


def make_engine(**settings) -> TokenEngine:
    settings = {"kv_memory": "64MiB", "debug_fill": True, **settings}
    return TokenEngine(tiny_loaded("llama"), **settings)
