"""The tokens of a model as bytes, and masks over them. Compiling a grammar needs nothing else from the tokenizer."""

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
SPECIAL_TOKEN_PREFIX = b"\xff"
Bitmask = NDArray[np.int32]  # a mask: token i is bit i % 32 of word i // 32; the bit is set if the token is allowed
TokenIds = NDArray[np.int64]
BITS_OF_OCTET = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1, dtype=np.uint8)


def allowed_token_ids(bitmask: Bitmask) -> TokenIds:
    """Return the ids of the tokens that a mask allows, ascending. The mask's zero words cost almost no time."""
    nonzero_words = np.flatnonzero(bitmask)
    bit_positions = np.flatnonzero(np.unpackbits(bitmask[nonzero_words].view(np.uint8), bitorder="little"))
    return nonzero_words[bit_positions // WORD_BITS] * WORD_BITS + bit_positions % WORD_BITS


def random_allowed_token(bitmask: Bitmask, random: np.random.Generator) -> int:
    """Return a random one of the tokens that a nonempty mask allows. It is ten times faster than listing them all."""
    octets = bitmask.view(np.uint8)
    cumulative_counts = np.cumsum(BITS_OF_OCTET[octets], dtype=np.int64)
    choice = int(random.integers(cumulative_counts[-1]))
    octet = int(np.searchsorted(cumulative_counts, choice, side="right"))
    set_bits = np.flatnonzero(np.unpackbits(octets[octet : octet + 1], bitorder="little"))
    return octet * 8 + int(set_bits[choice - int(cumulative_counts[octet])])


@dataclass(frozen=True)
class Vocabulary:
    """`tokens[i]` is the bytes that token i writes, for each of the model's logits.

    The bytes are empty for tokens that no grammar allows as text: ids beyond the tokenizer's, and `stop_token_ids`, the
    ids that end an output. The bytes of a special token are `SPECIAL_TOKEN_PREFIX` and the token's name.
    `SPECIAL_TOKEN_PREFIX` is a byte that occurs in no text, so a grammar can allow a special token only by its id.
    """

    tokens: tuple[bytes, ...]
    stop_token_ids: tuple[int, ...]

    @classmethod
    def from_tokenizer(cls, tokenizer: TextTokenizer, vocab_size: int, stop_token_ids: Iterable[int]) -> Self:
        """Return the vocabulary of a model with `vocab_size` logits whose outputs end with one of `stop_token_ids`.

        Raises:
            ConfigError: the bytes that a token of this tokenizer writes depend on neighbouring tokens.
        """
        if not tokenizer.has_exact_token_bytes:
            raise ConfigError(
                "constrained output needs a byte-level or SentencePiece tokenizer (in tokenizer.json a decoder with "
                "ByteLevel, ByteFallback or Metaspace); this model's joins its tokens in another way"
            )
        valid_stop_ids = tuple(sorted({stop for stop in stop_token_ids if 0 <= stop < vocab_size}))
        texts = [b""] * vocab_size
        for token in tokenizer.visible_token_ids(range(vocab_size)):
            texts[token] = b"" if token in valid_stop_ids else tokenizer.token_text(token)[1]
        for token, name in tokenizer.special_tokens.items():
            if token < vocab_size and token not in valid_stop_ids:
                texts[token] = SPECIAL_TOKEN_PREFIX + name.encode()
        return cls(tuple(texts), valid_stop_ids)

    def prepare(self) -> Self:
        """Make the cached tables now, so that neither this process nor its forks make them later. Return `self`."""
        for table in (
            self.tokenizer_info,
            self.stop_bitmask,
            self.usable_bitmask,
            self._ranks,
            self._max_token_length,
            self._first_bytes,
        ):
            assert table is not None
        return self

    @property
    def bitmask_words(self) -> int:
        """The number of 32-bit words in a mask."""
        return -(-len(self.tokens) // WORD_BITS)

    @cached_property
    def tokenizer_info(self) -> "TokenizerInfo":
        """The vocabulary as xgrammar's `TokenizerInfo`, made on first use, because importing xgrammar takes seconds."""
        from xgrammar import TokenizerInfo, VocabType

        stop_token_ids = list(self.stop_token_ids)
        return TokenizerInfo(
            list(self.tokens), VocabType.RAW, vocab_size=len(self.tokens), stop_token_ids=stop_token_ids
        )

    def tokenize_greedily(self, text: bytes) -> list[int]:
        """Split a text greedily into the longest matching tokens. Leave out the rest where no token matches."""
        token_ids: list[int] = []
        position = 0
        while position < len(text):
            sizes = range(min(self._max_token_length, len(text) - position), 0, -1)
            size = next((size for size in sizes if text[position : position + size] in self._token_id_of_bytes), 0)
            if not size:
                break
            token_ids.append(self._token_id_of_bytes[text[position : position + size]])
            position += size
        return token_ids

    def common_prefix(self, bitmask: Bitmask) -> bytes:
        """Return the longest text such that every allowed token of a mask begins with this text or is a prefix of it.
        The text is empty if the mask is empty, or allows a stop token or a special token.

        If an allowed token is only a prefix, the grammar may allow other texts after this token.
        """
        nonzero_words = np.flatnonzero(bitmask)
        if not len(nonzero_words) or (bitmask & self.stop_bitmask).any():
            return b""
        first_byte = self.tokens[int(nonzero_words[0]) * WORD_BITS + _lowest_bit(bitmask[nonzero_words[0]])][:1]
        if not first_byte or (bitmask & self._bitmask_without(first_byte)).any():
            return b""  # the common case: an allowed token has another first byte, so no other check is needed
        ranks = self._ranks[allowed_token_ids(bitmask)]
        last: bytes = self.tokens[self._sorted_token_ids[ranks.max()]]
        if last.startswith(SPECIAL_TOKEN_PREFIX) and len(last) > 1:
            return b""
        # The tokens are compared with `last` in sorted order. A token that is a prefix of `last` is skipped. The first
        # token that is no prefix differs from `last` at the end of the common prefix.
        while len(ranks):
            first: bytes = self.tokens[self._sorted_token_ids[ranks.min()]]
            if not last.startswith(first):
                return last[: next(length for length, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)]
            ranks = ranks[ranks > ranks.min()]
        return last

    def _bitmask_without(self, first_byte: bytes) -> Bitmask:
        """Return a mask of the tokens that do not begin with this byte, including tokens that write nothing."""
        bitmask = self._bitmasks_without.get(first_byte)
        if bitmask is None:
            bitmask = self._bitmasks_without[first_byte] = ~self._bitmask_of(
                np.flatnonzero(self._first_bytes == first_byte[0])
            )
        return bitmask

    @cached_property
    def _first_bytes(self) -> NDArray[np.int16]:
        """The first byte of each token; -1 for a token that writes nothing."""
        return np.array([text[0] if text else -1 for text in self.tokens], np.int16)

    @cached_property
    def _bitmasks_without(self) -> dict[bytes, Bitmask]:
        return {}

    @cached_property
    def _sorted_token_ids(self) -> TokenIds:
        """The tokens sorted by their bytes."""
        return np.array(sorted(range(len(self.tokens)), key=self.tokens.__getitem__), np.int64)

    @cached_property
    def _ranks(self) -> TokenIds:
        """The position of each token in `_sorted_token_ids`."""
        ranks = np.empty(len(self.tokens), np.int64)
        ranks[self._sorted_token_ids] = np.arange(len(self.tokens))
        return ranks

    @cached_property
    def _token_id_of_bytes(self) -> dict[bytes, int]:
        """The lowest token id that writes each text."""
        return {text: token for token, text in reversed([*enumerate(self.tokens)]) if text}

    @cached_property
    def _max_token_length(self) -> int:
        return max(map(len, self._token_id_of_bytes), default=0)

    @cached_property
    def stop_bitmask(self) -> Bitmask:
        """A mask that allows only `stop_token_ids`."""
        return self._bitmask_of(self.stop_token_ids)

    @cached_property
    def usable_bitmask(self) -> Bitmask:
        """A mask of the tokens that a grammar without special tokens may allow: text tokens and stop tokens."""
        return (
            self._bitmask_of(token for token, text in enumerate(self.tokens) if self._is_text(text)) | self.stop_bitmask
        )

    def usable_bitmask_with(self, special_token_ids: Iterable[int]) -> Bitmask:
        """Return `usable_bitmask` with these special tokens added."""
        return self.usable_bitmask | self._bitmask_of(
            token for token in special_token_ids if 0 <= token < len(self.tokens)
        )

    @staticmethod
    def _is_text(text: bytes) -> bool:
        return bool(text) and not (text.startswith(SPECIAL_TOKEN_PREFIX) and len(text) > 1)

    def _bitmask_of(self, tokens: "Iterable[int] | TokenIds") -> Bitmask:
        """Return the mask that allows these tokens."""
        bits = np.zeros(self.bitmask_words * WORD_BITS, np.bool_)
        bits[tokens if isinstance(tokens, np.ndarray) else np.fromiter(tokens, np.int64)] = True
        return np.packbits(bits, bitorder="little").view(np.dtype("<i4"))


def _lowest_bit(word: np.int32) -> int:
    value = int(word)
    return (value & -value).bit_length() - 1
