"""Grammars compiled by xgrammar: their rules, and for each place in them which tokens of a vocabulary may come."""

from threading import Lock
from typing import TYPE_CHECKING

from cluster.grammar.asked import GrammarError
from cluster.grammar.bounded import SHORT
from cluster.grammar.portable import PortableGrammar
from cluster.grammar.schema.convert import object_grammar, schema_grammar
from cluster.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler

KEPT_BYTES = 384 << 20
"""Of memory for what xgrammar keeps: a third of it masks of single rules, the rest whole grammars."""
THREADS = 1  # it compiles beside steps, or in a child whose processor time is limited
BOUNDED = [{"type": "string", "maxLength": most} for most in (SHORT, SHORT + 1)]
COMMON = (
    *(PortableGrammar(object_grammar(compact)) for compact in (False, True)),
    PortableGrammar(schema_grammar({"type": "array", "prefixItems": BOUNDED, "minItems": 2, "maxItems": 2})),
)
"""Any JSON object, and strings of bounded length. Their rules are in most grammars: the masks of one string take longer
to make than all that is particular to an ordinary schema.
"""


class MaskCompiler:
    """xgrammar's compiler over one vocabulary. It keeps the masks of the rules that it has met, because other grammars
    have the same rules. For any thread; compiling releases the interpreter's lock.

    It does not keep those of grammars in which special tokens stand: xgrammar knows a rule again by a checksum that
    leaves out which tokens these are, so one rule would get the masks of another.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._made: dict[bool, GrammarCompiler] = {}
        self._lock = Lock()

    def prepare(self) -> None:
        """Make the tables of the vocabulary and the masks of common rules: tenths of a second to seconds, which no
        grammar that follows pays, here or in a fork of this process.
        """
        self._vocabulary.prepare()
        for common in COMMON:
            self.compile(common)
        self._compiler(keeps=False)

    def compile(self, portable: PortableGrammar) -> "CompiledGrammar":
        """The compiled grammar.

        Raises:
            GrammarError: xgrammar cannot read it; the message is its own.
            MemoryError: there was too little.
        """
        compiler = self._compiler(keeps=not portable.tokens)
        try:
            return (compiler.compile_structural_tag if portable.tag else compiler.compile_grammar)(portable.source)
        except MemoryError:
            raise
        except Exception as error:  # of many types, by what its C++ code raised
            if "bad_alloc" in str(error):
                raise MemoryError from error
            raise GrammarError(str(error)) from error

    def _compiler(self, keeps: bool) -> "GrammarCompiler":
        from xgrammar import GrammarCompiler

        with self._lock:
            if keeps not in self._made:
                self._made[keeps] = GrammarCompiler(
                    self._vocabulary.info, max_threads=THREADS, cache_enabled=keeps, cache_limit_bytes=KEPT_BYTES
                )
            return self._made[keeps]
