"""Comma-separated parts in a given order, each required or optional: properties of an object, values of a set."""

from cluster.grammar.asked import GrammarError
from cluster.grammar.ebnf import Rules
from cluster.grammar.nodes import EMPTY, NOTHING, Node, alt, seq
from cluster.grammar.schema.strings import COMMA

MAX_STATES = 10_000


def in_order(rules: Rules, parts: list[tuple[Node, bool]], ends: list[Node], most: int | None) -> Node:
    """Return the parts in order, at most `most` of them. The bool of a part says whether it is required.

    `ends[n]` is the grammar of what follows the last part if n parts have been written; the last entry also holds for
    larger n. There is one rule for each pair of a position in `parts` and a number of parts written.
    """
    cap = len(ends) - 1
    if (len(parts) + 1) * (cap + 1) > MAX_STATES:
        raise GrammarError("the least and the most number of parts are too large for so many parts")
    states = ends
    # states[n]: the rule for the text from this position on if n parts have been written.
    for part, required in reversed(parts):
        before: list[Node] = []
        for written in range(cap + 1):
            full = most is not None and written >= most
            after = states[min(written + 1, cap)]
            taken = NOTHING if full else seq(COMMA if written else EMPTY, part, after)
            before.append(rules.add(taken if required else alt(taken, states[written])))
        states = before
    return states[0]
