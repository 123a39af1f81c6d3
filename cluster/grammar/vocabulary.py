"""The tokens of a model as bytes. Grammars need nothing else from the tokenizer."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from cluster.config import ConfigError
from cluster.tokenizer.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from xgrammar import TokenizerInfo

WORD_BITS = 32
SPECIAL = b"\xff"
Row = NDArray[np.int32]  # a mask: token i is bit i % 32 of word i // 32; the bit is set if the token is allowed
Ids = NDArray[np.int64]
BITS_OF_OCTET = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1, dtype=np.uint8)


def ids_in(row: Row) -> Ids:
    """Return the tokens that a mask allows, in order. Words of the mask that are zero cost almost nothing."""
    words = np.flatnonzero(row)
    at = np.flatnonzero(np.unpackbits(row[words].view(np.uint8), bitorder="little"))
    return words[at // WORD_BITS] * WORD_BITS + at % WORD_BITS


def one_of(row: Row, random: np.random.Generator) -> int:
    """Return a random one of the tokens that a nonempty mask allows. Ten times faster than listing all of them."""
    octets = row.view(np.uint8)
    ends = np.cumsum(BITS_OF_OCTET[octets], dtype=np.int64)
    at = int(random.integers(ends[-1]))
    octet = int(np.searchsorted(ends, at, side="right"))
    bits = np.flatnonzero(np.unpackbits(octets[octet : octet + 1], bitorder="little"))
    return octet * 8 + int(bits[at - int(ends[octet])])


@dataclass(frozen=True)
class Vocabulary:
    """`tokens[i]` is the bytes that token i writes, for each of the model's logits.

    The bytes are empty for tokens that no grammar allows as text: ids beyond the tokenizer's, and `stops`, the ids that
    end an output. The bytes of a special token are `SPECIAL` and the token's name. `SPECIAL` is a byte that occurs in
    no text, so a grammar can allow a special token only by its id.
    """

    tokens: tuple[bytes, ...]
    stops: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: TextTokenizer, vocab_size: int, stops: Iterable[int]) -> Self:
        """Return the vocabulary of a model with `vocab_size` logits whose outputs end with one of `stops`.

        Raises:
            ConfigError: the bytes that a token of this tokenizer writes depend on neighbouring tokens.
        """
        if not tokenizer.byte_wise:
            raise ConfigError(
                "constrained output needs a byte-level or SentencePiece tokenizer (in tokenizer.json a decoder with "
                "ByteLevel, ByteFallback or Metaspace); this model's joins its tokens in another way"
            )
        ends = tuple(sorted({stop for stop in stops if 0 <= stop < vocab_size}))
        texts = [b""] * vocab_size
        for token in tokenizer.textual(range(vocab_size)):
            texts[token] = b"" if token in ends else tokenizer.token_text(token)[1]
        for token, name in tokenizer.special.items():
            if token < vocab_size and token not in ends:
                texts[token] = SPECIAL + name.encode()
        return cls(tuple(texts), ends)

    def prepare(self) -> Self:
        """Make all cached tables now, so that neither this process nor its forks make them later. Return `self`."""
        for table in (self.info, self.stop_row, self.usable_row, self._ranks, self._longest, self._first_bytes):
            assert table is not None
        return self

    @property
    def words(self) -> int:
        """The number of 32-bit words in a mask."""
        return -(-len(self.tokens) // WORD_BITS)

    @cached_property
    def info(self) -> "TokenizerInfo":
        """The vocabulary as xgrammar's `TokenizerInfo`, made on first use, because importing xgrammar takes seconds."""
        from xgrammar import TokenizerInfo, VocabType

        stops = list(self.stops)
        return TokenizerInfo(list(self.tokens), VocabType.RAW, vocab_size=len(self.tokens), stop_token_ids=stops)

    def longest(self, text: bytes) -> list[int]:
        """Split a text greedily into the longest matching tokens. The rest is left out once no token matches."""
        found: list[int] = []
        at = 0
        while at < len(text):
            sizes = range(min(self._longest, len(text) - at), 0, -1)
            size = next((size for size in sizes if text[at : at + size] in self._ids), 0)
            if not size:
                break
            found.append(self._ids[text[at : at + size]])
            at += size
        return found

    def shared(self, row: Row) -> bytes:
        """Return the longest text with which every continuation that a mask allows begins. Every allowed token begins
        with this text, or is a prefix of it. If a stop token or a special token is allowed, the text is empty.
        """
        words = np.flatnonzero(row)
        if not len(words) or (row & self.stop_row).any():
            return b""
        first_byte = self.tokens[int(words[0]) * WORD_BITS + _lowest_bit(row[words[0]])][:1]
        if not first_byte or (row & self._row_without(first_byte)).any():
            return b""  # the common case: two allowed tokens differ in their first byte, so no other check is needed
        ranks = self._ranks[ids_in(row)]
        last: bytes = self.tokens[self._order[ranks.max()]]
        if last.startswith(SPECIAL) and len(last) > 1:
            return b""
        # Tokens are compared in sorted order. A token that is a prefix of `last` is skipped; the first other token
        # bounds the common prefix.
        while len(ranks):
            first: bytes = self.tokens[self._order[ranks.min()]]
            if not last.startswith(first):
                return last[: next(at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)]
            ranks = ranks[ranks > ranks.min()]
        return last

    def _row_without(self, first_byte: bytes) -> Row:
        """Return a mask of the tokens that do not begin with this byte, including tokens that write nothing."""
        found = self._rows_without.get(first_byte)
        if found is None:
            found = self._rows_without[first_byte] = ~self._row_of(np.flatnonzero(self._first_bytes == first_byte[0]))
        return found

    @cached_property
    def _first_bytes(self) -> NDArray[np.int16]:
        """The first byte of each token; -1 for a token that writes nothing."""
        return np.array([text[0] if text else -1 for text in self.tokens], np.int16)

    @cached_property
    def _rows_without(self) -> dict[bytes, Row]:
        return {}

    @cached_property
    def _order(self) -> Ids:
        """The tokens sorted by their bytes."""
        return np.array(sorted(range(len(self.tokens)), key=self.tokens.__getitem__), np.int64)

    @cached_property
    def _ranks(self) -> Ids:
        """The position of each token in `_order`."""
        ranks = np.empty(len(self.tokens), np.int64)
        ranks[self._order] = np.arange(len(self.tokens))
        return ranks

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        """The lowest token id that writes each text."""
        return {text: token for token, text in reversed([*enumerate(self.tokens)]) if text}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=0)

    @cached_property
    def stop_row(self) -> Row:
        """A mask that allows only `stops`."""
        return self._row_of(self.stops)

    @cached_property
    def usable_row(self) -> Row:
        """A mask of the tokens that a grammar without special tokens may allow: tokens that write text, and `stops`."""
        return self._row_of(at for at, text in enumerate(self.tokens) if self._writes(text)) | self.stop_row

    def usable_with(self, special: Iterable[int]) -> Row:
        """Return `usable_row` with these special tokens added."""
        return self.usable_row | self._row_of(token for token in special if 0 <= token < len(self.tokens))

    @staticmethod
    def _writes(text: bytes) -> bool:
        return bool(text) and not (text.startswith(SPECIAL) and len(text) > 1)

    def _row_of(self, tokens: "Iterable[int] | Ids") -> Row:
        """Return the mask that allows these tokens."""
        padded = np.zeros(self.words * WORD_BITS, np.bool_)
        padded[tokens if isinstance(tokens, np.ndarray) else np.fromiter(tokens, np.int64)] = True
        return np.packbits(padded, bitorder="little").view(np.dtype("<i4"))


def _lowest_bit(word: np.int32) -> int:
    value = int(word)
    return (value & -value).bit_length() - 1
