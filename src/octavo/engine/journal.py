"""What became of the last requests: what each reused, from where, why not more, and how long it took."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from octavo.engine.messages import FinishReason, Reply, Timings, Usage, Why
from octavo.engine.why import no_cache, other_tenant, preempted, tell_why
from octavo.kv.explain import Miss
from octavo.spec import BLOCK_SIZE

if TYPE_CHECKING:
    from octavo.engine.sequence import RequestState
    from octavo.kv.manager import KVCacheManager

MAX_RECORDS = 256
_MAX_TENANTS = 64
_SETTLED_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A finished request.

    `tenant` is its `cache_namespace`, `finished_s` seconds since 1970, and `finish_reason` that of its first answer.
    Of the prompt's tokens `memory_tokens` were in memory, and `usage.loaded_tokens` came from disk.
    """

    request_id: str
    model: str
    tenant: str
    finished_s: float
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    why: Why | None

    @property
    def memory_tokens(self) -> int:
        return self.usage.cached_tokens - self.usage.loaded_tokens

    def as_dict(self) -> dict[str, Any]:
        """JSON values, for its tenant."""
        return {
            "request_id": self.request_id,
            "model": self.model,
            "finished_s": self.finished_s,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.usage.prompt_tokens,
            "memory_tokens": self.memory_tokens,
            "disk_tokens": self.usage.loaded_tokens,
            "computed_tokens": self.usage.computed_tokens,
            "completion_tokens": self.usage.completion_tokens,
            **asdict(self.timings),
            "why": None if self.why is None else asdict(self.why),
        }


class Journal:
    """The last requests of an engine, and the reason of each. What a tenant is told depends on its own requests only.

    Args:
        decode: makes text of token ids.
    """

    def __init__(
        self,
        model: str,
        manager: KVCacheManager,
        decode: Callable[[Sequence[int]], str],
        max_records: int = MAX_RECORDS,
    ) -> None:
        self._model = model
        self._manager = manager
        self._decode = decode
        self._records: deque[RequestRecord] = deque(maxlen=max_records)
        self._namespaces: OrderedDict[bytes, None] = OrderedDict()
        self._doubts: dict[str, RequestState] = {}
        self._for_operator: dict[str, Why] = {}

    def why(self, state: RequestState) -> Why | None:
        """The reason of a request that has ended, as its tenant may know it."""
        if not state.request.cache:
            return _no_cache(state)
        miss = state.miss
        if miss is not None and miss.cause == "new" and state.num_expired_tokens:
            miss = Miss("expired", miss.position, state.num_expired_tokens)
        why = tell_why(
            miss,
            state.request.token_ids,
            token_s=_token_s(state),
            decode=None if state.request.ephemeral else self._decode,
            elsewhere=state.elsewhere,
        )
        if state.again is not None and state.again[1] and (why is None or why.cause == "new"):
            return preempted(*state.again, _token_s(state))
        return why

    def note(self, state: RequestState, reply: Reply) -> None:
        """Take a finished request in; the oldest one is forgotten."""
        if len(self._records) == self._records.maxlen:
            self._drop(self._records[0].request_id)
        request = state.request
        self._records.append(
            RequestRecord(
                reply.request_id,
                self._model,
                request.cache_namespace,
                time.time(),
                reply.finish_reason,
                reply.usage,
                reply.timings,
                reply.why,
            )
        )
        if not request.cache:
            return
        self._namespaces[state.namespace] = None
        self._namespaces.move_to_end(state.namespace)
        if len(self._namespaces) > _MAX_TENANTS:
            self._namespaces.popitem(last=False)
        is_new = reply.why is not None and reply.why.cause == "new"
        if is_new and len(request.token_ids) > BLOCK_SIZE and len(self._namespaces) > 1:
            self._doubts[reply.request_id] = state

    def settle(self, limit: int = _SETTLED_AT_ONCE) -> None:
        """Look up, for `limit` requests at most, who else has computed what was new to its tenant.

        Not while the request runs: how long an answer takes must not depend on what others have asked.
        """
        for request_id in list(self._doubts)[:limit]:
            state = self._doubts.pop(request_id)
            ids = state.request.token_ids
            known = max(
                self._manager.match_prefix(ids, namespace=namespace).num_tokens
                for namespace in self._namespaces
                if namespace != state.namespace
            )
            if known >= BLOCK_SIZE:
                self._for_operator[request_id] = other_tenant(known, _token_s(state))

    def recent(self, limit: int | None = None, tenant: str | None = None) -> list[RequestRecord]:
        """The last requests, the latest first: those of a tenant, or all.

        All come with what only the operator may know, and without the text of differences, which is the tenants' own.
        """
        found = [record for record in reversed(self._records) if tenant in (None, record.tenant)][:limit]
        if tenant is not None:
            return found
        self.settle(MAX_RECORDS)
        return [replace(record, why=self._for_all(record)) for record in found]

    def _for_all(self, record: RequestRecord) -> Why | None:
        why = self._for_operator.get(record.request_id, record.why)
        return why if why is None or why.difference is None else replace(why, difference=None)

    def forget(self, tenant: str) -> None:
        """Drop what is noted of a tenant."""
        for record in [record for record in self._records if record.tenant == tenant]:
            self._records.remove(record)
            self._drop(record.request_id)

    def _drop(self, request_id: str) -> None:
        self._doubts.pop(request_id, None)
        self._for_operator.pop(request_id, None)


def _token_s(state: RequestState) -> float:
    """Seconds in which the request's prompt was read, by token that was computed."""
    return state.timings().prefill_s / max(state.num_prompt_tokens - state.num_cached_tokens, 1)


def _no_cache(state: RequestState) -> Why:
    usage = state.usage()
    num_once = usage.prompt_tokens + max(usage.completion_tokens - 1, 0)
    num_again = max(usage.computed_tokens - num_once, 0)
    return no_cache(state.timings().total_s * num_again / max(usage.computed_tokens, 1))
