"""What happens in the cache while a short text is read and continued, looked at step by step: for `octavo explain`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from octavo.config import EngineConfig, SamplingParams
from octavo.engine.core import EngineCore
from octavo.engine.messages import Delta, MemoryReport, Reply, Request
from octavo.errors import InvalidRequest, OctavoError
from octavo.formats.page_format import FORMATS
from octavo.kernels import AttentionKernels, AttentionStep, Scoring
from octavo.kernels.batch import AttentionBatch
from octavo.kv.storage.tier import NullTier
from octavo.models.loaded import LoadedModel
from octavo.spec import BLOCK_SIZE, CacheSpec

_BUDGET = 256 << 20


@dataclass(slots=True)
class Layer:
    """What one layer was given and gave in a step: `[rows, heads, dim]`, float32."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    scoring: Scoring


@dataclass(slots=True)
class Step:
    """One step: the tokens that it computed, its seconds, and what the cache held afterwards."""

    token_ids: list[int]
    seconds: float
    num_tokens: int
    num_sealed: int
    num_open_rows: int
    kv_used_bytes: int
    layers: list[Layer] = field(default_factory=list)


@dataclass(slots=True)
class Attention:
    """One head of the newest token against all that is kept, worked out from the cache's own bytes.

    `scores` and `weights` have one entry a token; `error` is how far the sum of weighted values is from what the
    engine's kernel gave.
    """

    layer: int
    head: int
    query: torch.Tensor
    scores: torch.Tensor
    weights: torch.Tensor
    error: float


@dataclass(slots=True)
class Sealing:
    """A block before and after: bytes of a layer's page, the largest difference of a key, and the largest key."""

    raw_bytes: int
    sealed_bytes: int
    error: float
    largest: float


@dataclass(slots=True)
class Tour:
    """All that was seen. `num_prompt` tokens were given."""

    token_ids: list[int]
    num_prompt: int
    spec: CacheSpec
    format: str
    hidden_size: int
    steps: list[Step]
    first_key: torch.Tensor
    is_stored: bool
    attention: Attention
    sealing: Sealing
    again: Reply
    memory: MemoryReport
    hidden_s: float


def take_tour(loaded: LoadedModel, token_ids: Sequence[int], num_tokens: int) -> Tour:
    """Reads a prompt, goes on until there are `num_tokens` tokens, and asks the same again.

    Raises:
        InvalidRequest: the prompt is not shorter than a block, or longer than the text is to be.
        UnsupportedModel: the model cannot be run.
    """
    num_prompt = len(token_ids)
    if not 2 <= num_prompt < BLOCK_SIZE or num_tokens <= BLOCK_SIZE:
        raise InvalidRequest(
            f"The tour takes a text of 2 to {BLOCK_SIZE - 1} tokens, which this is not: it has {num_prompt}."
        )
    core = EngineCore(
        loaded, EngineConfig(fuse=False, speculate="off"), _BUDGET, NullTier(), lambda work: work()
    )
    onlooker = _Onlooker(core.prepared.kernels)
    core.prepared.kernels = onlooker
    params = SamplingParams(max_tokens=num_tokens - num_prompt + 1, ignore_eos=True)
    core.add(Request("tour", tuple(token_ids), params))
    steps: list[Step] = []
    keys: list[torch.Tensor] = []
    attention, sealing, first_key, stored = None, None, None, True
    ids = list(token_ids)
    spec, page_format = core.prepared.spec, core.prepared.page_format
    middle = spec.num_layers // 2
    while len(ids) <= num_tokens:
        start = time.perf_counter()
        onlooker.layers = []
        made = [event for event in core.step() if isinstance(event, Delta)]
        seconds = time.perf_counter() - start
        sequence = next(iter(core._scheduler.running), None)
        layers, onlooker.layers = onlooker.layers, []
        if sequence is None or sequence.table is None or not made:
            break
        table, count = sequence.table, len(layers[0].key)
        steps.append(
            Step(
                ids[-count:],
                seconds,
                table.num_tokens,
                table.num_tokens // BLOCK_SIZE,
                table.num_tokens % BLOCK_SIZE,
                core.memory().kv_used_bytes,
                layers,
            )
        )
        keys.append(layers[middle].key)
        if table.num_tokens < BLOCK_SIZE:
            kept = [_open_page(core, table.slot, layer) for layer in range(spec.num_layers)]
            if first_key is None:
                first_key = kept[0][0][0, :, 0]
            stored = stored and torch.equal(
                kept[middle][0][:, :, table.num_tokens - count : table.num_tokens],
                layers[middle].key.permute(1, 2, 0),
            )
            if count == 1 and attention is None:
                attention = _most_telling(layers, kept, table.num_tokens)
        elif sealing is None:
            page = core._cache.runner.sealed.layers[middle]
            runner = core._cache.runner.sealed
            block = table.block_ids[0]
            at = block // runner.blocks_per_slab * runner.slab_bytes
            at += block % runner.blocks_per_slab * runner.page_bytes
            sealed, _ = page_format.decode(page[at : at + runner.page_bytes], spec.group.page)
            raw = torch.cat(keys)[:BLOCK_SIZE].permute(1, 2, 0)
            sealing = Sealing(
                spec.group.page.raw_bytes(spec.dtype),
                runner.page_bytes,
                float((sealed - raw).abs().max()),
                float(raw.abs().max()),
            )
        ids += [token for delta in made for token in delta.token_ids]
    core.abort("tour")
    core.add(Request("again", tuple(ids[:-1]), replace(params, max_tokens=1)))
    again = None
    while core.has_work and again is None:
        again = next((e.reply for e in core.step() if isinstance(e, Delta) and e.reply is not None), None)
    if attention is None or sealing is None or first_key is None or again is None:
        raise OctavoError("The model ended its text before the tour did. Give another text (--text).")
    return Tour(
        ids,
        num_prompt,
        spec,
        page_format.name,
        int(core.prepared.model.config.hidden_size),
        steps,
        first_key,
        stored,
        attention,
        sealing,
        again,
        core.memory(),
        _time_of_keys_from_hidden_states(spec, int(core.prepared.model.config.hidden_size)),
    )


