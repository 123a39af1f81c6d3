"""Matchers of compiled grammars over the tokens of one model. The tokenizer is loaded for the first grammar only."""

from threading import Lock

from cluster.grammar.matching import Matchers
from cluster.grammar.vocabulary import Vocabulary
from cluster.sampling.grammars import Matcher
from cluster.tokenizer.tokenizer import TextTokenizer


class LazyMatchers:
    """Makes matchers. Loads the tokenizer only at the first grammar or at `prepare`, because loading takes seconds."""

    def __init__(self, tokenizer_path: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """`tokenizer_path` is the folder of the tokenizer; `eos_token_ids` are the tokens that end a text (EOS)."""
        self._path, self._vocab_size, self._eos_token_ids = tokenizer_path, vocab_size, eos_token_ids
        self._lock = Lock()
        self._loaded: Matchers | None = None

    def __call__(self, grammar: str) -> Matcher:
        """Return a new matcher, at the beginning of a compiled grammar."""
        return self._matchers.matcher(grammar)

    def prepare(self) -> None:
        """Load what the first grammar would otherwise wait for. Any thread may call this.

        Raises:
            ConfigError: the model has no tokenizer, or no grammar can be matched over its tokens.
        """
        self._matchers.prepare()

    def preload(self, grammar: str) -> None:
        """Compile a grammar ahead of time, so that its matchers are made quickly. Any thread may call this.

        Raises:
            GrammarError: as `Matchers.load`.
        """
        self._matchers.load(grammar)

    @property
    def _matchers(self) -> Matchers:
        with self._lock:  # two threads would load twice
            if self._loaded is None:
                tokenizer = TextTokenizer.load(self._path)
                vocabulary = Vocabulary.from_tokenizer(tokenizer, self._vocab_size, self._eos_token_ids)
                self._loaded = Matchers(vocabulary, lambda text: tokenizer.encode(text, add_special_tokens=False))
            return self._loaded
