"""A set of named rules, and how it is written as one grammar."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from cluster.grammar.asked import GrammarError
from cluster.grammar.nodes import (
    EMPTY,
    NO_MATCH,
    Alt,
    Chars,
    Literal,
    Node,
    Ref,
    Regular,
    Repeat,
    Seq,
    Whitespace,
    alt,
    repeat,
    seq,
)
from cluster.grammar.notation import node_to_text

MAX_RULES = 20_000


@dataclass(slots=True)
class Rule:
    """The body of a rule. `lookahead` describes how the text after the rule begins; it is None if that is unknown."""

    body: Node
    lookahead: Node | None = None


@dataclass(slots=True)
class Rules:
    """Named rules, added one by one."""

    rules: dict[str, Rule] = field(default_factory=dict)
    _rule_names: dict[Node, str] = field(default_factory=dict)

    def reserve_name(self) -> Ref:
        """Return a reference to a new rule whose body `define` sets later, so that the body may refer to the rule."""
        if len(self.rules) >= MAX_RULES:
            raise GrammarError(f"it needs more than {MAX_RULES} rules; make it shorter")
        name = f"r{len(self.rules)}"
        self.rules[name] = Rule(NO_MATCH)
        return Ref(name)

    def define(self, name: Ref, body: Node, lookahead: Node | None = None) -> Ref:
        """Set the body of a rule whose name `reserve_name` returned. Return `name`."""
        self.rules[name.name] = Rule(body, lookahead)
        return name

    def add(self, body: Node, lookahead: Node | None = None) -> Ref:
        """Return a reference to a rule with this body. If `body` is a reference, return it. An existing rule is reused,
        whatever its `lookahead`; otherwise a rule is added.
        """
        if isinstance(body, Ref):
            return body
        name = self._rule_names.get(body)
        if name is None:
            name = self._rule_names[body] = self.define(self.reserve_name(), body, lookahead).name
        return Ref(name)

    def to_ebnf(self, root: Node, compact: bool = False) -> str:
        """Return the grammar of `root` in xgrammar's notation, without rules that match no finite text.

        If `compact`, leave out white space without meaning.

        Raises:
            GrammarError: `root` matches no finite text.
        """
        simplify = _without_whitespace if compact else _unchanged
        productive = self._productive_names()
        body = _prune(simplify(root), productive)
        if body is None:
            raise GrammarError("nothing can match: something requires itself without end, or allows no value")
        lines = [f"root ::= {node_to_text(body)}"]
        pending = list(_referenced_names(body))
        visited = set(pending)
        while pending:
            rule = self.rules[name := pending.pop()]
            pruned = _prune(simplify(rule.body), productive) or EMPTY
            lookahead = "" if rule.lookahead is None else f" (= {node_to_text(simplify(rule.lookahead))})"
            lines.append(f"{name} ::= ({node_to_text(pruned)}){lookahead}")
            new_names = [other for other in _referenced_names(pruned) if other not in visited]
            visited.update(new_names)
            pending += dict.fromkeys(new_names)
        return "\n".join(lines) + "\n"

    def _productive_names(self) -> set[str]:
        """Return the names of the rules that match some finite text."""
        productive: set[str] = set()
        count_before = -1
        while len(productive) > count_before:
            count_before = len(productive)
            for name, rule in self.rules.items():  # most rules refer to earlier ones, so about two passes are enough
                if name not in productive and _is_productive(rule.body, productive):
                    productive.add(name)
        return productive


def _unchanged(node: Node) -> Node:
    return node


def _without_whitespace(node: Node) -> Node:
    """Return the node without white space that has no meaning."""
    match node:
        case Whitespace():
            return EMPTY
        case Seq(children):
            return seq(*map(_without_whitespace, children))
        case Alt(children):
            return alt(*map(_without_whitespace, children))
        case Repeat(child, min_count, max_count):
            return repeat(_without_whitespace(child), min_count, max_count)
        case _:
            return node


def _is_productive(node: Node, productive: set[str]) -> bool:
    """Whether the node matches some finite text. `productive` names the rules that are known to match one."""
    match node:
        case Ref(name):
            return name in productive
        case Seq(children):
            return all(_is_productive(child, productive) for child in children)
        case Alt(children):
            return any(_is_productive(child, productive) for child in children)
        case Repeat(child, min_count, _):
            return min_count == 0 or _is_productive(child, productive)
        case Regular(child):
            return _is_productive(child, productive)
        case Chars(ranges):
            return bool(ranges)
        case Literal() | Whitespace():
            return True


def _prune(node: Node, productive: set[str]) -> Node | None:
    """Return the node without the parts that match no finite text, or None if nothing is left."""
    if not _is_productive(node, productive):
        return None
    match node:
        case Seq(children):
            return Seq(tuple(pruned for child in children if (pruned := _prune(child, productive)) is not None))
        case Alt(children):
            return Alt(tuple(pruned for child in children if (pruned := _prune(child, productive)) is not None))
        case Repeat(child, min_count, max_count):
            pruned = _prune(child, productive)
            return EMPTY if pruned is None else Repeat(pruned, min_count, max_count)
        case Regular(child):
            return Regular(_prune(child, productive) or EMPTY)
        case _:
            return node


def _referenced_names(node: Node) -> Iterator[str]:
    """Yield the names of the rules that a node refers to."""
    match node:
        case Ref(name):
            yield name
        case Seq(children) | Alt(children):
            for child in children:
                yield from _referenced_names(child)
        case Repeat(child, _, _):
            yield from _referenced_names(child)
