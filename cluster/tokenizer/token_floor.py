"""A lower bound on the number of tokens of a text, without encoding it.

No token covers more bytes than the longest token of the vocabulary, or more letters than the token that has most
letters. So the number of tokens is at least max(bytes / bytes_per_token, letters / letters_per_token). With this bound,
a megabyte of text that cannot fit into a small context is refused in a millisecond; encoding it takes seconds. The
bound holds for BPE over all bytes: its tokens spell every byte of the text. For a tokenizer that may drop text, or turn
text of any length into one unknown token, the bound is 0.
"""

import json
import string
from collections.abc import Iterator
from typing import Any, Self

from tokenizers import Tokenizer

from cluster.tokenizer.tokenizer import BYTE_OF_CHARACTER

LETTERS = string.ascii_letters.encode() + bytes(range(0x80, 0x100))  # each byte beyond ASCII counts as a letter
NFC_SHRINK_FACTOR = 3  # NFC turns at most 3 bytes of UTF-8 into 1: the Kelvin sign into K
LOSSLESS_PRE_TOKENIZERS = frozenset({"ByteLevel", "Metaspace", "Split", "Digits", "Sequence"})


class TokenFloor:
    """A lower bound on the number of tokens of a text, for one tokenizer. It is computed from the most bytes and the
    most letters that one token covers. Both are 0 if the tokenizer has no such limit; the bound is then 0 too.
    """

    def __init__(self, bytes_per_token: int, letters_per_token: int) -> None:
        self._bytes_per_token = bytes_per_token
        self._letters_per_token = letters_per_token

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> Self:
        """Derive the bound from a tokenizer's vocabulary, normalizer and pre-tokenizer."""
        shrink_factor = _shrink_factor(tokenizer)
        if not shrink_factor:
            return cls(0, 0)
        added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        byte_level = _is_byte_level(tokenizer)
        max_bytes = max_letters = 0
        for token in tokenizer.get_vocab(with_added_tokens=True):
            is_plain_text = token in added or not byte_level
            raw = token.encode() if is_plain_text else bytes(BYTE_OF_CHARACTER.get(character, 0) for character in token)
            max_bytes = max(max_bytes, len(raw))
            max_letters = max(max_letters, _count_letters(raw))
        return cls(shrink_factor * max_bytes, shrink_factor * max_letters)

    def lower_bound(self, text: str) -> int:
        """Return a lower bound on the number of tokens of the text."""
        if not self._bytes_per_token:
            return 0
        raw = text.encode("utf-8", "replace")
        min_tokens = -(-len(raw) // self._bytes_per_token)  # rounded up
        return (
            max(min_tokens, -(-_count_letters(raw) // self._letters_per_token))
            if self._letters_per_token
            else min_tokens
        )


def _count_letters(raw: bytes) -> int:
    return len(raw) - len(raw.translate(None, LETTERS))


def _shrink_factor(tokenizer: Tokenizer) -> int:
    """Return the factor by which the normalizer may shorten a text, or 0 if the tokenizer may drop text."""
    if type(tokenizer.model).__name__ != "BPE":
        return 0
    if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
        return 0  # such a token absorbs any length of white space next to it
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    names = BYTE_OF_CHARACTER if _is_byte_level(tokenizer) else [f"<0x{byte:02X}>" for byte in range(256)]
    if not all(name in vocabulary for name in names):
        return 0
    if not (_is_byte_level(tokenizer) or tokenizer.model.byte_fallback):
        return 0
    for node in _nodes(tokenizer.pre_tokenizer):
        if node["type"] not in LOSSLESS_PRE_TOKENIZERS or node.get("behavior") == "Removed":
            return 0
    factor = 1
    for node in _nodes(tokenizer.normalizer):
        if node["type"] == "NFC":
            factor *= NFC_SHRINK_FACTOR
        elif node["type"] == "Replace":
            pattern = node["pattern"].get("String")
            if pattern is None or len(node["content"].encode()) < len(pattern.encode()):
                return 0
        elif node["type"] not in ("Prepend", "Sequence"):
            return 0
    return factor


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    return any(node["type"] == "ByteLevel" for node in _nodes(tokenizer.pre_tokenizer))


def _nodes(component: Any) -> Iterator[dict[str, Any]]:
    """Yield the JSON of a tokenizer's component, and of all components inside it."""
    pending = [json.loads(component.__getstate__())] if component is not None else []
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending.extend(node)
        elif isinstance(node, dict):
            if isinstance(node.get("type"), str):
                yield node
            pending.extend(value for value in node.values() if isinstance(value, list | dict))
