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
from cluster.grammar.vocabulary import WORD_BITS, Bitmask, Vocabulary

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

EncodeText = Callable[[str], list[int]]
TokenizeBytes = Callable[[bytes], list[int]]
CACHED_BYTES = 512 << 20  # total bytes of the compiled grammars in the cache


class LoadedGrammar(NamedTuple):
    """A compiled grammar and its size in bytes. `usable_bitmask` is a mask of the tokens that the grammar may allow at
    some position; no other token is ever allowed.
    """

    grammar: "CompiledGrammar"
    usable_bitmask: Bitmask
    num_bytes: int


class Matchers:
    """Makes the matchers of one vocabulary. Requests with the same grammar share the compiled grammar. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary, encode: EncodeText | None = None) -> None:
        """`encode` tokenizes a forced text: the only text that a grammar allows next. The text is split greedily into
        the longest matching tokens if `encode` is None, if its tokens do not spell the text exactly, or if the text
        begins or ends inside a character.
        """
        self._vocabulary, self._encode = vocabulary, encode
        self._compiler = MaskCompiler(vocabulary)
        self._cache: OrderedDict[bytes, LoadedGrammar] = OrderedDict()
        self._lock = Lock()

    def prepare(self) -> None:
        """Make tables and common masks now, so that no grammar has to wait for them (`MaskCompiler.prepare`)."""
        self._compiler.prepare()

    def matcher(self, portable: str, start_tokens: Sequence[int] = ()) -> "TextMatcher":
        """Return a matcher for one request. `portable` comes from `Compiler.compile`; `TextMatcher` explains
        `start_tokens`.

        Raises:
            GrammarError: as `load`.
        """
        return TextMatcher(self.load(portable), self._vocabulary, self._tokenize, start_tokens)

    def load(self, portable: str) -> "LoadedGrammar":
        """Return the compiled form of a portable grammar, cached for later matchers.

        Compiling takes hundredths of a second, or seconds for a large grammar.

        Raises:
            GrammarError: this version of xgrammar cannot compile the text.
            MemoryError: there is too little memory.
        """
        key = self._cache_key(portable)
        with self._lock:
            loaded = self._cache.get(key)
        if loaded is None:
            portable_grammar = PortableGrammar.from_text(portable)
            usable_bitmask = (
                self._vocabulary.usable_bitmask_with(portable_grammar.special_token_ids)
                if portable_grammar.special_token_ids
                else self._vocabulary.usable_bitmask
            )
            grammar = self._compiler.compile(portable_grammar)
            loaded = LoadedGrammar(grammar, usable_bitmask, grammar.memory_size_bytes)
        with self._lock:
            self._cache[key] = loaded
            self._cache.move_to_end(key)
            total_bytes = sum(entry.num_bytes for entry in self._cache.values())
            while total_bytes > CACHED_BYTES and len(self._cache) > 1:
                total_bytes -= self._cache.popitem(last=False)[1].num_bytes
        return loaded

    @staticmethod
    def _cache_key(portable: str) -> bytes:
        return hashlib.blake2b(portable.encode()).digest()

    def _tokenize(self, content: bytes) -> list[int]:
        """Return the tokens that the tokenizer writes for these bytes, which may begin or end inside a character."""
        with suppress(UnicodeDecodeError):
            tokens = [] if self._encode is None or not content else self._encode(content.decode())
            if b"".join(self._vocabulary.tokens[token] for token in tokens) == content:
                return tokens
        return self._vocabulary.tokenize_greedily(content)


class TextMatcher:
    """The state of one request in its grammar. Not thread-safe.

    The grammar begins when the `start_tokens`, such as the token that ends the reasoning, have been committed one after
    the other; before that, everything is allowed. If `start_tokens` is empty, the grammar begins at once.

    A path is a sequence of tokens that may follow the committed tokens. Methods that take a path do not change the
    committed state; they are cheapest if a path begins like the previous path. Masks are cached until tokens are
    committed, because drafting, the search for forced tokens and verification ask for the same paths.
    """

    def __init__(
        self, loaded: LoadedGrammar, vocabulary: Vocabulary, tokenize: TokenizeBytes, start_tokens: Sequence[int]
    ) -> None:
        from xgrammar import GrammarMatcher

        self._matcher, self._tokenize = GrammarMatcher(loaded.grammar), tokenize
        self._vocabulary, self._usable_bitmask = vocabulary, loaded.usable_bitmask
        self._stop_token_ids = frozenset(vocabulary.stop_token_ids)
        self._start_tokens = tuple(start_tokens)
        self._recent_tokens: tuple[int, ...] = ()  # the last committed tokens, to be compared with `_start_tokens`
        self._is_unconstrained = bool(start_tokens)  # the grammar has not begun: everything is allowed
        self._ended = False
        self._bitmask_cache: dict[tuple[int, ...], Bitmask] = {}
        self._path_tokens: list[int] = []  # uncommitted tokens that xgrammar's matcher has accepted
        self._scratch_bitmask: Bitmask = np.zeros(vocabulary.bitmask_words, np.int32)

    @property
    def finished(self) -> bool:
        """Whether the output may end after the committed tokens, or has ended."""
        return self._ended or (not self._is_unconstrained and self._advance_to(()) and self._matcher.is_completed())

    @property
    def ended(self) -> bool:
        """Whether a stop token has been committed."""
        return self._ended

    def accept(self, tokens: Sequence[int]) -> None:
        """Commit tokens.

        Raises:
            GrammarError: a token is not allowed at its place. The tokens before it stay committed.
        """
        self._bitmask_cache.clear()
        for token in tokens:
            if self._ended or token in self._stop_token_ids:
                if not (self._is_unconstrained or self.finished) or token not in self._stop_token_ids:
                    raise GrammarError(
                        f"token {token} is not allowed by the grammar: the output " + self._refusal_reason()
                    )
                self._ended = True
            elif self._is_unconstrained:
                self._recent_tokens = (*self._recent_tokens, token)[-len(self._start_tokens) :]
                self._is_unconstrained = self._recent_tokens != self._start_tokens
            # xgrammar's matcher has already accepted this token, as the first token of the latest path.
            elif self._path_tokens[:1] == [token]:
                self._path_tokens.pop(0)
            elif self._advance_to((token,)):
                self._path_tokens.clear()
            else:
                raise GrammarError(f"token {token} is not allowed by the grammar here")

    def fill(self, path: Sequence[int], bitmask: Bitmask) -> None:
        """Write the mask of the tokens allowed after the committed tokens and `path` into `bitmask`, int32
        `[vocabulary.bitmask_words]`.

        Stop tokens are set exactly where the output may end. If the output has ended, only stop tokens are set. They
        are also the only ones for a path that the grammar does not allow; verification never accepts such a path. The
        mask is empty if the grammar continues only with text that no token can begin.
        """
        cached = self._bitmask_cache.get(tuple(path))
        if cached is None:
            self._compute_bitmask(path, bitmask)
            self._bitmask_cache[tuple(path)] = bitmask.copy()
        else:
            bitmask[:] = cached

    def _compute_bitmask(self, path: Sequence[int], bitmask: Bitmask) -> None:
        constrained = self._constrained_part(path)
        if constrained is None:
            bitmask.fill(-1)
            return
        if not self._can_continue(constrained):
            bitmask[:] = self._vocabulary.stop_bitmask
            return
        self._matcher.fill_next_token_bitmask(bitmask)
        np.bitwise_and(bitmask, self._usable_bitmask, out=bitmask)

    def forced(self, path: Sequence[int], max_tokens: int) -> list[int]:
        """Return at most `max_tokens` tokens that the grammar forces after the committed tokens and `path`. The list is
        empty if several texts may follow.

        The result begins with the text that all allowed tokens spell (`Vocabulary.common_prefix`), split into tokens by
        the tokenizer. After that text, a token is added as long as the mask allows exactly one token; this may be a
        stop token. The tokens must still be verified: if no token begins another allowed text, the masks do not show
        that text.
        """
        constrained = self._constrained_part(path)
        if constrained is None:
            return []
        forced_tokens = self._tokenize(self._forced_text(path, constrained, max_tokens))[:max_tokens]
        while (
            constrained is not None
            and len(forced_tokens) < max_tokens
            and self._can_continue([*constrained, *forced_tokens])
        ):
            self.fill([*path, *forced_tokens], self._scratch_bitmask)
            nonzero_words = np.flatnonzero(self._scratch_bitmask)
            # If the whole bitmask has exactly one bit, exactly one token is allowed. `&` converts the int32 word to an
            # unsigned number.
            word = int(self._scratch_bitmask[nonzero_words[0]]) & (2**WORD_BITS - 1) if len(nonzero_words) == 1 else 0
            if word.bit_count() != 1:
                break
            forced_tokens.append(int(nonzero_words[0]) * WORD_BITS + word.bit_length() - 1)
        return forced_tokens

    def _forced_text(self, path: Sequence[int], constrained: Sequence[int], max_tokens: int) -> bytes:
        """Return the forced text after `path`, cut to about `max_tokens` tokens; empty if several texts may follow. The
        text may begin or end inside a character.

        `constrained` is the part of `path` that the grammar describes. The text is found token by token from masks,
        because xgrammar's own search for a forced text loops forever if the grammar forces an endless text.
        """
        text_tokens: list[int] = []
        text = common_prefix = b""
        while len(text_tokens) < max_tokens and self._can_continue([*constrained, *text_tokens]):
            self.fill([*path, *text_tokens], self._scratch_bitmask)
            common_prefix = self._vocabulary.common_prefix(self._scratch_bitmask)
            next_token = self._vocabulary.tokenize_greedily(common_prefix)[:1]
            if not next_token:
                break
            text_tokens += next_token
            text, common_prefix = (
                text + self._vocabulary.tokens[next_token[0]],
                common_prefix[len(self._vocabulary.tokens[next_token[0]]) :],
            )
        return text + common_prefix

    def _refusal_reason(self) -> str:
        return "has ended" if self._ended else "may not end here"

    def _constrained_part(self, path: Sequence[int]) -> Sequence[int] | None:
        """Return the part of a path that the grammar describes, or None if everything is allowed after the path."""
        if not self._is_unconstrained:
            return path
        if self._ended:
            return ()
        recent_tokens = self._recent_tokens
        for index, token in enumerate(path):
            if token in self._stop_token_ids:
                return path[index:]
            recent_tokens = (*recent_tokens, token)[-len(self._start_tokens) :]
            if recent_tokens == self._start_tokens:
                return path[index + 1 :]
        return None

    def _can_continue(self, path: Sequence[int]) -> bool:
        """Whether the grammar allows a path, and the output has not ended before or on this path."""
        return not self._ended and self._stop_token_ids.isdisjoint(path) and self._advance_to(path)

    def _advance_to(self, path: Sequence[int]) -> bool:
        """Move xgrammar's matcher to the end of a path. The path must have no stop tokens. Return False if the grammar
        does not allow the path.
        """
        common_length = 0
        for current, requested in zip(self._path_tokens, path, strict=False):
            if current != requested:
                break
            common_length += 1
        if common_length < len(self._path_tokens):
            self._matcher.rollback(len(self._path_tokens) - common_length)
            del self._path_tokens[common_length:]
        for token in path[common_length:]:
            if not self._matcher.accept_token(token):
                return False
            self._path_tokens.append(token)
        return True
