"""Octavo: an inference engine whose key-value cache is the centre.

from octavo import Engine

with Engine("smollm2") as engine:
    chat = engine.conversation(system="You are brief.")
    print(chat.ask("What is an octavo?").text)
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from octavo.config import EngineConfig, SamplingParams
from octavo.errors import OctavoError, UserError

if TYPE_CHECKING:
    from octavo.engine.journal import RequestRecord
    from octavo.engine.messages import Delta, MemoryReport, Progress, Reply, Usage, Why
    from octavo.models.loaded import LoadedModel
    from octavo.sessions.conversation import Conversation
    from octavo.sessions.engine import Engine

__version__ = "0.1.0"

# A thread that waits for the others of a step spins for about 0.5 ms before it sleeps, instead of some 3: between two
# steps its processor is then there for what runs beside the engine. OpenMP's runtime reads this when it is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "50000")

# Loaded on first use, so that `import octavo` does not load torch.
_LAZY = {
    "Conversation": "octavo.sessions.conversation",
    "Delta": "octavo.engine.messages",
    "Engine": "octavo.sessions.engine",
    "LoadedModel": "octavo.models.loaded",
    "MemoryReport": "octavo.engine.messages",
    "Progress": "octavo.engine.messages",
    "Reply": "octavo.engine.messages",
    "RequestRecord": "octavo.engine.journal",
    "Usage": "octavo.engine.messages",
    "Why": "octavo.engine.messages",
}

__all__ = [
    "Conversation",
    "Delta",
    "Engine",
    "EngineConfig",
    "LoadedModel",
    "MemoryReport",
    "OctavoError",
    "Progress",
    "Reply",
    "RequestRecord",
    "SamplingParams",
    "Usage",
    "UserError",
    "Why",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
