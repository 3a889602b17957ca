"""Text with a gap as tokens: which marks a model has, how they are laid out, and what stays when somebody types."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from octavo.errors import InvalidRequest
from octavo.server.infill.answer import Ends
from octavo.server.infill.options import Options
from octavo.server.infill.prompt import STEP, FimPrompts, Gap
from octavo.server.infill.schema import InfillRequest
from octavo.server.infill.tokens import find_fim_tokens
from octavo.server.problems import Problem

ROOM = 100_000
QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>"]
FAMILIES = {
    "qwen2.5-coder": (QWEN, "<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>T"),
    "codegemma": ([*QWEN[:3], "<|file_separator|>"], "<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>T"),
    "starcoder2": (
        ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<file_sep>", "<repo_name>"],
        "<fim_prefix><fim_suffix>S<fim_middle>PT",
    ),
    "granite-code": (["<fim_prefix>", "<fim_middle>", "<fim_suffix>"], "<fim_prefix><fim_suffix>S<fim_middle>PT"),
    "deepseek-coder": (
        ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
        "<｜fim▁begin｜>P<｜fim▁hole｜>S<｜fim▁end｜>T",
    ),
    "codestral": (["[PREFIX]", "[SUFFIX]", "[MIDDLE]"], "[SUFFIX]S[PREFIX]PT"),
    "codellama": (["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"], "▁<PRE>▁<SUF>S▁<MID>PT"),
}  # fmt: skip


def tokenizer(marks: list[str], *, special: bool = True, bos: bool = False) -> PreTrainedTokenizerFast:
    """A token for each byte, and the marks, which Qwen's tokenizers do not call special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: id_ for id_, token in enumerate(["<s>", *alphabet])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    (backend.add_special_tokens if special else backend.add_tokens)(marks)
    found = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    if bos:
        from tokenizers.processors import TemplateProcessing

        found.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return found


def prompts(marks: list[str], **options: bool) -> FimPrompts:
    made = tokenizer(marks, **options)
    tokens = find_fim_tokens(made)
    assert tokens is not None
    return FimPrompts(made, tokens)


def written(fim: FimPrompts, ids: list[int]) -> str:
    return fim._tokenizer.decode(ids)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(("marks", "expected"), FAMILIES.values(), ids=FAMILIES)
def test_each_family_is_written_as_it_was_trained(marks: list[str], expected: str, special: bool) -> None:
    fim = prompts(marks, special=special)
    ids = fim.infill(Gap("P", "S", "T"), room=ROOM, namespace="")
    assert written(fim, ids) == expected
    # every mark is one token: a byte has ids below 257
    assert sum(id_ > 256 for id_ in ids) == expected.count("<") + expected.count("[")
    assert fim.tokens.ends  # an answer ends where another file would begin


@pytest.mark.parametrize(("marks", "expected"), FAMILIES.values(), ids=FAMILIES)
def test_marks_written_out_become_their_ids(marks: list[str], expected: str) -> None:
    fim = prompts(marks)
    ids = fim.infill(Gap("P", "S", "T"), room=ROOM, namespace="")
    assert fim.raw(expected) == ids
    assert fim.raw("P") == fim._tokenizer.encode("P")


def test_code_llamas_marks_are_known_as_clients_write_them() -> None:
    fim = prompts(FAMILIES["codellama"][0])
    marks = [fim.tokens.prefix, fim.tokens.suffix, fim.tokens.middle]
    ids = fim.raw("<PRE> a <SUF>b <MID>")
    assert [id_ for id_ in ids if id_ > 256] == marks
    assert fim._tokenizer.decode([id_ for id_ in ids if id_ <= 256]) == "ab"


def test_what_looks_like_a_mark_in_a_file_is_text() -> None:
    fim = prompts(QWEN, special=False)
    ids = fim.infill(Gap("a<|fim_suffix|>", "<|fim_middle|><s>", "x"), room=ROOM, namespace="")
    assert [id_ for id_ in ids if id_ > 256] == [fim.tokens.prefix, fim.tokens.suffix, fim.tokens.middle]
    assert 0 not in ids
    assert written(fim, ids) == "<|fim_prefix|>a<|fim_suffix|><|fim_suffix|><|fim_middle|><s><|fim_middle|>x"


