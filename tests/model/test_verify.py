"""What formats cost: the figures are those of a computation by hand, and depend on the format alone."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import tiny_loaded, tiny_model, tiny_tokenizer
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import eager_attention_forward

from octavo.engine import lockstep
from octavo.engine import verify as verify_module
from octavo.engine.runner import Chunk, Runner
from octavo.engine.verify import FormatScore, VerifySettings, default_text, recommend, verify
from octavo.errors import InvalidRequest, NotEnoughMemory, NumericalError
from octavo.formats import FORMATS
from octavo.models import prepare
from octavo.spec import PageShape

TEXT = default_text()[:6000]  # a token a byte
FIGURES = (
    "perplexity",
    "reference_perplexity",
    "mean_kld",
    "p999_kld",
    "same_top",
    "num_windows",
    "num_tokens",
)


def figures(score: FormatScore) -> tuple[float, ...]:
    return tuple(getattr(score, name) for name in FIGURES)


def scores(family: str = "llama", text: str = TEXT, **settings: Any) -> list[FormatScore]:
    return verify(tiny_loaded(family), text, VerifySettings(**settings))


def test_unquantised_against_itself_is_the_same() -> None:
    (score,) = scores(formats=("fp32",), contexts=(300,), batches=(1,), num_windows=2)
    assert (score.mean_kld, score.p999_kld, score.same_top, score.size) == (0.0, 0.0, 1.0, 1.0)
    assert score.perplexity == score.reference_perplexity
    assert (score.num_windows, score.num_tokens) == (2, 2 * 299)


def test_smaller_formats_cost_more() -> None:
    found = {
        score.format: score
        for score in scores(
            "qwen3", formats=("int4", "k8v4", "int8", "bf16"), contexts=(300,), batches=(1,), num_windows=2
        )
    }
    assert list(found) == ["int4", "k8v4", "int8", "bf16"]
    ascending = [found[name] for name in ("int8", "k8v4", "int4")]
    for figure in ("mean_kld", "p999_kld"):
        values = [getattr(score, figure) for score in ascending]
        assert 0 < values[0] < values[1] < values[2]
    assert ascending[0].same_top > ascending[1].same_top > ascending[2].same_top
    assert found["bf16"].size == 0.5 > ascending[0].size > ascending[1].size > ascending[2].size
    assert len({score.reference_perplexity for score in found.values()}) == 1
    for name, score in found.items():
        assert recommend(found.values(), score.mean_kld) == name
    assert recommend(found.values(), 0.0) is None


def test_the_worst_context_decides_what_is_recommended() -> None:
    (good,) = scores(formats=("int8",), contexts=(64,), batches=(1,), num_windows=1)
    bad = dataclasses.replace(good, context=300, mean_kld=1.0)
    assert recommend([good], good.mean_kld) == "int8"
    assert recommend([good, bad], good.mean_kld) is None
    as_small = dataclasses.replace(good, format="k8v4", mean_kld=good.mean_kld * 2)
    assert recommend([as_small, good], 1.0) == "int8"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The number of tokens of each chunk, for each step that is run."""
    run, seen = Runner.run, []

    def spy(self: Runner, chunks: list[Chunk], rows: torch.Tensor | None = None) -> torch.Tensor:
        seen.append([len(chunk.token_ids) for chunk in chunks])
        return run(self, chunks, rows)

    monkeypatch.setattr(Runner, "run", spy)
    return seen


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_batch_changes_no_bit(family: str, monkeypatch: pytest.MonkeyPatch, steps: list[list[int]]) -> None:
    monkeypatch.setattr(lockstep, "_MAX_ROWS", 70)
    found = scores(family, formats=("int8", "int4"), contexts=(130, 40), batches=(1, 4, 3), num_windows=5)
    assert [(s.context, s.batch) for s in found[::2]] == [(c, b) for c in (130, 40) for b in (1, 4, 3)]
    for context in (130, 40):
        for name in ("int8", "int4"):
            same = {figures(s) for s in found if (s.context, s.format) == (context, name)}
            assert len(same) == 1
    # Each window of 130 takes two steps, each step is taken by three caches.
    assert steps[: 5 * 2 * 3] == [*[[70]] * 3, *[[59]] * 3] * 5
    # Then four windows at once, and the fifth with three companions that are spread over its steps.
    assert steps[30:36] == [*[[70] * 4] * 3, *[[59] * 4] * 3]
    assert steps[36:42] == [*[[70, 65, 65, 65]] * 3, *[[59, 65, 65, 65]] * 3]


