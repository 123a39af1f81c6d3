"""Matchers of compiled grammars over the tokens of one model, whose bytes are read when the first one is needed."""

from functools import cached_property
from threading import Lock

from cluster.grammar.matching import Matchers
from cluster.grammar.vocabulary import Vocabulary
from cluster.sampling.grammars import Matcher
from cluster.tokenizer.tokenizer import TextTokenizer


class LateMatchers:
    """Makes matchers; nothing is read or imported before the first grammar or `prepare`, because it takes seconds."""

    def __init__(self, tokenizer_path: str, vocab_size: int, ends: tuple[int, ...]) -> None:
        """`tokenizer_path` is the folder of the tokenizer, `ends` are the tokens that end a text."""
        self._path, self._vocab_size, self._ends = tokenizer_path, vocab_size, ends
        self._lock = Lock()

    def __call__(self, grammar: str) -> Matcher:
        """The matcher of a grammar that was compiled once, at its beginning."""
        return self._matchers.matcher(grammar)

    def prepare(self) -> None:
        """Do beforehand, from any thread, what the first grammar would wait for.

        Raises:
            ConfigError: this model has no tokenizer, or one over which no grammar can be matched.
        """
        self._matchers.prepare()

    def read(self, grammar: str) -> None:
        """Compile a grammar, from any thread, so that its matchers are made quickly.

        Raises:
            GrammarError: as `Matchers.read`.
        """
        self._matchers.read(grammar)

    @property
    def _matchers(self) -> Matchers:
        with self._lock:
            return self._made

    @cached_property
    def _made(self) -> Matchers:
        tokenizer = TextTokenizer.load(self._path)
        vocabulary = Vocabulary.of(tokenizer, self._vocab_size, self._ends)
        return Matchers(vocabulary, lambda text: tokenizer.encode(text, add_special_tokens=False))
