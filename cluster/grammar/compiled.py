"""Grammars compiled by xgrammar: their rules, and for each place in them which tokens of a vocabulary may come."""

import json
from threading import Lock
from typing import TYPE_CHECKING, Any

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

    def compile(self, portable: PortableGrammar) -> "CompiledGrammar":
        """The compiled grammar.

        Raises:
            GrammarError: xgrammar cannot read it; the message is its own.
            MemoryError: there was too little.
        """
        source = portable.source
        compiler = self._compiler(keeps=True)
        if portable.tokens:
            if never := self._vocabulary.stops[:1]:
                source = json.dumps(with_marks(json.loads(source), never[0]))
            else:
                compiler = self._compiler(keeps=False)
        try:
            return (compiler.compile_structural_tag if portable.tag else compiler.compile_grammar)(source)
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


def with_marks(tag: Any, never: int) -> Any:
    """Return a structural tag that allows the same outputs as `tag`. In it each special token stands beside an
    alternative that no output takes: the token `never`, followed by the number of the special token as text.

    xgrammar 0.2.8 recognises a rule by a checksum of its automaton. The checksum leaves out which token an edge takes,
    so a rule with one special token would get the masks of a rule with another. The text makes the checksums differ.
    `never` is a stop token: xgrammar's masks do not have it as an edge's token, and no matcher is given one.
    """
    if isinstance(tag, list):
        return [with_marks(part, never) for part in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") != "token":
        return {name: with_marks(part, never) for name, part in tag.items()}
    mark = [{"type": "token", "token": never}, {"type": "const_string", "value": f"<{tag['token']}>"}]
    return {"type": "or", "elements": [tag, {"type": "sequence", "elements": mark}]}
