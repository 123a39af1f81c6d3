"""Texts of a bounded length, written so that grammars with different bounds share rules.

xgrammar makes a mask for each state of a grammar, and a bounded text has one state per number of characters that may
still come. Over 262,144 tokens a mask takes 40 ms, so a bound of 300 took twelve seconds. Here the rule for at most n
characters is one character followed by the rule for n - 1, whatever the bound is, and xgrammar caches masks by rule.

A text that may be longer than `SHORT` consists of blocks of `BLOCK` characters. At the start of each block, a final
short text may begin instead. Nearly all tokens that are allowed at a place are in the masks of these short texts.
"""

from collections.abc import Sequence

from cluster.grammar.ebnf import Rules
from cluster.grammar.nodes import Node, Ref, Regular, Repeat, alt, seq

BLOCK = 16
SHORT = 2 * BLOCK - 1
"""At any place in a block, the alternative short text still allows at least `BLOCK` more characters. So its mask allows
most tokens that reach beyond the block; xgrammar examines only the rest: longer tokens, and tokens with the end in
them.
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