def test_other_files_come_first_and_the_oldest_goes() -> None:
    fim = prompts(QWEN)
    extra = (("a.py", "A" * 40), ("b.py", "B" * 40), ("c.py", "C" * 40))
    gap = Gap("P\n", "S", "T", extra)
    text = written(fim, fim.infill(gap, room=ROOM, namespace=""))
    assert text.startswith("<|repo_name|>project\n<|file_sep|>a.py\nAAA")
    assert text.endswith("<|file_sep|>file\n<|fim_prefix|>P\n<|fim_suffix|>S<|fim_middle|>T")
    short = written(fim, fim.infill(gap, room=STEP + 130, namespace=""))
    assert short.startswith("<|repo_name|>project\n<|file_sep|>b.py\n")
    plain = prompts(QWEN[:3])
    assert written(plain, plain.infill(gap, room=ROOM, namespace="")).startswith("\n\n--- snippet ---\n\nAAA")


def test_the_first_token_is_the_tokenizers_own() -> None:
    fim = prompts(QWEN, bos=True)
    assert fim.infill(Gap("P", "S"), room=ROOM, namespace="")[:2] == [0, fim.tokens.prefix]
    assert fim.raw("<|fim_prefix|>")[:2] == [0, fim.tokens.prefix]


@given(
    before=st.text("ab\n", max_size=40),
    behind=st.text("cd\n", max_size=40),
    typed=st.text("xy ", max_size=20),
    family=st.sampled_from(sorted(FAMILIES)),
    whole=st.booleans(),
)
def test_text_that_is_typed_only_appends(
    before: str, behind: str, typed: str, family: str, whole: bool
) -> None:
    """Whether a client sends the line's beginning by itself, as plugins do, or as the end of the prefix."""
    fim = _MADE[family]
    before = before and before + "\n"
    last: list[int] = []
    for end in range(len(typed) + 1):
        line = typed[:end]
        gap = Gap(before + line, behind) if whole else Gap(before, behind, line)
        ids = fim.infill(gap, room=ROOM, namespace="")
        assert ids[: len(last)] == last
        last = ids


_MADE = {name: prompts(marks) for name, (marks, _) in FAMILIES.items()}


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(300, 3000), st.sampled_from(sorted(FAMILIES)))
def test_what_does_not_fit_is_cut_far_from_the_gap(before: int, behind: int, room: int, family: str) -> None:
    fim = _MADE[family]
    text = "".join(chr(97 + index % 26) for index in range(before)) + "\n"
    ids = fim.infill(Gap(text, "S" * behind), room=room, namespace="")
    assert len(ids) <= room
    assert text.endswith(_between(fim, ids))
    if before + 1 + behind + 3 <= room:
        assert len(ids) == before + 1 + behind + (2 if fim.tokens.middle is None else 3)
    else:
        assert len(ids) > room - STEP - 4 - room // 4


def _between(fim: FimPrompts, ids: list[int]) -> str:
    return written(fim, [id_ for id_ in ids if id_ <= 256]).replace("S", "")


def test_a_cut_stays_while_somebody_types() -> None:
    fim = _MADE["qwen2.5-coder"]
    starts = [
        fim.infill(Gap("".join(f"{n:06}\n" for n in range(count)), "S" * 100), room=2000, namespace="")[:50]
        for count in range(400, 500)
    ]
    changes = sum(one != two for one, two in pairwise(starts))
    assert changes == pytest.approx(100 * 7 / STEP, abs=1)


def test_named_tokens_stand_for_the_marks() -> None:
    made = tokenizer(["<a>", "<b>", "<c>"])
    assert find_fim_tokens(made) is None
    tokens = find_fim_tokens(made, ("<a>", "<b>", "<c>"), "suffix-first")
    assert tokens is not None
    assert (tokens.prefix, tokens.suffix, tokens.middle, tokens.order) == (257, 258, 259, "suffix-first")
    with pytest.raises(InvalidRequest, match="no token '<d>'"):
        find_fim_tokens(made, ("<a>", "<b>", "<d>"))
    with pytest.raises(InvalidRequest, match="name three"):
        find_fim_tokens(made, ("<a>",))
    with pytest.raises(InvalidRequest, match="prefix-first, suffix-first"):
        find_fim_tokens(made, ("<a>", "<b>", "<c>"), "middle-first")


def pushed(ends: Ends, pieces: list[str], seconds: float = 0.0) -> list[str]:
    found = []
    for number, piece in enumerate(pieces):
        if not ends.ended:
            found.append(ends.push(piece, number * seconds, last=number == len(pieces) - 1))
    return found


