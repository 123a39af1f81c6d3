"""What the tokens of a vocabulary write is what the tokenizer decodes, and special ones write no text."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from cluster.config import ConfigError
from cluster.grammar.vocabulary import SPECIAL_TOKEN_PREFIX, Vocabulary
from cluster.tokenizer.tokenizer import TextTokenizer
from tests.grammar.walks import DEMO, STOPS, allowed
from tests.unit.tokenizer.test_tokenizer import byte_fallback, byte_level

TOKENIZERS = {"demo": lambda: TextTokenizer.load(str(DEMO)), "byte-level": byte_level, "byte-fallback": byte_fallback}


def first_letter(tokenizer: TextTokenizer) -> int:
    found = tokenizer.backend_tokenizer.token_to_id("a")
    assert found is not None
    return int(found)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_vocabulary_bytes_of_each_token_equal_the_decoded_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    size = tokenizer.backend_tokenizer.get_vocab_size()
    vocabulary = Vocabulary.from_tokenizer(tokenizer, size, ())
    special = {i for i, token in tokenizer.backend_tokenizer.get_added_tokens_decoder().items() if token.special}
    before = first_letter(tokenizer)  # so that a space after it is not the first character, which decoding may strip
    for token in range(size):
        written = vocabulary.tokens[token]
        assert written.startswith(SPECIAL_TOKEN_PREFIX) == (token in special) or len(written) == 1, token
        if token in special:
            assert written == SPECIAL_TOKEN_PREFIX + str(tokenizer.backend_tokenizer.id_to_token(token)).encode()
            continue
        decoded = tokenizer.backend_tokenizer.decode([before, token], skip_special_tokens=True)
        assert decoded == "a" + written.decode("utf-8", "replace")
        assert written in (b"", vocabulary.tokenizer_info.decoded_vocab[token])


@pytest.mark.parametrize("name", TOKENIZERS)
def test_decoded_sequence_equals_the_joined_token_bytes(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    size = tokenizer.backend_tokenizer.get_vocab_size()
    tokens = Vocabulary.from_tokenizer(tokenizer, size, ()).tokens
    random = np.random.default_rng(3)
    checked = 0
    for _ in range(2000):
        ids = [first_letter(tokenizer), *random.integers(0, size, 4).tolist()]
        written = b"".join(tokens[i] for i in ids)
        try:
            text = written.decode()
        except UnicodeDecodeError:
            continue
        checked += 1
        assert tokenizer.decode(ids) == text
    assert checked > 20


def test_vocabulary_has_tokens_with_parts_of_a_character() -> None:
    tokenizer = byte_level()
    tokens = Vocabulary.from_tokenizer(tokenizer, 263, ()).tokens
    assert b"".join(tokens[i] for i in tokenizer.encode("a€ 😀")) == "a€ 😀".encode()
    assert any(text == b"\xe2\x82" for text in tokens)


def test_padding_and_stop_tokens_have_no_bytes() -> None:
    tokenizer = TextTokenizer.load(str(DEMO))
    vocabulary = Vocabulary.from_tokenizer(tokenizer, 2100, (*STOPS, 5, 9999))
    assert len(vocabulary.tokens) == 2100 and vocabulary.bitmask_words == 66
    assert not any(vocabulary.tokens[2048:])
    assert [vocabulary.tokens[i] for i in (0, 1, 2, 5)] == [b"", SPECIAL_TOKEN_PREFIX + b"<|im_start|>", b"", b""]
    assert vocabulary.stop_token_ids == (0, 2, 5)
    assert allowed(vocabulary.stop_bitmask).tolist() == [0, 2, 5]
    usable = set(allowed(vocabulary.usable_bitmask).tolist())
    assert usable == {i for i, text in enumerate(vocabulary.tokens) if text} - {1} | {0, 2, 5}
    assert set(allowed(vocabulary.usable_bitmask_with([1])).tolist()) == usable | {1}


def test_vocabulary_may_be_smaller_than_the_tokenizer() -> None:
    assert len(Vocabulary.from_tokenizer(TextTokenizer.load(str(DEMO)), 1000, STOPS).tokens) == 1000


def test_wordpiece_tokenizer_is_refused() -> None:
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="byte-level or SentencePiece"):
        Vocabulary.from_tokenizer(TextTokenizer(words), 3, (0,))