def test_figures_are_those_of_each_window_alone() -> None:
    """The mean of two windows, each read by itself, is that of both: nothing leaks from one to the next."""
    settings = {"formats": ("int8",), "contexts": (100,), "batches": (1,)}
    (both,) = scores(text=TEXT[:200], **settings)
    first, second = (scores(text=TEXT[start : start + 100], **settings)[0] for start in (0, 100))
    assert both.mean_kld == pytest.approx((first.mean_kld + second.mean_kld) / 2, rel=1e-12)
    assert both.p999_kld == max(first.p999_kld, second.p999_kld)


def by_hand(name: str, token_ids: list[int], *, own_block_sealed: bool = False) -> torch.Tensor:
    """Logits by transformers' own attention, its keys and values being what the format makes of earlier blocks."""
    model = tiny_model("llama")
    config = model.config
    page = PageShape(config.num_key_value_heads, config.head_dim, config.head_dim)

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, **options: Any
    ) -> tuple[torch.Tensor, None]:
        outs, keys, values = [], key[:, :, :0], value[:, :, :0]
        for start in range(0, query.shape[2], 32):
            own = slice(start, start + 32)
            own_keys, own_values = key[:, :, own], value[:, :, own]
            sealed_keys, sealed_values = own_keys, own_values
            rows = own_keys.shape[2]
            if rows == 32:
                data = FORMATS[name].encode(
                    own_keys[0].transpose(1, 2).contiguous(), own_values[0].contiguous()
                )
                sealed_keys, sealed_values = FORMATS[name].decode(data, page)
                sealed_keys, sealed_values = sealed_keys.transpose(1, 2)[None], sealed_values[None]
            if own_block_sealed:
                own_keys, own_values = sealed_keys, sealed_values
            future = torch.full((rows, rows), -torch.inf).triu(1)
            outs.append(
                eager_attention_forward(
                    module,
                    query[:, :, own],
                    torch.cat((keys, own_keys), dim=2),
                    torch.cat((values, own_values), dim=2),
                    torch.nn.functional.pad(future, (start, 0))[None, None],
                    **options,
                )[0]
            )
            keys, values = torch.cat((keys, sealed_keys), dim=2), torch.cat((values, sealed_values), dim=2)
        return torch.cat(outs, dim=1), None

    AttentionInterface.register("by_hand", attend)
    model.set_attn_implementation("by_hand")
    with torch.inference_mode():
        ids = torch.tensor([token_ids])
        return model(ids, attention_mask=None, use_cache=False).logits[0].double()


@pytest.mark.parametrize("name", ["bf16", "int8", "k8v4", "int4"])
def test_figures_are_those_of_transformers_with_earlier_blocks_sealed_and_the_own_one_raw(name: str) -> None:
    token_ids = tiny_tokenizer().encode(TEXT[:250])
    (score,) = scores(text=TEXT[:250], formats=(name,), contexts=(250,), batches=(1,), num_windows=1)

    def compared(**options: bool) -> tuple[float, float, float, float]:
        reference, sealed = (
            torch.log_softmax(by_hand(each, token_ids[:-1], **options), dim=1) for each in ("fp32", name)
        )
        kld = (reference.exp() * (reference - sealed)).sum(dim=1)
        nll = -sealed.gather(1, torch.tensor(token_ids[1:])[:, None]).mean()
        same = (reference.argmax(dim=1) == sealed.argmax(dim=1)).double().mean()
        return kld.mean().item(), kld.max().item(), nll.exp().item(), same.item()

    mean_kld, max_kld, perplexity, same_top = compared()
    assert score.mean_kld == pytest.approx(mean_kld, rel=0.02)
    assert score.p999_kld == pytest.approx(max_kld, rel=0.1)
    assert score.perplexity == pytest.approx(perplexity, rel=1e-5)
    assert score.same_top == pytest.approx(same_top, abs=1 / 249 + 1e-9)
    assert compared(own_block_sealed=True)[0] > 1.2 * score.mean_kld


