"""Which tokens a grammar allows next in one request: after what is committed, and after any path that may follow it."""

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
CACHED_BYTES = 512 << 20  # of compiled grammars that are kept


class Readable(NamedTuple):
    """A compiled grammar, of so many `bytes`; `usable` are the tokens that it may allow at all."""

    grammar: "CompiledGrammar"
    usable: Row
    bytes: int


class Matchers:
    """Makes the matchers of one vocabulary; requests with the same grammar share what is compiled. For any thread."""

    def __init__(self, vocabulary: Vocabulary, encode: Encode | None = None) -> None:
        """`encode` is how the tokenizer writes a text; without it, or where it writes another one, the longest tokens
        are taken one after the other.
        """
        self._vocabulary, self._encode = vocabulary, encode
        self._compiler = MaskCompiler(vocabulary)
        self._kept: OrderedDict[bytes, Readable] = OrderedDict()
        self._lock = Lock()

    def prepare(self) -> None:
        """Do beforehand what the first grammar would wait for; see `MaskCompiler.prepare`."""
        self._compiler.prepare()

    def matcher(self, portable: str, after: Sequence[int] = ()) -> "TextMatcher":
        """A matcher for one request; `portable` comes from `Compiler.compile`; for `after` see `TextMatcher`.

        Raises:
            GrammarError: as `read`.
        """
        return TextMatcher(self.read(portable), self._vocabulary, self._spelled, after)

    def read(self, portable: str) -> "Readable":
        """What a portable grammar is compiled to. That takes hundredths of a second, or seconds for a large one; it is
        kept for the matchers to come.

        Raises:
            GrammarError: the text is none that this version of xgrammar compiles.
            MemoryError: there is too little for it.
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
        """How the tokenizer writes these bytes, which may begin or end within a character."""
        with suppress(UnicodeDecodeError):
            tokens = [] if self._encode is None or not raw else self._encode(raw.decode())
            if b"".join(self._vocabulary.tokens[token] for token in tokens) == raw:
                return tokens
        return self._vocabulary.longest(raw)


class TextMatcher:
    """One request's place in its grammar.

    `after`: the grammar begins after these tokens, such as the one that ends the reasoning; until they have come, in
    this order, everything is allowed. Paths are tokens that may follow the committed ones; asking about one changes
    nothing, and is cheapest if it shares its beginning with the path before. Masks after paths that were asked about
    are kept until tokens come: draft, forced text and verify ask for the same ones. For one thread at a time.
    """

    def __init__(self, compiled: Readable, vocabulary: Vocabulary, spell: Spell, after: Sequence[int]) -> None:
        from xgrammar import GrammarMatcher

        self._matcher, self._spell = GrammarMatcher(compiled.grammar), spell
        self._vocabulary, self._usable = vocabulary, compiled.usable
        self._stops = frozenset(vocabulary.stops)
        self._after = tuple(after)
        self._recent: tuple[int, ...] = ()  # committed tokens that may begin `after`
        self._free = bool(after)
        self._ended = False
        self._masks: dict[tuple[int, ...], Row] = {}
        self._walked: list[int] = []  # tokens that xgrammar's matcher has taken beyond the committed ones
        self._row: Row = np.zeros(vocabulary.words, np.int32)

    @property
    def finished(self) -> bool:
        """Whether the output may end here, or has ended."""
        return self._ended or (not self._free and self._go(()) and self._matcher.is_completed())

    @property
    def ended(self) -> bool:
        """Whether a stop token has been committed."""
        return self._ended

    def accept(self, tokens: Sequence[int]) -> None:
        """Commit tokens.

        Raises:
            GrammarError: one of them is not allowed where it stands; those before it are committed.
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
            elif self._walked[:1] == [token]:
                self._walked.pop(0)
            elif self._go((token,)):
                self._walked.clear()
            else:
                raise GrammarError(f"token {token} is not allowed by the grammar here")

    def fill(self, path: Sequence[int], out: Row) -> None:
        """Write the mask of what may follow committed tokens and `path` into `out`, int32 `[vocabulary.words]`.

        Stop tokens are in it exactly where the output may end. After an end, and after a path that is not allowed and
        so never comes, they are all that is in it. It is empty where the grammar goes on with text that no token of
        this vocabulary begins.
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
        """The tokens, at most `most`, that most likely follow committed tokens and `path` because no other text is
        allowed: that text as the tokenizer writes it, and at its end tokens of which no other is allowed.
        """
        rest = self._constrained(path)
        if rest is None:
            return []
        found = self._spell(self._text_of(path, rest, most))[:most]
        while rest is not None and len(found) < most and self._goes_on([*rest, *found]):
            self.fill([*path, *found], self._row)
            words = np.flatnonzero(self._row)
            word = int(self._row[words[0]]) & (2**WORD_BITS - 1) if len(words) == 1 else 0
            if word.bit_count() != 1:
                break
            found.append(int(words[0]) * WORD_BITS + word.bit_length() - 1)
        return found

    def _text_of(self, path: Sequence[int], rest: Sequence[int], most: int) -> bytes:
        """The text of which no other is allowed after `path`, of which the grammar describes `rest`; as much of it as
        `most` tokens can hold. It may begin or end within a character.

        Masks tell, token by token: xgrammar's own search goes on as long as there is but one way, and that has no end
        in a grammar that has none.
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
        """The part of a path that the grammar describes; None while everything is allowed."""
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
        """Whether the grammar allows a path and has not ended on it."""
        return not self._ended and self._stops.isdisjoint(path) and self._go(path)

    def _go(self, path: Sequence[int]) -> bool:
        """Take xgrammar's matcher to the end of a path; False if it is not allowed. It has no stop tokens."""
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
