"""The tokens that a grammar allows next in one request, after committed tokens or after a path of the draft tree."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cluster.grammar.asked import GrammarError
from cluster.grammar.compiled import MaskCompiler
from cluster.grammar.portable import PortableGrammar
from cluster.grammar.vocabulary import WORD_BITS, Row, Vocabulary

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

Encode = Callable[[str], list[int]]
Spell = Callable[[bytes], list[int]]
CACHED_BYTES = 512 << 20  # of cached compiled grammars


class Readable(NamedTuple):
    """A compiled grammar and its size in `bytes`. `usable` is a mask of the tokens that the grammar may allow at some
    position; no other token is ever allowed.
    """

    grammar: "CompiledGrammar"
    usable: Row
    bytes: int


class Matchers:
    """Makes the matchers of one vocabulary. Requests with the same grammar share the compiled grammar. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary, encode: Encode | None = None) -> None:
        """`encode` tokenizes a forced text. If `encode` is None, or its tokens do not spell the text exactly, the text
        is split greedily into the longest matching tokens.
        """
        self._vocabulary, self._encode = vocabulary, encode
        self._compiler = MaskCompiler(vocabulary)
        self._kept: OrderedDict[bytes, Readable] = OrderedDict()
        self._lock = Lock()

    def prepare(self) -> None:
        """Make the tables and common masks now, so that the first grammar does not wait (`MaskCompiler.prepare`)."""
        self._compiler.prepare()

    def matcher(self, portable: str, after: Sequence[int] = ()) -> "TextMatcher":
        """Return a matcher for one request. `portable` comes from `Compiler.compile`; for `after` see `TextMatcher`.

        Raises:
            GrammarError: as `read`.
        """
        return TextMatcher(self.read(portable), self._vocabulary, self._spelled, after)

    def read(self, portable: str) -> "Readable":
        """Return the compiled form of a portable grammar, cached for later matchers.

        Compiling takes hundredths of a second, or seconds for a large grammar.

        Raises:
            GrammarError: this version of xgrammar cannot compile the text.
            MemoryError: there is too little memory.
        """
        key = self._key_of(portable)
        with self._lock:
            found = self._kept.get(key)
        if found is None:
            parts = PortableGrammar.of(portable)
            usable = self._vocabulary.usable_with(parts.tokens) if parts.tokens else self._vocabulary.usable_row
            grammar = self._compiler.compile(parts)
            found = Readable(grammar, usable, grammar.memory_size_bytes)
        with self._lock:
            self._kept[key] = found
            self._kept.move_to_end(key)
            held = sum(each.bytes for each in self._kept.values())
            while held > CACHED_BYTES and len(self._kept) > 1:
                held -= self._kept.popitem(last=False)[1].bytes
        return found

    @staticmethod
    def _key_of(portable: str) -> bytes:
        return hashlib.blake2b(portable.encode()).digest()

    def _spelled(self, raw: bytes) -> list[int]:
        """Return the tokens that the tokenizer writes for these bytes, which may begin or end inside a character."""
        with suppress(UnicodeDecodeError):
            tokens = [] if self._encode is None or not raw else self._encode(raw.decode())
            if b"".join(self._vocabulary.tokens[token] for token in tokens) == raw:
                return tokens
        return self._vocabulary.longest(raw)