def test_windows_are_spread_over_the_text_and_contexts_end_at_the_models_window() -> None:
    tokens = verify_module._Tokens(list(range(100)), [])
    assert tokens.windows(10, 3) == [list(range(s, s + 10)) for s in (0, 30, 60)]
    assert tokens.windows(40, 9) == [list(range(40)), list(range(40, 80))]
    begun = verify_module._Tokens(list(range(100)), [7777])
    assert begun.windows(50, 9) == [[7777, *range(49)], [7777, *range(49, 98)]]
    found = scores(formats=("int8",), contexts=(400, 512, 8192, 9000), batches=(1,), num_windows=1)
    assert [score.context for score in found] == [400, 512]


def test_a_text_begins_as_the_tokenizer_lets_it_begin() -> None:
    tokenizer = tiny_tokenizer()
    assert verify_module._tokenise(tokenizer, "ab").prefix == []
    begins = SimpleNamespace(
        bos_token_id=1,
        encode=lambda text, add_special_tokens=True: (
            [1, *tokenizer.encode(text)] if add_special_tokens else tokenizer.encode(text)
        ),
    )
    assert verify_module._tokenise(begins, "ab") == verify_module._Tokens(tokenizer.encode("ab"), [1])


def test_a_format_that_gives_no_numbers_is_infinitely_far_and_never_recommended() -> None:
    loaded = tiny_loaded("qwen2")
    with torch.no_grad():
        loaded.model.model.layers[0].self_attn.v_proj.bias.fill_(1e9)  # no half float reaches so far
    settings = VerifySettings(formats=("bf16", "int8"), contexts=(70,), batches=(1,), num_windows=1)
    kept, lost = verify(loaded, TEXT, settings)
    assert kept.mean_kld < 1
    assert lost.mean_kld == lost.p999_kld == lost.perplexity == float("inf")
    assert recommend([kept, lost], 1.0) == "bf16"


def test_a_model_that_computes_no_numbers_is_refused() -> None:
    loaded = tiny_loaded("llama")
    with torch.no_grad():
        loaded.model.lm_head.weight[5, 3] = float("nan")
    with pytest.raises(NumericalError, match="even with unquantised"):
        verify(loaded, TEXT, VerifySettings(contexts=(40,), batches=(1,), num_windows=1))


def test_an_untested_family_is_compared_with_transformers_first(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    monkeypatch.setattr(prepare, "TESTED_FAMILIES", frozenset())
    check = prepare.Probe.check

    def spy(self: prepare.Probe, logits: torch.Tensor, kind: str) -> None:
        check(self, logits, kind)
        checked.append(kind)

    monkeypatch.setattr(prepare.Probe, "check", spy)
    scores(formats=("int8",), contexts=(40,), batches=(1,), num_windows=1)
    assert checked == ["llama"]


def test_progress_counts_to_the_end() -> None:
    seen: list[tuple[str, int, int]] = []
    settings = VerifySettings(formats=("int8",), contexts=(64, 100), batches=(1, 4), num_windows=3)
    verify(tiny_loaded("llama"), TEXT, settings, lambda *report: seen.append(report))
    assert {stage for stage, _, _ in seen} == {"verify"}
    done = [done for _, done, _ in seen]
    assert done == sorted(set(done))
    assert {total for _, _, total in seen} == {done[-1]}
    # Three windows alone, then in one batch with a companion; with the format and without it.
    assert done[-1] == 2 * sum(3 * (context - 1) * 2 + context for context in (64, 100))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"formats": ("int8", "q8_0")}, "no cache format 'q8_0'. Choose from fp32, bf16, int8, k8v4, int4"),
        ({"contexts": (512, 1)}, "A context is 1; it must be at least 2"),
        ({"batches": (0,)}, "A batch size is 0"),
        ({"num_windows": 0}, "A number of windows is 0"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        VerifySettings(**settings)


def test_a_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="text has 63 tokens and a window of 64 needs 64"):
        scores(text=TEXT[:63], contexts=(64,))


def test_caches_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module.psutil, "virtual_memory", lambda: SimpleNamespace(available=100_000))
    with pytest.raises(
        NotEnoughMemory, match=r"5 formats with 252 tokens each take [\d,]+ bytes, and 100,000"
    ):
        scores(contexts=(64,), batches=(4,))
