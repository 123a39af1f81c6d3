"""Decoded text is the same for any split of its tokens: whole characters, exact stop strings, no extra U+FFFD."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cluster.config import ConfigError
from cluster.tokenizer.stop_strings import StopFinder, StoppedText
from cluster.tokenizer.tokenizer import BYTE_OF_CHARACTER, WINDOW_TOKENS, IncrementalDetokenizer, TextTokenizer

LETTERS = st.sampled_from("ab cé€日😀\ufffd\n")
TEXTS = st.text(LETTERS, max_size=40)
BYTES = st.binary(max_size=40)
STOPS = st.lists(st.text(st.sampled_from("ab€😀"), min_size=1, max_size=4), max_size=4)


def byte_level() -> TextTokenizer:
    """A byte-level BPE. Ids 0..255 are the bytes; a few merges cross character borders; 2 tokens are special."""
    names = sorted(BYTE_OF_CHARACTER, key=BYTE_OF_CHARACTER.__getitem__)
    vocab = {name: i for i, name in enumerate(names)}
    merges = []
    for pair in (b"ab", b"\xe2\x82", b"\xac ", b"\x9f\x98", b"a\xe2"):
        left, right = names[pair[0]], names[pair[1]]
        merges.append((left, right))
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<s>", special=True)])
    return TextTokenizer(tokenizer)


def byte_fallback() -> TextTokenizer:
    """A BPE like SentencePiece: characters, words that begin with U+2581, and 256 byte tokens for all other text."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"ab▁\n", "▁a", "▁ab"]
    vocab = {name: i for i, name in enumerate(names)}
    merges = [("▁", "a"), ("▁a", "b")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return TextTokenizer(tokenizer)


BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()
EOS = 261


@st.composite
def split(draw: st.DrawFn, ids: list[int]) -> list[list[int]]:
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=len(ids))))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def stream(tokenizer: TextTokenizer, prompt: list[int], pieces: list[list[int]]) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    return "".join([*(detokenizer.push(piece) for piece in pieces), detokenizer.finish()])


FIRST_BYTE = 3  # the id of byte 0 in `byte_fallback`


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), prompt=BYTES, output=BYTES)
def test_byte_fallback_stream_in_any_split_equals_the_full_decode(
    data: st.DataObject, prompt: bytes, output: bytes
) -> None:
    """A run of byte tokens that is not valid UTF-8 keeps its whole characters; U+FFFD replaces only the other bytes."""
    letters = [BYTE_FALLBACK.backend_tokenizer.token_to_id(letter) for letter in "ab"]
    prompt_ids, ids = ([FIRST_BYTE + byte for byte in text] for text in (prompt, output))
    ids = data.draw(st.permutations([*ids, *letters]).map(list)) if data.draw(st.booleans()) else ids
    full_text = BYTE_FALLBACK.decode([*prompt_ids, *ids])
    assert stream(BYTE_FALLBACK, [], data.draw(split([*prompt_ids, *ids]))) == full_text
    if len(ids) == len(output):
        assert full_text == (prompt + output).decode("utf-8", "replace").removeprefix(" ")


def test_truncated_character_leaves_preceding_characters_intact() -> None:
    """A model writes rare letters byte by byte, and max_tokens cuts the last letter. `tokenizers` alone would write
    U+FFFD for each of them.
    """
    ids = [FIRST_BYTE + byte for byte in "𝔢𝔢𝔢".encode()[:-2]]
    assert BYTE_FALLBACK.decode(ids) == BYTE_FALLBACK.decode_without_gil(ids) == "𝔢𝔢\ufffd"
    assert stream(BYTE_FALLBACK, [], [[token_id] for token_id in ids]) == "𝔢𝔢\ufffd"


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), prompt=BYTES, output=BYTES)
def test_byte_level_stream_in_any_split_equals_the_full_decode(
    data: st.DataObject, prompt: bytes, output: bytes
) -> None:
    ids = data.draw(st.permutations([*output, EOS, 9999]).map(list)) if data.draw(st.booleans()) else [*output]
    prompt_text = BYTE_LEVEL.decode_complete([*prompt])
    streamed = stream(BYTE_LEVEL, [*prompt], data.draw(split(ids)))
    assert prompt_text + streamed == BYTE_LEVEL.decode([*prompt, *ids])


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), prompt=TEXTS, output=TEXTS, fallback=st.booleans())
def test_stream_of_encoded_text_in_any_split_equals_the_full_decode(
    data: st.DataObject, prompt: str, output: str, fallback: bool
) -> None:
    tokenizer = BYTE_FALLBACK if fallback else BYTE_LEVEL
    ids = tokenizer.encode(prompt + output)
    at = data.draw(st.integers(0, len(ids)))
    streamed = stream(tokenizer, ids[:at], data.draw(split(ids[at:])))
    assert (prompt + output).endswith(streamed)
    assert tokenizer.decode_complete(tokenizer.visible_token_ids(ids[:at])) + streamed == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), text=TEXTS)
def test_push_returns_only_complete_characters(data: st.DataObject, text: str) -> None:
    text = text.replace("\ufffd", "")
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK):
        detokenizer = IncrementalDetokenizer(tokenizer, [])
        for piece in data.draw(split(tokenizer.encode(text))):
            assert "\ufffd" not in detokenizer.push(piece)
        assert "\ufffd" not in detokenizer.finish()


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "byte_fallback"])
def test_detokenizer_window_stays_bounded_for_a_long_text(tokenizer: TextTokenizer) -> None:
    text = "日本語 ab€😀" * 200
    for size in (1, 2, 3, 5, 7):
        detokenizer = IncrementalDetokenizer(tokenizer, [])
        ids = tokenizer.encode(text)
        streamed = ""
        for at in range(0, len(ids), size):
            streamed += detokenizer.push(ids[at : at + size])
            assert len(detokenizer._window) <= WINDOW_TOKENS + size
        assert streamed + detokenizer.finish() == text


