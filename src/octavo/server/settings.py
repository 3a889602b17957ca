"""Frozen settings of a server. Checked when made, never changed after."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How a server listens and what it lets in.

    Attributes:
        host: address to listen at.
        port: 0 takes a free one.
        max_body_bytes: of a request.
        max_requests: that are answered at once, with waiting ones and what is made in the background; more are told
            to come again.
        requests_per_minute: of one tenant; None does not limit them.
        origins: of web pages that may read answers; `*` stands for all.
        drain_s: seconds that running answers may take after the server was told to stop.
        max_kept: responses, and conversations, kept in memory to be asked for again; the longest unused go first.
        kept_bytes: of memory for responses, and as much for conversations, over all tenants.
        exact_history: answers that come back as text are read as the tokens that were generated.
        fim_tokens: before the prefix, the suffix and the middle of a text with a gap, for models that are not known.
        fim_order: in which they are written; see `FimOrder`. None takes the one that the model is known for.
        transcript_bytes: of memory for those tokens, over all tenants; the longest unused go first.
        max_loaded_bytes: of memory for loaded models, weights and budgets of caches; idle ones make room for others.
        keep_alive_s: a model that nobody has used for so long is unloaded; None keeps it while there is room.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = 32 << 20
    max_requests: int = 256
    requests_per_minute: int | None = None
    origins: tuple[str, ...] = ()
    drain_s: int = 30
    max_kept: int = 2000
    kept_bytes: int = 64 << 20
    exact_history: bool = True
    fim_tokens: tuple[str, ...] = ()
    fim_order: str | None = None
    transcript_bytes: int = 64 << 20
    max_loaded_bytes: int | None = None
    keep_alive_s: float | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("max_body_bytes", 1),
            ("max_requests", 1),
            ("drain_s", 0),
            ("transcript_bytes", 0),
            ("kept_bytes", 0),
        ):
            if getattr(self, name) < least:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; it must be at least {least}.")
        if self.keep_alive_s is not None and not self.keep_alive_s >= 0:
            raise InvalidRequest(f"keep_alive_s is {self.keep_alive_s}; it must be at least 0.")
        if self.requests_per_minute is not None and self.requests_per_minute < 1:
            raise InvalidRequest(f"requests_per_minute is {self.requests_per_minute}; it must be at least 1.")
        if not 0 <= self.port <= 65535:
            raise InvalidRequest(f"port is {self.port}; it must be from 0 to 65535.")
