"""The server's log: one JSON object a line on standard error. It never has keys, prompts or answers in it."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

logger = logging.getLogger("octavo.server")


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_to_stderr() -> None:
    """Sends the log of the server, of the engine and of uvicorn to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    for name, level in (("octavo", logging.INFO), ("uvicorn", logging.WARNING)):
        source = logging.getLogger(name)
        source.handlers, source.propagate = [handler], False
        source.setLevel(level)


def log(
    event: str, /, level: int = logging.INFO, *, error: BaseException | None = None, **fields: Any
) -> None:
    """Writes one line; `None` fields are left out."""
    kept = {name: value for name, value in fields.items() if value is not None}
    logger.log(level, event, extra={"fields": kept}, exc_info=error)
