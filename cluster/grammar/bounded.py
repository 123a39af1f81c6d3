"""Texts of a bounded length, written so that grammars with different bounds share rules.

xgrammar makes a mask for each state of a grammar, and a bounded text has one state per number of characters that may
still come. Over 262,144 tokens a mask takes 40 ms, so a bound of 300 would take twelve seconds for each grammar. Here
the rule for at most n characters is the end, or one character followed by the rule for at most n - 1. These rules do
not depend on the bound of the whole text, and xgrammar caches masks by rule.

A text whose bound is above `SHORT_LENGTH` consists of blocks of `BLOCK_LENGTH` characters and, at its end, a short
text: at the start of each block, the short text may begin instead. At every place in a block, the mask of the short
text that may have begun contains nearly all tokens that the grammar allows there.
"""

from collections.abc import Sequence

from cluster.grammar.ebnf import Rules
from cluster.grammar.nodes import Node, Ref, Regular, Repeat, alt, seq

BLOCK_LENGTH = 16
SHORT_LENGTH = 2 * BLOCK_LENGTH - 1
"""Maximum length of a short text. At any place in a block, the short text that could have begun instead of the block
still allows at least `BLOCK_LENGTH` more characters. So the short text's mask allows most tokens that reach beyond the
block. xgrammar examines only the remaining tokens: longer tokens, and tokens that contain the end of the text.
"""


def bounded_text(rules: Rules, characters: Sequence[Node], end: Node, min_length: int, max_length: int) -> Ref:
    """Return a rule for `min_length` to `max_length` characters followed by `end`. Each character is one of the
    alternatives `characters`; none of them may begin like `end`.
    """
    rest = _text_of_at_most(rules, characters, end, max_length - min_length)
    for _ in range(min_length):
        rest = rules.add(alt(*(seq(character, rest) for character in characters)))
    return rest


def _text_of_at_most(rules: Rules, characters: Sequence[Node], end: Node, max_length: int) -> Ref:
    """Return a rule for at most `max_length` characters followed by `end`."""
    short_texts = [rules.add(end)]
    for _ in range(min(max_length, SHORT_LENGTH)):
        short_texts.append(rules.add(alt(end, *(seq(character, short_texts[-1]) for character in characters))))
    if max_length <= SHORT_LENGTH:
        return short_texts[max_length]
    num_blocks, remainder = divmod(max_length - BLOCK_LENGTH, BLOCK_LENGTH)
    block = rules.add(Regular(Repeat(alt(*characters), BLOCK_LENGTH, BLOCK_LENGTH)))
    rest = short_texts[BLOCK_LENGTH + remainder]
    for _ in range(num_blocks):
        rest = rules.add(alt(seq(block, rest), short_texts[SHORT_LENGTH]))
    return rest
