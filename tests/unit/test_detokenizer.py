from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from octavo.engine.detokenizer import Detokenizer, _Window

CORPUS = [
    "The octavo is a sheet folded into eight leaves, a book of small pages that fits a pocket.",
    "Ein Oktavband ist ein Buch aus gefalteten Bögen; größer wäre ein Quartband. Schön!",
    "八つ折り判は、一枚の紙を三回折って八葉とした本である。小さな頁。",
    "이 책은 작은 쪽으로 이루어져 있다. कागज़ की एक शीट आठ पन्नों में मुड़ी हुई।",
    "🙂🙃 👍🏽 👨‍👩‍👧‍👦 naïve café — “quotes” … done\n\n\tint main() { return 0; }",
]
SAMPLES = [
    "Hello, größer 八つ折り 👨‍👩‍👧‍👦!",
    "a  b   c\n\n d",
    "कागज़ की 🙂🙃 이 책",
    "\U0010ffff\u0000\ufffd é",
    " leading",
    "",
]


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def with_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(["<|end|>", "<|start|>"])
    tokenizer.add_tokens(
        [AddedToken("<tool call>", normalized=False), AddedToken("[é 八]", normalized=False)]
    )
    return tokenizer


@functools.cache
def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return wrap(with_added_tokens(tokenizer))


@functools.cache
def byte_level_last() -> PreTrainedTokenizerFast:
    """The pipeline that older conversions from GGUF gave to byte-level vocabularies."""
    tokenizer = Tokenizer.from_str(byte_level().backend_tokenizer.to_str())
    steps = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.ByteLevel()]
    tokenizer.decoder = decoders.Sequence(steps)
    return wrap(tokenizer)