class TextMatcher:
    """The state of one request in its grammar. Not thread-safe.

    The grammar begins when the tokens `after`, such as the token that ends the reasoning, have been committed in this
    order; before that, everything is allowed. If `after` is empty, the grammar begins at once.

    A path is a sequence of tokens that may follow the committed tokens. Methods that take a path do not change the
    committed state; they are cheapest if a path begins like the previous path. Masks are cached until tokens are
    committed, because draft, forced text and verify ask for the same paths.
    """

    def __init__(self, compiled: Readable, vocabulary: Vocabulary, spell: Spell, after: Sequence[int]) -> None:
        from xgrammar import GrammarMatcher

        self._matcher, self._spell = GrammarMatcher(compiled.grammar), spell
        self._vocabulary, self._usable = vocabulary, compiled.usable
        self._stops = frozenset(vocabulary.stops)
        self._after = tuple(after)
        self._recent: tuple[int, ...] = ()  # the last committed tokens, to be compared with `after`
        self._free = bool(after)  # the grammar has not begun: everything is allowed
        self._ended = False
        self._masks: dict[tuple[int, ...], Row] = {}
        self._walked: list[int] = []  # uncommitted tokens that xgrammar's matcher has accepted
        self._row: Row = np.zeros(vocabulary.words, np.int32)

    @property
    def finished(self) -> bool:
        """Whether the output may end after the committed tokens, or has ended."""
        return self._ended or (not self._free and self._go(()) and self._matcher.is_completed())

    @property
    def ended(self) -> bool:
        """Whether a stop token has been committed."""
        return self._ended

    def accept(self, tokens: Sequence[int]) -> None:
        """Commit tokens.

        Raises:
            GrammarError: a token is not allowed at its place. The tokens before it stay committed.
        """
        self._masks.clear()
        for token in tokens:
            if self._ended or token in self._stops:
                if not (self._free or self.finished) or token not in self._stops:
                    raise GrammarError(f"token {token} is not allowed by the grammar: the output " + self._state())
                self._ended = True
            elif self._free:
                self._recent = (*self._recent, token)[-len(self._after) :]
                self._free = self._recent != self._after
            # xgrammar's matcher has already accepted this token, as the first token of the latest path.
            elif self._walked[:1] == [token]:
                self._walked.pop(0)
            elif self._go((token,)):
                self._walked.clear()
            else:
                raise GrammarError(f"token {token} is not allowed by the grammar here")

    def fill(self, path: Sequence[int], out: Row) -> None:
        """Write the mask of the tokens allowed after the committed tokens and `path` into `out`, int32
        `[vocabulary.words]`.

        Stop tokens are set exactly where the output may end. If the output has ended, only stop tokens are set. The
        same holds for a path that the grammar does not allow; such a path is never accepted. The mask is empty if the
        grammar continues only with text that no token can begin.
        """
        known = self._masks.get(tuple(path))
        if known is None:
            self._make(path, out)
            self._masks[tuple(path)] = out.copy()
        else:
            out[:] = known

    def _make(self, path: Sequence[int], out: Row) -> None:
        rest = self._constrained(path)
        if rest is None:
            out.fill(-1)
            return
        if not self._goes_on(rest):
            out[:] = self._vocabulary.stop_row
            return
        self._matcher.fill_next_token_bitmask(out)
        np.bitwise_and(out, self._usable, out=out)

    def forced(self, path: Sequence[int], most: int) -> list[int]:
        """Return at most `most` tokens that must follow the committed tokens and `path`, because the grammar allows no
        other text.

        The first tokens are the only possible text, as the tokenizer writes it. Then come tokens, each of which is the
        only token that the mask allows at its position.
        """
        rest = self._constrained(path)
        if rest is None:
            return []
        found = self._spell(self._text_of(path, rest, most))[:most]
        while rest is not None and len(found) < most and self._goes_on([*rest, *found]):
            self.fill([*path, *found], self._row)
            words = np.flatnonzero(self._row)
            # Exactly one bit in the whole mask: one allowed token. The mask with 2**32 - 1 reads the int32 word as
            # unsigned.
            word = int(self._row[words[0]]) & (2**WORD_BITS - 1) if len(words) == 1 else 0
            if word.bit_count() != 1:
                break
            found.append(int(words[0]) * WORD_BITS + word.bit_length() - 1)
        return found

    def _text_of(self, path: Sequence[int], rest: Sequence[int], most: int) -> bytes:
        """Return the only text allowed after `path`, cut to about `most` tokens. The text may begin or end inside a
        character.

        `rest` is the part of `path` that the grammar describes. The text is found token by token from masks, because
        xgrammar's own search for a forced text loops forever if the grammar forces an endless text.
        """
        walked: list[int] = []
        text = sure = b""
        while len(walked) < most and self._goes_on([*rest, *walked]):
            self.fill([*path, *walked], self._row)
            sure = self._vocabulary.shared(self._row)
            token = self._vocabulary.longest(sure)[:1]
            if not token:
                break
            walked += token
            text, sure = text + self._vocabulary.tokens[token[0]], sure[len(self._vocabulary.tokens[token[0]]) :]
        return text + sure

    def _state(self) -> str:
        return "has ended" if self._ended else "may not end here"

    def _constrained(self, path: Sequence[int]) -> Sequence[int] | None:
        """Return the part of a path that the grammar describes, or None if everything is allowed after the path."""
        if not self._free:
            return path
        if self._ended:
            return ()
        recent = self._recent
        for at, token in enumerate(path):
            if token in self._stops:
                return path[at:]
            recent = (*recent, token)[-len(self._after) :]
            if recent == self._after:
                return path[at + 1 :]
        return None

    def _goes_on(self, path: Sequence[int]) -> bool:
        """Whether the grammar allows a path, and the output has not ended before or on this path."""
        return not self._ended and self._stops.isdisjoint(path) and self._go(path)

    def _go(self, path: Sequence[int]) -> bool:
        """Move xgrammar's matcher to the end of a path, which has no stop tokens. Return False if the grammar does not
        allow the path.
        """
        shared = 0
        for mine, asked in zip(self._walked, path, strict=False):
            if mine != asked:
                break
            shared += 1
        if shared < len(self._walked):
            self._matcher.rollback(len(self._walked) - shared)
            del self._walked[shared:]
        for token in path[shared:]:
            if not self._matcher.accept_token(token):
                return False
            self._walked.append(token)
        return True