@pytest.mark.parametrize("ids", [[0xE2] * 500, [0xFF] * 500, [EOS] * 500, [0xF0, 0x9F] * 250])
def test_detokenizer_window_stays_bounded_for_invalid_bytes(ids: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, ids)
    streamed = ""
    for token in ids:
        streamed += detokenizer.push([token])
        assert len(detokenizer._window) <= WINDOW_TOKENS
    assert BYTE_LEVEL.decode_complete(
        BYTE_LEVEL.visible_token_ids(ids)
    ) + streamed + detokenizer.finish() == BYTE_LEVEL.decode(ids + ids)


def test_partial_character_of_the_prompt_is_completed_once() -> None:
    euro = "a€".encode()
    assert stream(BYTE_LEVEL, [*euro[:-1]], [[euro[-1]], [ord("b")]]) == "€b"
    assert stream(BYTE_LEVEL, [*"a\ufffd".encode()], [[ord("b")]]) == "b"


def test_space_after_a_special_token_is_preserved() -> None:
    ids = BYTE_FALLBACK.encode("ab ab")
    assert stream(BYTE_FALLBACK, [*ids[:1], *[1] * 40], [[token] for token in ids[1:]]) == " ab"


def first_stop(text: str, stops: list[str]) -> tuple[str, int, int] | None:
    """The stop string that ends first in the text, and of those that end there the longest; with its start and end.
    Found by a look at the end of every prefix.
    """
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return stop, end - len(stop), end
    return None


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), text=st.text(st.sampled_from("ab€😀"), max_size=30), stops=STOPS)
def test_stop_finder_finds_the_first_stop_in_any_split(data: st.DataObject, text: str, stops: list[str]) -> None:
    finder = StopFinder(stops)
    hit = None
    for piece in data.draw(split([*map(ord, text)])):
        chars_before = finder._chars_read
        hit = finder.find("".join(map(chr, piece)))
        if hit:
            assert chars_before < hit.end <= chars_before + len(piece)
            break
    assert (hit and (hit.stop, hit.start, hit.end)) == first_stop(text, stops)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), text=st.text(st.sampled_from("ab€😀"), max_size=30), stops=STOPS, include=st.booleans())
def test_streamed_text_ends_at_the_stop_string(data: st.DataObject, text: str, stops: list[str], include: bool) -> None:
    stopped = StoppedText(BYTE_LEVEL, [], stops, include_stop=include)
    expected = first_stop(text, stops)
    expected_text = text if expected is None else text[: expected[2 if include else 1]]
    streamed = ""
    for piece in data.draw(split(BYTE_LEVEL.encode(text))):
        streamed += stopped.push(piece)
        assert expected_text.startswith(streamed)
        assert stopped.num_sent_chars == len(streamed)
    assert streamed + stopped.finish() == expected_text
    assert (stopped.hit is None) == (expected is None)


MARK = "<eos>"


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    data=st.data(),
    texts=st.lists(st.text(st.sampled_from("ab€😀"), max_size=8), min_size=1, max_size=5),
    stops=STOPS,
    include=st.booleans(),
)
def test_visible_special_tokens_do_not_change_the_stop_position(
    data: st.DataObject, texts: list[str], stops: list[str], include: bool
) -> None:
    """A special token stands between any two texts. In any split, the output is cut where the text without special
    tokens would be cut, and contains the special tokens before that position.
    """
    text = "".join(texts)
    expected = first_stop(text, stops)
    visible_length = len(text) if expected is None else expected[2 if include else 1]
    expected_text, at = text[: min(len(texts[0]), visible_length)], len(texts[0])
    ids = BYTE_LEVEL.encode(texts[0])
    for piece in texts[1:]:
        hit_by_now = expected is not None and expected[2] <= at
        expected_text += (MARK if at <= visible_length and not hit_by_now else "") + text[
            at : max(at, min(at + len(piece), visible_length))
        ]
        ids, at = [*ids, EOS, *BYTE_LEVEL.encode(piece)], at + len(piece)
    stopped = StoppedText(BYTE_LEVEL, [], stops, include_stop=include, special_token_names={EOS: MARK})
    streamed = ""
    for piece in data.draw(split(ids)):
        streamed += stopped.push(piece)
        assert expected_text.startswith(streamed)
    assert streamed + stopped.finish() == expected_text


def test_text_that_cannot_begin_a_stop_is_not_buffered() -> None:
    stopped = StoppedText(BYTE_LEVEL, [], ["END"])
    assert [stopped.push(piece.encode()) for piece in ("xE", "N", "N", "aEN", "D..")] == ["x", "", "ENN", "a", ""]


def test_token_text_returns_the_raw_bytes() -> None:
    assert BYTE_LEVEL.token_text(ord("a")) == ("a", b"a")
    assert BYTE_LEVEL.token_text(0xE2) == ("\ufffd", b"\xe2")
    assert BYTE_LEVEL.token_text(EOS) == ("<eos>", b"<eos>")
    assert BYTE_FALLBACK.token_text(3 + 0xE2) == ("\ufffd", b"\xe2")
    assert [BYTE_FALLBACK.token_text(i)[0] for i in BYTE_FALLBACK.encode("ab ab\n")] == [" ab", " ab", "\n"]


def test_load_error_names_the_missing_file_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer at .*tokenizer.json: set tokenizer_path"):
        TextTokenizer.load(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(ConfigError, match="not a tokenizer this version can read"):
        TextTokenizer.load(str(tmp_path))
    BYTE_LEVEL._tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert TextTokenizer.load(str(tmp_path)).decode([*b"hello"]) == "hello"