class _Onlooker:
    """Kernels that note what each layer gave them."""

    def __init__(self, kernels: AttentionKernels) -> None:
        self._kernels = kernels
        self.layers: list[Layer] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def begin(self, batch: AttentionBatch) -> AttentionStep:
        step, layers = self._kernels.begin(batch), self.layers

        class Watched:
            @property
            def bytes_read(self) -> int:
                return step.bytes_read

            def attend(self, *given: Any) -> torch.Tensor:
                q, k, v, _, _, scoring = given
                out = step.attend(*given)
                layers.append(Layer(q.float(), k.float(), v.float(), out.float(), scoring))
                return out

        return Watched()


def _open_page(core: EngineCore, slot: int | None, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's keys `[heads, dim, 32]` and values `[heads, 32, dim]` of an open block, from the cache's memory."""
    assert slot is not None
    spec, opened = core.prepared.spec, core._cache.runner.opened
    start = opened.offset(slot)
    data = opened.layers[layer][start : start + spec.group.page.raw_bytes(spec.dtype)]
    return FORMATS[spec.dtype].decode(data.clone(), spec.group.page)


def _most_telling(
    layers: list[Layer], kept: list[tuple[torch.Tensor, torch.Tensor]], num_tokens: int
) -> Attention:
    """The head that looks most at a single token which is neither the first nor its own."""
    best: Attention | None = None
    most = -1.0
    for number, (layer, (keys, values)) in enumerate(zip(layers, kept, strict=True)):
        shared = layer.query.shape[1] // len(keys)
        for head in range(layer.query.shape[1]):
            query, own = layer.query[0, head], head // shared
            scores = layer.scoring.scale * (query @ keys[own, :, :num_tokens])
            if layer.scoring.softcap:
                scores = layer.scoring.softcap * torch.tanh(scores / layer.scoring.softcap)
            if layer.scoring.window:
                scores[: max(num_tokens - layer.scoring.window, 0)] = -torch.inf
            sinks = layer.scoring.sinks
            whole = scores if sinks is None else torch.cat((scores, sinks[head : head + 1]))
            weights = torch.softmax(whole, 0)[:num_tokens]
            telling = float(weights[1:-1].max()) if num_tokens > 2 else 0.0
            if telling > most:
                most = telling
                error = float((weights @ values[own, :num_tokens] - layer.out[0, head]).abs().max())
                best = Attention(number, head, query, scores, weights, error)
    assert best is not None
    return best


def _time_of_keys_from_hidden_states(spec: CacheSpec, hidden_size: int, num_tokens: int = 1024) -> float:
    """Seconds in which the keys and values of so many tokens are computed from hidden states, in all layers."""
    page = spec.group.page
    width = page.num_kv_heads * (page.head_dim + page.v_head_dim)
    states, weights = torch.randn(num_tokens, hidden_size), torch.randn(width, hidden_size)
    torch.nn.functional.linear(states, weights)
    start = time.perf_counter()
    for _ in range(spec.num_layers):
        torch.nn.functional.linear(states, weights)
    return time.perf_counter() - start
