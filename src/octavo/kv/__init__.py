"""Floor 3: the cache's bookkeeping. Token ids in, block and slot ids out; no tensors, no requests."""

from octavo.kv.eviction import LRU, EvictionPolicy
from octavo.kv.explain import Miss, MissCause
from octavo.kv.hashing import ROOT_HASH, block_hash, namespace_key
from octavo.kv.integrity import IntegrityError
from octavo.kv.manager import KVCacheManager
from octavo.kv.table import BlockTable, PrefixMatch, StepPlan
from octavo.kv.value import ByValue

__all__ = [
    "LRU",
    "ROOT_HASH",
    "BlockTable",
    "ByValue",
    "EvictionPolicy",
    "IntegrityError",
    "KVCacheManager",
    "Miss",
    "MissCause",
    "PrefixMatch",
    "StepPlan",
    "block_hash",
    "namespace_key",
]
