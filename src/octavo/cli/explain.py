"""`octavo explain`: a tour of the cache on one short text, with the numbers of this very run."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.options import Model, Weights, WeightsOption
from octavo.cli.render import count, duration, size, table
from octavo.cli.terminal import Terminal
from octavo.cli.text import check_text
from octavo.models import catalog

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.engine.tour import Tour

_NUM_TOKENS = 40
_BAR = 24
_WIDTH = 100

Part = str | list[str]
"""A paragraph, or lines that stay as they are."""


def explain(
    model: Model,
    text: Annotated[
        str, typer.Option(metavar="TEXT", help="What the model reads, up to 31 tokens.")
    ] = "The capital of France is Paris, and the capital of Italy is",
    weights: WeightsOption = Weights.auto,
) -> None:
    """Show on a short text what a KV cache is: what is kept, how it is used, how it grows, and why it is exact.

    All numbers are read from the cache and from the layers while the model computes.
    """
    check_text(text)
    source = catalog.resolve(model)
    terminal = Terminal()
    with terminal.bars() as bars:
        bars("start", 0, None)
        from octavo.engine.tour import take_tour
        from octavo.models.load import load_model
        from octavo.models.prepare import resolve_dtype

        dtype = resolve_dtype("auto", weights=weights.value)
        loaded = load_model(source, dtype=dtype, weights=weights.value, progress=bars)
        tour = take_tour(loaded, loaded.tokenizer.encode(text), _NUM_TOKENS)

    def word(token_id: int) -> str:
        return repr(str(loaded.tokenizer.decode([token_id])))

    for number, (title, parts) in enumerate(_chapters(tour, word), 1):
        terminal.print(f"\n{number}. {title}")
        for part in parts:
            terminal.print("")
            lines = part if isinstance(part, list) else textwrap.wrap(part, _WIDTH)
            terminal.print("\n".join(f"   {line}".rstrip() for line in lines))


def _chapters(tour: Tour, word: Callable[[int], str]) -> list[tuple[str, list[Part]]]:
    return [
        ("Reading: prefill", _reading(tour, word)),
        ("What is kept", _kept(tour)),
        ("One more token: decode", _decoding(tour, word)),
        ("The notebook grows", _growing(tour)),
        ("Open and sealed blocks", _sealing(tour)),
        ("Asked again", _again(tour)),
        ("Why keys and values, and not the hidden state?", _hidden(tour)),
    ]


def _numbers(values: list[float]) -> str:
    return "[" + ", ".join(f"{value:.2f}" for value in values) + ", ...]"


def _reading(tour: Tour, word: Callable[[int], str]) -> list[Part]:
    first = tour.steps[0]
    words = " ".join(word(token) for token in tour.token_ids[: tour.num_prompt])
    return [
        f"The text is {count(tour.num_prompt, 'token')}: {words}",
        f"All of them are computed together, in one step of {duration(first.seconds)}. Each passes through "
        f"{count(tour.spec.num_layers, 'layer')}, and in each layer it leaves a key and a value. Only the last one's "
        "output is used, to choose the next token. (So that they can be watched, the layers run one by one in this "
        "tour, "
        "which is slower than usual.)",
    ]


def _kept(tour: Tour) -> list[Part]:
    page, layers = tour.spec.group.page, tour.spec.num_layers
    width = page.num_kv_heads * (page.head_dim + page.v_head_dim)
    same = "yes" if tour.is_stored else "no, which must not be; run octavo doctor with this model"
    return [
        f"Of a token: {layers} layers x {page.num_kv_heads} key-value heads x ({page.head_dim} numbers of a key + "
        f"{page.v_head_dim} of a value) = {layers * width:,} numbers. In {tour.spec.dtype} that is "
        f"{tour.spec.raw_bytes_per_token:,} bytes. The key of the first token in the first layer and head, as it "
        "lies in "
        "the cache:",
        [_numbers(tour.first_key[:6].tolist())],
        f"What the layers handed over and what the cache's memory holds are the same bits: {same}. The text itself "
        "is not "
        "in there, and neither are queries: a token's query is used once, when the token is computed.",
    ]


def _decoding(tour: Tour, word: Callable[[int], str]) -> list[Part]:
    attention, group = tour.attention, tour.spec.group
    step = next(step for step in tour.steps if len(step.token_ids) == 1)
    kept = attention.head // (group.num_heads // group.page.num_kv_heads)
    rows = [("TOKEN", "SCORE", "WEIGHT", "")]
    tokens = tour.token_ids[: len(attention.scores)]
    for token, score, weight in zip(
        tokens, attention.scores.tolist(), attention.weights.tolist(), strict=True
    ):
        rows.append((word(token), f"{score:.2f}", f"{weight:.1%}", "#" * round(weight * _BAR)))
    return [
        f"The model chose {word(step.token_ids[0])}. To go on, this one token is computed "
        f"({duration(step.seconds)}), and "
        f"the others are looked up. In layer {attention.layer + 1}, head {attention.head + 1} of {group.num_heads}, "
        "which "
        f"reads key-value head {kept + 1} of {group.page.num_kv_heads}, the new token's query",
        [_numbers(attention.query[:6].tolist())],
        "times each kept key is a score, and the scores become weights that add up to 1:",
        table(rows, right=(1, 2)),
        "The head's output is the sum of the kept values by these weights. Worked out here from the cache's bytes, it "
        f"differs from the kernel's by at most {attention.error:.1g}, a rounding of {tour.spec.dtype}.",
        f"So {count(len(tokens) - 1, 'token')} did not have to pass through the layers again. That is the whole trick.",
    ]


def _growing(tour: Tour) -> list[Part]:
    rows = [("TOKENS", "COMPUTED", "TIME", "OPEN ROWS", "SEALED BLOCKS", "CACHE")]
    wanted = {tour.num_prompt, tour.num_prompt + 1, 24, 31, 32, 33, tour.steps[-1].num_tokens}
    rows += [
        (
            f"{step.num_tokens:,}",
            f"{len(step.token_ids):,}",
            duration(step.seconds),
            f"{step.num_open_rows}",
            f"{step.num_sealed}",
            size(step.kv_used_bytes),
        )
        for step in tour.steps
        if step.num_tokens in wanted
    ]
    return [
        table(rows, right=range(6)),
        f"Every token adds the same: {tour.memory.kv_bytes_per_token:,} bytes once its block is sealed. Memory grows "
        "in a "
        "straight line with the text, and the time of a step hardly at all.",
    ]


def _sealing(tour: Tour) -> list[Part]:
    sealing = tour.sealing
    return [
        "The block that is being filled is open: its rows are kept raw. When its 32nd token is there, the block is "
        f"sealed: encoded once, in {tour.format}, and never written again. A layer's page of it took "
        f"{sealing.raw_bytes:,} bytes raw and takes {sealing.sealed_bytes:,} sealed. Its keys moved by at most "
        f"{sealing.error:.3g}, where the largest is {sealing.largest:.3g}.",
        "A token sees its own block raw and earlier blocks sealed, whoever computed them and when. So what it sees "
        "depends on its position alone, and a hit changes no bit of an answer.",
    ]


def _again(tour: Tour) -> list[Part]:
    usage = tour.again.usage
    return [
        f"The whole text, asked once more: {usage.cached_tokens:,} of {count(usage.prompt_tokens, 'token')} reused, "
        f"{usage.computed_tokens:,} computed, first token after {duration(tour.again.timings.ttft_s)}. The last "
        "token is "
        "always computed: its output chooses the next one, and outputs are not kept.",
        f"Held now: {size(tour.memory.kv_reusable_bytes)} of keys and values for the next time, beside "
        f"{size(tour.memory.weights_bytes)} of weights, which never change. Clearing the one leaves the other as it "
        "is.",
    ]


def _hidden(tour: Tour) -> list[Part]:
    page = tour.spec.group.page
    width = page.num_kv_heads * (page.head_dim + page.v_head_dim)
    gflop = 2e-9 * 1024 * tour.hidden_size * width * tour.spec.num_layers
    saves = "save" if tour.hidden_size < width else "not even save"
    return [
        f"A layer computes a token's key and value ({width:,} numbers here) from its hidden state "
        f"({tour.hidden_size:,} "
        f"numbers), so one could keep that instead. It would {saves} memory: {tour.hidden_size:,} numbers a layer in "
        "place "
        f"of {width:,}.",
        "But the keys and values of all earlier tokens would have to be computed from it again for every new token: "
        "for "
        f"1,024 tokens {gflop:.1f} GFLOP, just measured as {duration(tour.hidden_s)} on this machine, only to arrive "
        "at "
        "the numbers that are kept now. Models with latents (MLA) are built so that this step folds away: they keep "
        "one "
        "small vector for all heads.",
    ]
