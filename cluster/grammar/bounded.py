"""Texts of a bounded length, written so that different bounds have the same rules.

xgrammar makes a mask for each place in a grammar, and a bounded text has a place for each number of characters that may
still come. Over 262,144 tokens a mask takes 40 ms, so a bound of 300 took twelve seconds. Here the rule for at most n
characters is one character and the rule for n - 1, whatever the bound is, and xgrammar keeps the masks of rules.

A text that may be longer than `SHORT` is made of blocks of `BLOCK` characters. Wherever a block begins, a short text
may begin as well, which ends the whole text. Nearly all tokens that may come are in its masks.
"""

from collections.abc import Sequence

from cluster.grammar.ebnf import Rules
from cluster.grammar.nodes import Node, Ref, Regular, Repeat, alt, seq

BLOCK = 16
SHORT = 2 * BLOCK - 1
"""Within a block, the short text that began with it may have at least `BLOCK` characters more. So it allows most tokens
that go beyond the block; xgrammar looks only into those that are left, which have more characters, or the end in them.
"""


def bounded_text(rules: Rules, one: Sequence[Node], end: Node, least: int, most: int) -> Ref:
    """`least` to `most` characters, each one of the alternatives `one`, and an `end` that none of them begins."""
    rest = _at_most(rules, one, end, most - least)
    for _ in range(least):
        rest = rules.add(alt(*(seq(each, rest) for each in one)))
    return rest


def _at_most(rules: Rules, one: Sequence[Node], end: Node, most: int) -> Ref:
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
