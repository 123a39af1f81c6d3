"""`TokenFloor` gives a lower bound of a text's number of tokens. The bound is 0 for a tokenizer that may drop text."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from cluster.tokenizer.token_floor import NFC_SHRINK_FACTOR, TokenFloor

SAMPLE = ["the quick brown fox  jumps over the lazy dog    \n\n    and again the fox, ünïcödé ﬁne 日本語 日本語"] * 4


def byte_level(normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(SAMPLE, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "a", "b", "▁▁", "ab"]
    model = models.BPE(
        vocab={token: at for at, token in enumerate(tokens)},
        merges=[("▁", "▁"), ("a", "b")],
        byte_fallback=True,
        unk_token="<0x00>",
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


BYTE_TOKENIZERS = {
    "byte level": byte_level(),
    "byte level, NFC": byte_level(normalizers.NFC()),
    "byte fallback": byte_fallback(),
}
TEXTS = st.text() | st.text(st.sampled_from("ab ▁\u212a\u0301e<|end|>\n"), max_size=80)


@pytest.mark.parametrize("name", BYTE_TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_lower_bound_never_exceeds_the_token_count(name: str, text: str) -> None:
    tokenizer = BYTE_TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert TokenFloor.from_tokenizer(tokenizer).lower_bound(text) <= len(ids)


@pytest.mark.parametrize("name", BYTE_TOKENIZERS)
def test_lower_bound_of_a_long_text_is_large(name: str) -> None:
    assert TokenFloor.from_tokenizer(BYTE_TOKENIZERS[name]).lower_bound("ab" * 100_000) > 1000


def test_nfc_shrinks_a_character_by_at_most_nfc_shrink_factor() -> None:
    for point in range(0x30000):  # no character beyond it has a decomposition
        character = chr(point)
        if 0xD800 <= point < 0xE000:
            continue
        composed, decomposed = unicodedata.normalize("NFC", character), unicodedata.normalize("NFD", character)
        for spelling in (character, decomposed):
            assert len(spelling.encode()) <= NFC_SHRINK_FACTOR * len(composed.encode())


def lossy_tokenizers() -> dict[str, Tokenizer]:
    lstrip_tokenizer = byte_level()
    lstrip_tokenizer.add_special_tokens([AddedToken("<mask>", special=True, lstrip=True)])
    splitting_tokenizer = byte_level()
    splitting_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    word_level_tokenizer = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    return {
        "a token that strips blanks before it": lstrip_tokenizer,
        "a pre-tokenizer that drops blanks": splitting_tokenizer,
        "a word-level model": word_level_tokenizer,
        "a normalizer that strips": byte_level(normalizers.Strip()),
        "a vocabulary without bytes": Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[])),
    }


@pytest.mark.parametrize("name", lossy_tokenizers())
def test_lower_bound_is_zero_for_tokenizers_that_may_drop_text(name: str) -> None:
    assert TokenFloor.from_tokenizer(lossy_tokenizers()[name]).lower_bound(" " * 1_000_000) == 0
