"""What can never be answered is refused before anything is computed."""

from __future__ import annotations

import math

from octavo.engine.messages import MAX_URGENCY, Request
from octavo.errors import InvalidRequest


def check_request(request: Request, *, vocab_size: int, max_running: int) -> None:
    """Raises InvalidRequest if a request contradicts itself, the model or the engine's settings."""
    if not request.token_ids:
        raise InvalidRequest("The prompt is empty: it needs at least one token.")
    bad = [token for token in request.token_ids if not 0 <= token < vocab_size]
    if bad:
        raise InvalidRequest(f"The prompt has token id {bad[0]}; this model has ids 0 to {vocab_size - 1}.")
    params = request.params
    if params.width > max_running:
        name = next(name for name in ("n", "best_of", "beams") if getattr(params, name) == params.width)
        raise InvalidRequest(
            f"{name} is {params.width} and at most {max_running} answers run at once (max_running)."
        )
    if request.timeout_s is not None and not 0 < request.timeout_s < math.inf:
        raise InvalidRequest(f"timeout_s is {request.timeout_s}; it must be above 0.")
    if not -MAX_URGENCY <= request.urgency <= MAX_URGENCY:
        raise InvalidRequest(
            f"urgency is {request.urgency}; it must be from {-MAX_URGENCY} to {MAX_URGENCY}."
        )
    if request.reuse not in ("exact", "approximate"):
        raise InvalidRequest(f"reuse is {request.reuse!r}; it must be exact or approximate.")
    if request.reuse == "approximate" and (not request.cache or request.retention.pin is not None):
        raise InvalidRequest(
            "reuse is approximate, which needs the cache and keeps nothing. Leave pin out, and cache on."
        )
