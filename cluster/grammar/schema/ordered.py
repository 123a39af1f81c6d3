"""Comma-separated elements in a given order, each required or optional: an object's properties, or a set's values."""

from cluster.grammar.asked import GrammarError
from cluster.grammar.ebnf import Rules
from cluster.grammar.nodes import EMPTY, NO_MATCH, Node, alt, seq
from cluster.grammar.schema.strings import COMMA

MAX_STATES = 10_000


def in_order(rules: Rules, elements: list[tuple[Node, bool]], end_nodes: list[Node], max_written: int | None) -> Node:
    """Return the grammar of texts in which the elements come in order, at most `max_written` of them. `elements` holds
    (grammar of the element, whether it is required).

    `end_nodes[n]` is the grammar of what follows the last element if n elements have been written; the last entry also
    holds for larger n. There is one rule for each pair of a position in `elements` and a number of elements written.
    """
    max_counted = len(end_nodes) - 1
    if (len(elements) + 1) * (max_counted + 1) > MAX_STATES:
        raise GrammarError("the minimum or the maximum number of elements is too large for so many elements")
    nodes_by_count = end_nodes
    # nodes_by_count[n]: the rule for the text from this position on if n elements have been written.
    for element, required in reversed(elements):
        nodes_before: list[Node] = []
        for num_written in range(max_counted + 1):
            is_full = max_written is not None and num_written >= max_written
            next_node = nodes_by_count[min(num_written + 1, max_counted)]
            with_element = NO_MATCH if is_full else seq(COMMA if num_written else EMPTY, element, next_node)
            nodes_before.append(rules.add(with_element if required else alt(with_element, nodes_by_count[num_written])))
        nodes_by_count = nodes_before
    return nodes_by_count[0]
