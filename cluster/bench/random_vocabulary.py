"""Random vocabularies with the size and the composition of real ones.

The cost of a grammar depends on the number of tokens, and on how many tokens are not ASCII, begin with a space, or
contain JSON's punctuation. The shares here follow Gemma-3's vocabulary of 262,144 tokens.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from string import ascii_lowercase, punctuation
from typing import Any

from cluster.tokenizer.tokenizer import BYTE_OF_CHARACTER

BYTE_LEVEL_SIZE, SENTENCE_PIECE_SIZE = 151_936, 262_144
"""Sizes of Qwen's vocabulary, which is byte-level, and of Gemma's, which follows SentencePiece."""
STOP_TOKEN_ID = 0
"""The id of the token that ends an output."""
STOP_TOKEN_NAME = "<|end|>"
SPACE_MARK = "\u2581"
BYTE_LEVEL_OPTIONS = ("add_prefix_space", "trim_offsets", "use_regex")
ADDED_TOKEN_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized")
CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool | tojson }}</tool>\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
)
MAX_WHITESPACE_RUN = 31  # length of the longest token of only spaces, tabs or new lines
PUNCTUATION_SHARE = 0.02  # share of tokens that are one to three ASCII punctuation characters
SINGLE_LETTER_SHARE = 0.07  # share of tokens that are one letter of a script with many letters
LATIN_SHARE = 0.6  # share of Latin words among all remaining tokens, which are words
CAPITALISED_SHARE = 0.25  # share of Latin words that begin with a capital
LEADING_SPACE_SHARE = 0.58  # share of words with a leading space; Chinese words have none
SCRIPT_BLOCKS = (
    (0.28, 0x0430, 0x0450),
    (0.14, 0x0627, 0x064A),
    (0.12, 0x0915, 0x094D),
    (0.06, 0x0E01, 0x0E3A),
    (0.14, 0xAC00, 0xB400),
    (0.26, 0x4E00, 0x5600),
)
"""The other scripts: share of the words that are not Latin, first and last code point."""
LETTER_BLOCKS = ((0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0x00C0, 0x024F), (0x0370, 0x0580), (0x0900, 0x0E7F))
ONSETS = (*"bcdfghjklmnprstvw", "qu", "st", "tr", "con", "re", "pro")
RHYMES = (*"aeiou", "ai", "ea", "ou", "er", "or", "an", "en", "al", "on", "it")
PUNCTUATION_POOL = punctuation + 4 * '"",:{}[]'  # JSON's punctuation is drawn more often, as it is in text and code
WORD_ENDINGS = (
    "",
    "",
    *"nstdrlm",
    "ck",
    "nd",
    "nt",
    "st",
    "able",
    "ate",
    "ed",
    "er",
    "ing",
    "ion",
    "ity",
    "ly",
    "ment",
)


def random_tokens(size: int, seed: int = 0) -> list[bytes]:
    """Return the bytes of each of `size` distinct tokens, the same in every run. The first, `STOP_TOKEN_ID`, is empty.
    Then follow all single bytes, runs of white space, single characters after a space, punctuation, letters, and words
    of seven scripts.
    """
    rng = Random(seed)
    tokens = dict.fromkeys([b"", *(bytes((byte,)) for byte in range(256))])

    def add(texts: Iterable[str]) -> None:
        tokens.update(dict.fromkeys(text.encode() for text in texts))

    for character in " \t\n":
        add(character * length for length in range(1, MAX_WHITESPACE_RUN + 1))
    add(
        f" {character_after_space}" for character_after_space in ascii_lowercase + ascii_lowercase.upper() + punctuation
    )
    add("".join(rng.choices(PUNCTUATION_POOL, k=rng.randint(1, 3))) for _ in range(int(PUNCTUATION_SHARE * size)))
    letters = (chr(code_point) for first, last in LETTER_BLOCKS for code_point in range(first, last + 1))
    add(islice(letters, int(SINGLE_LETTER_SHARE * size)))
    while (missing := size - len(tokens)) > 0:
        add(_latin_words(rng, int(LATIN_SHARE * missing) + 1))
        for share, first, last in SCRIPT_BLOCKS:
            add(_script_words(rng, int((1 - LATIN_SHARE) * share * missing), first, last))
    return list(tokens)[:size]


def _latin_words(rng: Random, count: int) -> Iterator[str]:
    for _ in range(count):
        word = "".join(rng.choice(ONSETS) + rng.choice(RHYMES) for _ in range(rng.choice((1, 1, 1, 2, 2, 3))))
        word += rng.choice(WORD_ENDINGS)
        yield " " * (rng.random() < LEADING_SPACE_SHARE) + (
            word.capitalize() if rng.random() < CAPITALISED_SHARE else word
        )


def _script_words(rng: Random, count: int, first: int, last: int) -> Iterator[str]:
    chinese = first == 0x4E00
    for _ in range(count):
        length = rng.choice((2, 2, 3)) if chinese else rng.randint(2, 6)
        word = "".join(chr(rng.randint(first, last)) for _ in range(length))
        yield " " * (not chinese and rng.random() < LEADING_SPACE_SHARE) + word


def write_tokenizer(folder: Path, tokens: Sequence[bytes], byte_level: bool) -> None:
    """Write a `tokenizer.json` of these tokens, and a `tokenizer_config.json` with a chat template. The tokenizer is
    byte-level like Qwen's or, if not `byte_level`, follows SentencePiece's rules like Gemma's.

    It has no merges, so it encodes a text as single letters or bytes.
    """
    token_names = [_byte_level(token) if byte_level else _sentence_piece(token) for token in tokens]
    token_names[STOP_TOKEN_ID] = STOP_TOKEN_NAME
    vocab = {name: token_id for token_id, name in enumerate(token_names)}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": not byte_level}
    if byte_level:
        pre_tokenizer: dict[str, Any] | None = {
            "type": "ByteLevel",
        } | dict.fromkeys(BYTE_LEVEL_OPTIONS, False)
        normalizer, decoder = None, pre_tokenizer
    else:
        pre_tokenizer, normalizer = None, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
        replacements = [
            {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
            {"type": "ByteFallback"},
        ]
        decoder = {"type": "Sequence", "decoders": [*replacements, {"type": "Fuse"}]}
    added_tokens = [
        {"id": STOP_TOKEN_ID, "content": STOP_TOKEN_NAME, "special": True} | dict.fromkeys(ADDED_TOKEN_OPTIONS, False)
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": added_tokens,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
    }
    tokenizer |= {"post_processor": None, "decoder": decoder, "model": model, "truncation": None, "padding": None}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": STOP_TOKEN_NAME,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _byte_level(token: bytes) -> str:
    return "".join(CHARACTER_OF_BYTE[byte] for byte in token)


def _sentence_piece(token: bytes) -> str:
    if len(token) == 1 and not (0x20 <= token[0] < 0x7F):
        return f"<0x{token[0]:02X}>"
    return token.decode().replace(" ", SPACE_MARK)
