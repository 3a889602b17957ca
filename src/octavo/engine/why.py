"""Why a prompt was not reused whole, as a sentence for a person."""

from __future__ import annotations

from octavo.engine.messages import Why
from octavo.kv.explain import Miss
from octavo.spec import BLOCK_SIZE


def tell_why(miss: Miss | None, caches: bool) -> Why | None:
    """The reason in a reply, or None when all that could be known was reused."""
    if not caches:
        return Why("no_cache", 0, 0, "The cache is switched off: every token is computed at every step.")
    if miss is None or (miss.cause == "new" and miss.position > 0):
        return None
    position, known = miss.position, miss.num_known_tokens
    tokens = f"{known:,} token{'s' if known != 1 else ''}"
    message = {
        "new": "Nothing that begins like this prompt was computed before.",
        "below_one_block": f"{tokens} from position {position:,} were computed before, but a block of {BLOCK_SIZE} "
        "is shared only when it is full, and the raw rows of its beginning have left memory.",
        "changed_token": f"The prompt differs from the most similar earlier one at position {position + known:,}; "
        f"the {tokens} before it, from position {position:,}, lie in the block that changed.",
        "evicted": f"{tokens} from position {position:,} were computed before and have left memory for others.",
        "cleared": f"{tokens} from position {position:,} were computed before the cache was cleared.",
    }[miss.cause]
    return Why(miss.cause, position, known, message)
