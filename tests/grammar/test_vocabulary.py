"""Tests of `Vocabulary`: the bytes of each token are the text that the tokenizer decodes.

Special tokens have no text.
"""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from cluster.config import ConfigError
from cluster.grammar.vocabulary import SPECIAL_TOKEN_PREFIX, Vocabulary
from cluster.tokenizer.tokenizer import TextTokenizer
from tests.grammar.walks import DEMO, STOP_TOKEN_IDS, allowed
from tests.unit.tokenizer.test_tokenizer import byte_fallback, byte_level

TOKENIZERS = {"demo": lambda: TextTokenizer.load(str(DEMO)), "byte-level": byte_level, "byte-fallback": byte_fallback}


def first_letter(tokenizer: TextTokenizer) -> int:
    """Return the id of the token `a`."""
    token_id = tokenizer.backend_tokenizer.token_to_id("a")
    assert token_id is not None
    return int(token_id)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_vocabulary_bytes_of_each_token_equal_the_decoded_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    size = tokenizer.backend_tokenizer.get_vocab_size()
    vocabulary = Vocabulary.from_tokenizer(tokenizer, size, ())
    special = {i for i, token in tokenizer.backend_tokenizer.get_added_tokens_decoder().items() if token.special}
    letter_id = first_letter(tokenizer)  # goes first, because decoding may strip a space at the start
    for token in range(size):
        token_bytes = vocabulary.tokens[token]
        assert token_bytes.startswith(SPECIAL_TOKEN_PREFIX) == (token in special) or len(token_bytes) == 1, token
        if token in special:
            assert token_bytes == SPECIAL_TOKEN_PREFIX + str(tokenizer.backend_tokenizer.id_to_token(token)).encode()
            continue
        decoded = tokenizer.backend_tokenizer.decode([letter_id, token], skip_special_tokens=True)
        assert decoded == "a" + token_bytes.decode("utf-8", "replace")
        assert token_bytes in (b"", vocabulary.tokenizer_info.decoded_vocab[token])


@pytest.mark.parametrize("name", TOKENIZERS)
def test_decoded_sequence_equals_the_joined_token_bytes(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    size = tokenizer.backend_tokenizer.get_vocab_size()
    tokens = Vocabulary.from_tokenizer(tokenizer, size, ()).tokens
    random = np.random.default_rng(3)
    checked_count = 0
    for _ in range(2000):
        ids = [first_letter(tokenizer), *random.integers(0, size, 4).tolist()]
        joined_bytes = b"".join(tokens[i] for i in ids)
        try:
            text = joined_bytes.decode()
        except UnicodeDecodeError:
            continue
        checked_count += 1
        assert tokenizer.decode(ids) == text
    assert checked_count > 20


def test_vocabulary_has_tokens_with_parts_of_a_character() -> None:
    tokenizer = byte_level()
    tokens = Vocabulary.from_tokenizer(tokenizer, 263, ()).tokens
    assert b"".join(tokens[i] for i in tokenizer.encode("a€ 😀")) == "a€ 😀".encode()
    assert any(text == b"\xe2\x82" for text in tokens)


def test_padding_and_stop_tokens_have_no_bytes() -> None:
    tokenizer = TextTokenizer.load(str(DEMO))
    vocabulary = Vocabulary.from_tokenizer(tokenizer, 2100, (*STOP_TOKEN_IDS, 5, 9999))
    assert len(vocabulary.tokens) == 2100 and vocabulary.bitmask_words == 66
    assert not any(vocabulary.tokens[2048:])
    assert [vocabulary.tokens[i] for i in (0, 1, 2, 5)] == [b"", SPECIAL_TOKEN_PREFIX + b"<|im_start|>", b"", b""]
    assert vocabulary.stop_token_ids == (0, 2, 5)
    assert allowed(vocabulary.stop_bitmask).tolist() == [0, 2, 5]
    usable = set(allowed(vocabulary.usable_bitmask).tolist())
    assert usable == {i for i, text in enumerate(vocabulary.tokens) if text} - {1} | {0, 2, 5}
    assert set(allowed(vocabulary.usable_bitmask_with([1])).tolist()) == usable | {1}


def test_vocabulary_may_be_smaller_than_the_tokenizer() -> None:
    assert len(Vocabulary.from_tokenizer(TextTokenizer.load(str(DEMO)), 1000, STOP_TOKEN_IDS).tokens) == 1000


def test_wordpiece_tokenizer_is_refused() -> None:
    wordpiece = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    wordpiece.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="byte-level or SentencePiece"):
        Vocabulary.from_tokenizer(TextTokenizer(wordpiece), 3, (0,))
