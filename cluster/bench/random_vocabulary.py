"""Random vocabularies with the size and the composition of real ones.

The cost of a grammar depends on the number of tokens and on how many are not ASCII, begin with a space, or contain
JSON's punctuation. The shares here follow Gemma-3's vocabulary of 262,144 tokens.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from string import ascii_lowercase, punctuation
from typing import Any

from cluster.tokenizer.tokenizer import BYTE_OF_CHARACTER

BYTE_LEVEL, SENTENCE_PIECE = 151_936, 262_144
"""Sizes of Qwen's and of Gemma's vocabulary. A token of Qwen's may be a part of a character; no token of Gemma's is."""
STOP = 0
"""The token that ends an output."""
NAME_OF_STOP = "<|end|>"
SPACE = "\u2581"
OPTIONS = ("add_prefix_space", "trim_offsets", "use_regex")
ADDED = ("single_word", "lstrip", "rstrip", "normalized")
CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool | tojson }}</tool>\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
)
RUN = 31  # length of the longest token of only spaces, tabs or new lines
MARKS = 0.02  # share of tokens that are one to three ASCII punctuation characters
LETTERS = 0.07  # share of tokens that are one letter of a script with many letters
LATIN = 0.6  # share of Latin words among the remaining tokens
CAPITALS = 0.25  # share of Latin words with a capital
SPACED = 0.58  # share of words with a leading space
BLOCKS = (
    (0.28, 0x0430, 0x0450),
    (0.14, 0x0627, 0x064A),
    (0.12, 0x0915, 0x094D),
    (0.06, 0x0E01, 0x0E3A),
    (0.14, 0xAC00, 0xB400),
    (0.26, 0x4E00, 0x5600),
)
"""Other scripts: share of words, first and last code point. Chinese words have no leading space."""
LETTER_BLOCKS = ((0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0x00C0, 0x024F), (0x0370, 0x0580), (0x0900, 0x0E7F))
ONSETS = (*"bcdfghjklmnprstvw", "qu", "st", "tr", "con", "re", "pro")
RHYMES = (*"aeiou", "ai", "ea", "ou", "er", "or", "an", "en", "al", "on", "it")
JSON_MARKS = punctuation + 4 * '"",:{}[]'  # JSON's punctuation is drawn more often, as it is in text and code
ENDS = ("", "", *"nstdrlm", "ck", "nd", "nt", "st", "able", "ate", "ed", "er", "ing", "ion", "ity", "ly", "ment")


def made_up_tokens(size: int, seed: int = 0) -> list[bytes]:
    """Return the bytes of each of `size` distinct tokens, the same in every run: empty for `STOP`, then all single
    bytes, runs of white space, punctuation, letters, and words of seven scripts.
    """
    dice = Random(seed)
    found = dict.fromkeys([b"", *(bytes((byte,)) for byte in range(256))])

    def add(texts: Iterable[str]) -> None:
        found.update(dict.fromkeys(text.encode() for text in texts))

    for white in " \t\n":
        add(white * times for times in range(1, RUN + 1))
    add(f" {mark}" for mark in ascii_lowercase + ascii_lowercase.upper() + punctuation)
    add("".join(dice.choices(JSON_MARKS, k=dice.randint(1, 3))) for _ in range(int(MARKS * size)))
    letters = (chr(code) for first, last in LETTER_BLOCKS for code in range(first, last + 1))
    add(islice(letters, int(LETTERS * size)))
    while (missing := size - len(found)) > 0:
        add(_latin(dice, int(LATIN * missing) + 1))
        for share, first, last in BLOCKS:
            add(_words(dice, int((1 - LATIN) * share * missing), first, last))
    return list(found)[:size]


def _latin(dice: Random, count: int) -> Iterator[str]:
    for _ in range(count):
        word = "".join(dice.choice(ONSETS) + dice.choice(RHYMES) for _ in range(dice.choice((1, 1, 1, 2, 2, 3))))
        word += dice.choice(ENDS)
        yield " " * (dice.random() < SPACED) + (word.capitalize() if dice.random() < CAPITALS else word)


def _words(dice: Random, count: int, first: int, last: int) -> Iterator[str]:
    chinese = first == 0x4E00
    for _ in range(count):
        length = dice.choice((2, 2, 3)) if chinese else dice.randint(2, 6)
        word = "".join(chr(dice.randint(first, last)) for _ in range(length))
        yield " " * (not chinese and dice.random() < SPACED) + word


def write_tokenizer(folder: Path, tokens: Sequence[bytes], byte_level: bool) -> None:
    """Write a `tokenizer.json` of these tokens: byte-level like Qwen's, or by SentencePiece's rules like Gemma's.

    It has no merges, so it encodes a text as single letters or bytes.
    """
    names = [_byte_level(token) if byte_level else _spaced(token) for token in tokens]
    names[STOP] = NAME_OF_STOP
    vocab = {name: at for at, name in enumerate(names)}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": not byte_level}
    if byte_level:
        before: dict[str, Any] | None = {
            "type": "ByteLevel",
        } | dict.fromkeys(OPTIONS, False)
        normalizer, decoder = None, before
    else:
        before, normalizer = None, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        parts = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}]
        decoder = {"type": "Sequence", "decoders": [*parts, {"type": "Fuse"}]}
    added = [{"id": STOP, "content": NAME_OF_STOP, "special": True} | dict.fromkeys(ADDED, False)]
    whole = {"version": "1.0", "added_tokens": added, "normalizer": normalizer, "pre_tokenizer": before}
    whole |= {"post_processor": None, "decoder": decoder, "model": model, "truncation": None, "padding": None}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(whole), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": NAME_OF_STOP, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _byte_level(token: bytes) -> str:
    return "".join(CHARACTER_OF_BYTE[byte] for byte in token)


def _spaced(token: bytes) -> str:
    if len(token) == 1 and not (0x20 <= token[0] < 0x7F):
        return f"<0x{token[0]:02X}>"
    return token.decode().replace(" ", SPACE)