@functools.cache
def byte_fallback(strip: bool = True) -> PreTrainedTokenizerFast:
    """Like Llama 2 (with `strip`) and Gemma (without)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=130, limit_alphabet=60, show_progress=False)
    tokenizer.train_from_iterator(CORPUS[:2], trainer)
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "▁▁", "▁▁▁▁", "\ufffd", ""]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if strip else []))
    return wrap(with_added_tokens(tokenizer))


@functools.cache
def metaspace() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return wrap(with_added_tokens(tokenizer))


@functools.cache
def word_piece() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS[:2], trainer)
    return wrap(with_added_tokens(tokenizer))


@functools.cache
def suffix_bpe() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS[:2], trainer)
    return wrap(with_added_tokens(tokenizer))


@functools.cache
def no_decoder() -> PreTrainedTokenizerFast:
    return wrap(Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a")))


ALL = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "byte_fallback_no_strip": lambda: byte_fallback(strip=False),
    "metaspace": metaspace,
    "word_piece": word_piece,
    "suffix_bpe": suffix_bpe,
    "no_decoder": no_decoder,
}
each_tokenizer = pytest.mark.parametrize("name", ALL)


def whole(tokenizer: PreTrainedTokenizerFast, ids: list[int], skip_special_tokens: bool = True) -> str:
    return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


def stream(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    """What each token gave, and at the end what `finish` gave."""
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


def cut(text: str, stop: list[str]) -> tuple[str, str | None]:
    """Naively: the text before the stop string that begins first, and of two such the shorter."""
    found = sorted((text.index(string), len(string), string) for string in stop if string in text)
    return (text[: found[0][0]], found[0][2]) if found else (text, None)


def byte_ids(tokenizer: PreTrainedTokenizerFast, data: bytes) -> list[int]:
    """One token a byte."""
    if tokenizer is byte_level():
        chars = bytes_to_unicode()
        return [tokenizer.convert_tokens_to_ids(chars[byte]) for byte in data]
    return [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in data]


# --- equal to decoding the whole


@each_tokenizer
@settings(max_examples=200)
@given(data=st.data(), skip=st.booleans())
def test_random_tokens_give_the_text_of_the_whole(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = ALL[name]()
    token = st.integers(0, len(tokenizer) + 1)  # the last two do not exist
    added = st.integers(max(0, len(tokenizer) - 5), len(tokenizer) + 1)
    ids = data.draw(st.lists(st.one_of(token, token, added), max_size=40))
    pieces = stream(Detokenizer(tokenizer, skip_special_tokens=skip), ids)
    assert "".join(pieces) == whole(tokenizer, ids, skip)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "byte_fallback_no_strip"])
@settings(max_examples=200)
@given(parts=st.lists(st.one_of(st.text(max_size=4), st.binary(min_size=1, max_size=4)), max_size=8))
def test_text_mixed_with_broken_bytes(name: str, parts: list[str | bytes]) -> None:
    tokenizer = ALL[name]()
    ids: list[int] = []
    for part in parts:
        if isinstance(part, str):
            ids += tokenizer.encode(part, add_special_tokens=False)
        else:
            ids += byte_ids(tokenizer, part)
    assert "".join(stream(Detokenizer(tokenizer), ids)) == whole(tokenizer, ids)


@each_tokenizer
@pytest.mark.parametrize("text", SAMPLES)
def test_encoded_text(name: str, text: str) -> None:
    tokenizer = ALL[name]()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(stream(Detokenizer(tokenizer), ids)) == whole(tokenizer, ids)


@pytest.mark.parametrize("text", SAMPLES)
def test_byte_level_at_the_end_of_a_longer_pipeline(text: str) -> None:
    tokenizer = byte_level_last()
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(Detokenizer(tokenizer), ids)
    assert "".join(pieces) == whole(tokenizer, ids) == text
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in pieces)


def test_a_broken_end_of_a_longer_pipeline() -> None:
    tokenizer = byte_level_last()
    ids = byte_ids(byte_level(), b"a\xf0\x9f")
    assert stream(Detokenizer(tokenizer), ids) == ["a", "", "", "\ufffd"]


def test_clean_up_of_spaces_is_off_even_where_the_tokenizer_asks_for_it() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, ".": 1}, unk_token="a"))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=True)
    assert wrapped.decode([0, 1]) == "a."
    assert "".join(stream(Detokenizer(wrapped), [0, 1])) == "a ."


# --- when text is final


def test_a_character_comes_whole_with_its_last_token() -> None:
    tokenizer = byte_level()
    for name in ("é", "八", "🙂"):
        ids = byte_ids(tokenizer, name.encode())
        assert stream(Detokenizer(tokenizer), ids) == [""] * (len(ids) - 1) + [name, ""]


def test_only_what_a_broken_character_needs_is_held_back() -> None:
    tokenizer = byte_level()
    # F0 9F can be completed, E0 80 cannot, and FF never begins a character.
    pieces = stream(Detokenizer(tokenizer), byte_ids(tokenizer, b"a\xf0\x9fb\xe0\x80\xffc\xf0\x9f"))
    assert pieces == ["a", "", "", "\ufffdb", "", "\ufffd\ufffd", "\ufffd", "c", "", "", "\ufffd"]


def test_a_run_of_byte_tokens_is_decoded_when_it_ends() -> None:
    tokenizer = byte_fallback()
    a = tokenizer.convert_tokens_to_ids("▁a")
    ids = byte_ids(tokenizer, "🙂é".encode())
    assert stream(Detokenizer(tokenizer), [a, *ids, a, a]) == ["a", *[""] * 6, "🙂é a", " a", ""]
    # A broken byte at the end takes the complete characters of its run with it.
    broken = [*ids, *byte_ids(tokenizer, b"\xff")]
    assert stream(Detokenizer(tokenizer), broken) == [""] * len(broken) + ["\ufffd" * len(broken)]


def test_the_space_between_words_stays_behind_skipped_tokens() -> None:
    tokenizer = byte_fallback()
    end, space, b = (tokenizer.convert_tokens_to_ids(token) for token in ("<|end|>", "▁", "b"))
    ids = [end, space, end, b, end, end, space, b, end, space, space, end, b]
    pieces = stream(Detokenizer(tokenizer), ids)
    assert "".join(pieces) == "b b  b"
    assert pieces[6:8] == [" ", "b"]


def test_the_space_between_words_stays_behind_empty_tokens() -> None:
    tokenizer = byte_fallback()
    empty, a = (tokenizer.convert_tokens_to_ids(token) for token in ("", "▁a"))
    assert stream(Detokenizer(tokenizer), [empty, a, empty, empty, a]) == ["", "a", "", "", " a", ""]


def test_special_tokens_can_be_kept() -> None:
    tokenizer = byte_level()
    ids = [*tokenizer.encode("a"), tokenizer.convert_tokens_to_ids("<|end|>"), *tokenizer.encode("b")]
    assert "".join(stream(Detokenizer(tokenizer), ids)) == "ab"
    assert "".join(stream(Detokenizer(tokenizer, skip_special_tokens=False), ids)) == "a<|end|>b"


@pytest.mark.parametrize("name", [*ALL, "byte_level_last"])
def test_the_work_for_a_token_does_not_grow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level_last() if name == "byte_level_last" else ALL[name]()
    vocab = tokenizer.get_vocab()
    ids = tokenizer.encode("a pocket book 🙂 ", add_special_tokens=False) * 50
    # A space, U+FFFD, the first byte of a character, a skipped token: each many times in a row.
    for token in ("▁", "\ufffd", "Ġ", "ð", "<|end|>"):
        ids += [vocab[token]] * 200 if token in vocab else []
    detokenizer = Detokenizer(tokenizer, ["never to be seen"])
    lengths = [0]
    decode = _Window._decode

    def counting(window: _Window, token_ids: list[int]) -> str:
        lengths.append(len(token_ids))
        return decode(window, token_ids)

    monkeypatch.setattr(_Window, "_decode", counting)
    for token_id in ids:
        detokenizer.push(token_id)
        assert len(detokenizer._stops._held) < len("never to be seen")
    assert max(lengths) <= 2 * 16


# --- stop strings


def pieces_of(text: str, stop: list[str]) -> tuple[list[str], Detokenizer]:
    """Stream `text`, one token a character."""
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, stop)
    return stream(detokenizer, byte_ids(tokenizer, text.encode())), detokenizer


def test_without_a_stop_string_nothing_waits() -> None:
    pieces, detokenizer = pieces_of("abc", [])
    assert pieces == ["a", "b", "c", ""]
    assert detokenizer.stopped is None


def test_a_stop_string_over_many_tokens() -> None:
    pieces, detokenizer = pieces_of("ab\n\nUser: c", ["\n\nUser:"])
    assert pieces == ["a", "b", *[""] * 10]
    assert detokenizer.stopped == "\n\nUser:"
    assert detokenizer.finish() == ""


def test_what_looked_like_a_stop_string_is_given_out_when_it_is_none() -> None:
    pieces, detokenizer = pieces_of("xSTAYSTOx", ["STOP"])
    assert pieces == ["x", "", "", "STA", "Y", "", "", "", "STOx", ""]
    assert detokenizer.stopped is None


def test_a_stop_string_that_begins_inside_its_own_beginning() -> None:
    pieces, detokenizer = pieces_of("aaab", ["aab"])
    assert pieces == ["", "", "a", "", ""]
    assert detokenizer.stopped == "aab"
    pieces, detokenizer = pieces_of("aabaabbx", ["aabb"])
    assert pieces == ["", "", "", "aab", "", "", "", "", ""]
    assert detokenizer.stopped == "aabb"


def test_the_rest_comes_at_the_end() -> None:
    pieces, detokenizer = pieces_of("abST", ["STOP"])
    assert pieces == ["a", "b", "", "", "ST"]
    assert detokenizer.stopped is None


def test_the_stop_string_that_begins_first_wins() -> None:
    pieces, detokenizer = pieces_of("xabcd", ["bc", "abcd"])
    assert ("".join(pieces), detokenizer.stopped) == ("x", "abcd")
    pieces, detokenizer = pieces_of("xabcx", ["bc", "abcd"])
    assert ("".join(pieces), detokenizer.stopped) == ("xa", "bc")
    # With nothing to follow, the one that is complete is taken.
    pieces, detokenizer = pieces_of("xabc", ["bc", "abcd"])
    assert pieces == ["x", "", "", "", "a"]
    assert detokenizer.stopped == "bc"


def test_of_two_that_begin_together_the_shorter_wins() -> None:
    tokenizer = byte_level()
    for ids in (
        byte_ids(tokenizer, b"xabcd"),
        [tokenizer.convert_tokens_to_ids("x"), *tokenizer.encode("abcd")],
    ):
        detokenizer = Detokenizer(tokenizer, ["abcd", "ab"])
        assert "".join(stream(detokenizer, ids)) == "x"
        assert detokenizer.stopped == "ab"
    detokenizer = Detokenizer(tokenizer, ["abcd", "ab"])
    detokenizer.push(tokenizer.convert_tokens_to_ids("a"))
    detokenizer.push(tokenizer.convert_tokens_to_ids("b"))
    assert detokenizer.stopped == "ab"  # without waiting for the longer one


def test_nothing_follows_a_stop_string() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, ["b"])
    pieces = [detokenizer.push(token_id) for token_id in byte_ids(tokenizer, b"abcabc")]
    assert pieces == ["a", "", "", "", "", ""]
    assert detokenizer.finish() == ""


def test_a_stop_string_of_several_bytes_a_character() -> None:
    pieces, detokenizer = pieces_of("a🙂🙃b", ["🙃"])
    assert "".join(pieces) == "a🙂"
    assert detokenizer.stopped == "🙃"


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "metaspace", "word_piece"])
@settings(max_examples=200)
@given(data=st.data(), stop=st.lists(st.text("ab \n", min_size=1, max_size=4), max_size=3))
def test_stop_strings_cut_the_text_of_the_whole(name: str, data: st.DataObject, stop: list[str]) -> None:
    tokenizer = ALL[name]()
    near = [token_id for token, token_id in tokenizer.get_vocab().items() if set(token) <= set("ab▁ĠĊ#")]
    assert near
    ids = data.draw(st.lists(st.sampled_from(near), max_size=20))
    text, stopped = cut(whole(tokenizer, ids), stop)
    detokenizer = Detokenizer(tokenizer, stop)
    given_out = ""
    for token_id in ids:
        given_out += detokenizer.push(token_id)
        assert text.startswith(given_out)  # nothing of a stop string is ever given out
    assert given_out + detokenizer.finish() == text
    assert detokenizer.stopped == stopped


@settings(max_examples=300)
@given(
    text=st.text("abc🙂", max_size=24),
    stop=st.lists(st.text("abc🙂", min_size=1, max_size=5), max_size=4),
)
def test_stop_strings_in_text_of_one_token_a_byte(text: str, stop: list[str]) -> None:
    pieces, detokenizer = pieces_of(text, stop)
    assert ("".join(pieces), detokenizer.stopped) == cut(text, stop)


@settings(max_examples=200)
@given(text=st.text("ab", max_size=16), stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=2))
def test_no_more_is_held_back_than_needed(text: str, stop: list[str]) -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, stop)
    given_out = ""
    for end, token_id in enumerate(byte_ids(tokenizer, text.encode()), start=1):
        given_out += detokenizer.push(token_id)
        if detokenizer.stopped is not None:
            break
        held = text[len(given_out) : end]
        assert held == "" or any(string.startswith(held) for string in stop)
