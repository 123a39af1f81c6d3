"""xgrammar's compiler over one vocabulary. It computes the mask of the tokens allowed next for each grammar state."""

import json
from threading import Lock
from typing import TYPE_CHECKING, Any

from cluster.grammar.asked import GrammarError
from cluster.grammar.bounded import SHORT_LENGTH
from cluster.grammar.portable import PortableGrammar
from cluster.grammar.schema.convert import object_grammar, schema_grammar
from cluster.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler

CACHE_BYTES = 384 << 20
"""Memory for xgrammar's caches: a third for masks of single rules, the rest for whole grammars."""
NUM_THREADS = 1  # compiling shares the CPU with the engine's steps, or runs in a child whose processor time is limited
BOUNDED_STRINGS = [{"type": "string", "maxLength": max_length} for max_length in (SHORT_LENGTH, SHORT_LENGTH + 1)]
COMMON_GRAMMARS = (
    *(PortableGrammar(object_grammar(compact)) for compact in (False, True)),
    PortableGrammar(schema_grammar({"type": "array", "prefixItems": BOUNDED_STRINGS, "minItems": 2, "maxItems": 2})),
)
"""Grammars of any JSON object and of strings of bounded length. Most grammars share rules with them. If the masks of
these shared rules exist already, an ordinary schema compiles faster than one bounded string would without them.
"""


class MaskCompiler:
    """xgrammar's compiler over one vocabulary. It caches the masks of rules, because different grammars share rules.
    Thread-safe; compiling releases the GIL.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._compilers: dict[bool, GrammarCompiler] = {}
        self._lock = Lock()

    def prepare(self) -> None:
        """Make the tables of the vocabulary and the masks of common rules. This takes between tenths of a second and a
        few seconds. Grammars that are compiled later, in this process or in a fork, save that time.
        """
        self._vocabulary.prepare()
        for grammar in COMMON_GRAMMARS:
            self.compile(grammar)

    def compile(self, portable: PortableGrammar) -> "CompiledGrammar":
        """Return the compiled grammar.

        Raises:
            GrammarError: xgrammar cannot read the grammar; the message is xgrammar's.
            MemoryError: there is too little memory.
        """
        source = portable.source
        compiler = self._compiler(use_cache=True)
        if portable.special_token_ids:
            # `with_distinct_rules` needs a stop token. If the vocabulary has none, nothing is cached, so that no rule
            # gets the masks of another rule.
            if stop_ids := self._vocabulary.stop_token_ids[:1]:
                source = json.dumps(with_distinct_rules(json.loads(source), stop_ids[0]))
            else:
                compiler = self._compiler(use_cache=False)
        try:
            return (compiler.compile_structural_tag if portable.is_structural_tag else compiler.compile_grammar)(source)
        except MemoryError:
            raise
        except Exception as error:  # xgrammar's C++ code raises errors of many types
            if "bad_alloc" in str(error):
                raise MemoryError from error
            raise GrammarError(str(error)) from error

    def _compiler(self, use_cache: bool) -> "GrammarCompiler":
        from xgrammar import GrammarCompiler

        with self._lock:
            if use_cache not in self._compilers:
                self._compilers[use_cache] = GrammarCompiler(
                    self._vocabulary.tokenizer_info,
                    max_threads=NUM_THREADS,
                    cache_enabled=use_cache,
                    cache_limit_bytes=CACHE_BYTES,
                )
            return self._compilers[use_cache]


def with_distinct_rules(tag: Any, stop_id: int) -> Any:
    """Return a structural tag that allows the same outputs as `tag`, and whose rules xgrammar's cache can tell apart.

    xgrammar 0.2.8 recognises a rule by a checksum of its automaton. The checksum leaves out which token an edge takes,
    so a rule with one special token would get the masks of a rule with another special token. Therefore each special
    token gets an alternative that no output takes: the token `stop_id`, then the special token's id as text, which
    makes the checksums differ. xgrammar's masks never allow a stop token inside a grammar, and no matcher receives one.
    """
    if isinstance(tag, list):
        return [with_distinct_rules(inner, stop_id) for inner in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") != "token":
        return {name: with_distinct_rules(inner, stop_id) for name, inner in tag.items()}
    unreachable = [{"type": "token", "token": stop_id}, {"type": "const_string", "value": f"<{tag['token']}>"}]
    return {"type": "or", "elements": [tag, {"type": "sequence", "elements": unreachable}]}