def test_a_text_ends_before_a_line_that_is_less_indented() -> None:
    ends = Ends(indent=4, seconds=0)
    assert pushed(ends, ["x = 1\n", "    y", "\n  ", "\n", "    z\n", "  w"]) == [
        "x = 1",
        "\n    y",
        "",
        "",
        "\n  \n    z",
        "",
    ]
    assert (ends.text, ends.ended) == ("x = 1\n    y\n  \n    z", True)
    ends = Ends(indent=4, seconds=0)
    assert "".join(pushed(ends, ["a\n", "  "])) == ends.text == "a\n  "


def test_a_text_ends_after_its_time_once_it_has_a_line() -> None:
    ends = Ends(indent=0, seconds=2.0)
    assert pushed(ends, ["a", "b", "c", "d\n", "e"], 1.0) == ["a", "b", "c", "d\n"]
    assert ends.ended
    ends = Ends(indent=0, seconds=2.0)
    assert "".join(pushed(ends, ["a\n", "b", "c"], 0.5)) == "a\nbc"
    assert not ends.ended


@given(st.lists(st.text("a \n", max_size=4), min_size=1, max_size=12), st.integers(0, 3))
def test_pieces_together_are_the_text(pieces: list[str], indent: int) -> None:
    ends = Ends(indent=indent, seconds=0)
    assert "".join(pushed(ends, pieces)) == ends.text
    whole = "".join(pieces)
    assert whole.startswith(ends.text)
    lines = [line for line in ends.text.split("\n")[1:] if line.strip()]
    assert all(len(line) - len(line.lstrip()) >= indent for line in lines)
    if not ends.ended:
        assert ends.text == whole


def options(**fields: object) -> Options:
    return Options.of(InfillRequest(input_prefix="", input_suffix="", **fields), 100, (7,))


def test_samplers_that_are_not_named_are_not_applied() -> None:
    every = options().params
    assert (every.temperature, every.top_k, every.top_p, every.min_p) == (0.8, 40, 0.95, 0.05)
    some = options(samplers=["top_k", "top_p", "infill"], temperature=0.1, top_k=30).params
    assert (some.temperature, some.top_k, some.top_p, some.min_p) == (1.0, 30, 0.95, 0.0)
    assert some.stop_token_ids == (7,)
    assert options(temperature=-1.0).params.temperature == 0
    assert options(seed=-1).params.seed is None
    assert options(n_predict=-1).params.max_tokens is None
    assert not options(n_predict=0, n_cmpl=3).generates


def test_biases_and_fields_are_read_as_llama_cpp_writes_them() -> None:
    biases = options(logit_bias=[[3, 1.5], [4, False]]).params.logit_bias
    assert biases[3] == 1.5
    assert biases[4] < -1e8
    assert options(logit_bias={"5": -2}).params.logit_bias == {5: -2.0}
    for wrong in ([[100, 1.0]], [["text", 1.0]], [[3, True]]):
        with pytest.raises(Problem):
            options(logit_bias=wrong)
    chosen = options(response_fields=["content", "timings/prompt_n", "none", "timings/none"])
    assert chosen.selected({"content": "x", "timings": {"prompt_n": 3}, "stop": True}) == {
        "content": "x",
        "timings/prompt_n": 3,
    }
    assert options(response_fields=[""]).selected({"content": "x"}) == {}


def test_texts_are_remembered_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.server.infill.prompt._KEPT_BYTES", 1000)
    fim = FimPrompts(tokenizer(QWEN), find_fim_tokens(tokenizer(QWEN)))
    gap = Gap("x" * 100, "y" * 100, "z")
    first = fim.infill(gap, room=ROOM, namespace="ada")
    encoded = []
    plain = fim._plain
    monkeypatch.setattr(fim, "_plain", lambda text: encoded.append(text) or plain(text))
    assert fim.infill(gap, room=ROOM, namespace="ada") == first
    assert encoded == ["z"]
    fim.infill(gap, room=ROOM, namespace="bob")
    assert encoded[1:] == ["z", "x" * 100, "y" * 100], "another tenant's is its own"
    assert fim._num_bytes == sum(4 * len(ids) for ids in fim._texts.values()) <= 1000
    assert fim.infill(gap, room=ROOM, namespace="ada") == first
