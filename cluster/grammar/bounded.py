"""Texts of a bounded length, written so that grammars with different bounds share rules.

xgrammar makes a mask for each state of a grammar, and a bounded text has one state per number of characters that may
still come. Over 262,144 tokens a mask takes 40 ms, so a bound of 300 took twelve seconds. Here the rule for at most n
characters is one character followed by the rule for at most n - 1. These rules do not depend on the bound, and xgrammar
caches masks by rule.

A text whose bound is above `SHORT` consists of blocks of `BLOCK` characters and, at its end, a short text: at the start
of each block, the short text may begin instead. The masks of short texts contain nearly all tokens that are allowed at
a place.
"""

from collections.abc import Sequence

from cluster.grammar.ebnf import Rules
from cluster.grammar.nodes import Node, Ref, Regular, Repeat, alt, seq

BLOCK = 16
SHORT = 2 * BLOCK - 1
"""Maximum length of a short text. At any place in a block, the short text that could have begun instead of the block
still allows at least `BLOCK` more characters. So the short text's mask allows most tokens that reach beyond the block.
xgrammar examines only the remaining tokens: longer tokens, and tokens that contain the end of the text.
"""


def bounded_text(rules: Rules, one: Sequence[Node], end: Node, least: int, most: int) -> Ref:
    """Return a rule for `least` to `most` characters followed by `end`. Each character is one of the alternatives
    `one`; none of them may begin like `end`.
    """
    rest = _at_most(rules, one, end, most - least)
    for _ in range(least):
        rest = rules.add(alt(*(seq(each, rest) for each in one)))
    return rest


def _at_most(rules: Rules, one: Sequence[Node], end: Node, most: int) -> Ref:
    """Return a rule for at most `most` characters followed by `end`."""
    short = [rules.add(end)]
    for _ in range(min(most, SHORT)):
        short.append(rules.add(alt(end, *(seq(each, short[-1]) for each in one))))
    if most <= SHORT:
        return short[most]
    blocks, left = divmod(most - BLOCK, BLOCK)
    block = rules.add(Regular(Repeat(alt(*one), BLOCK, BLOCK)))
    rest = short[BLOCK + left]
    for _ in range(blocks):
        rest = rules.add(alt(seq(block, rest), short[SHORT]))
    return rest
