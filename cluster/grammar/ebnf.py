"""A set of named rules, and how it is written as one grammar."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from cluster.grammar.asked import GrammarError
from cluster.grammar.nodes import (
    EMPTY,
    NOTHING,
    Alt,
    Blank,
    Chars,
    Literal,
    Node,
    Ref,
    Regular,
    Repeat,
    Seq,
    alt,
    repeat,
    seq,
)
from cluster.grammar.notation import text_of

MAX_RULES = 20_000


@dataclass(slots=True)
class Rule:
    """The body of a rule. `before` is a lookahead: how the text after the rule begins, or None if that is unknown."""

    body: Node
    before: Node | None = None


@dataclass(slots=True)
class Rules:
    """Named rules, added one by one."""

    rules: dict[str, Rule] = field(default_factory=dict)
    _names: dict[Node, str] = field(default_factory=dict)

    def reserve(self) -> Ref:
        """Return a new name whose body `tell` sets later, so that the rule may refer to itself."""
        if len(self.rules) >= MAX_RULES:
            raise GrammarError(f"it needs more than {MAX_RULES} rules; make it shorter")
        name = f"r{len(self.rules)}"
        self.rules[name] = Rule(NOTHING)
        return Ref(name)

    def tell(self, name: Ref, body: Node, before: Node | None = None) -> Ref:
        """Set the body of a reserved name."""
        self.rules[name.name] = Rule(body, before)
        return name

    def add(self, body: Node, before: Node | None = None) -> Ref:
        """Return a reference to a rule with this body. An existing rule is reused, otherwise a rule is added."""
        if isinstance(body, Ref):
            return body
        known = self._names.get(body)
        if known is None:
            known = self._names[body] = self.tell(self.reserve(), body, before).name
        return Ref(known)

    def written(self, root: Node, compact: bool = False) -> str:
        """Return the grammar of `root` in xgrammar's notation, without rules that match no finite text.

        If `compact`, leave out white space without meaning.

        Raises:
            GrammarError: `root` matches no finite text.
        """
        kept_of = _compacted if compact else _as_it_is
        useful = self._useful()
        body = _pruned(kept_of(root), useful)
        if body is None:
            raise GrammarError("nothing can match: something requires itself without end, or allows no value")
        lines = [f"root ::= {text_of(body)}"]
        waiting = list(_names(body))
        seen = set(waiting)
        while waiting:
            rule = self.rules[name := waiting.pop()]
            kept = _pruned(kept_of(rule.body), useful) or EMPTY
            before = "" if rule.before is None else f" (= {text_of(kept_of(rule.before))})"
            lines.append(f"{name} ::= ({text_of(kept)}){before}")
            more = [other for other in _names(kept) if other not in seen]
            seen.update(more)
            waiting += dict.fromkeys(more)
        return "\n".join(lines) + "\n"

    def _useful(self) -> set[str]:
        """Return the names of the rules that match some finite text."""
        useful: set[str] = set()
        before = -1
        while len(useful) > before:
            before = len(useful)
            for name, rule in self.rules.items():  # most rules refer to earlier ones, so about two passes are enough
                if name not in useful and _ends(rule.body, useful):
                    useful.add(name)
        return useful


def _as_it_is(node: Node) -> Node:
    return node


def _compacted(node: Node) -> Node:
    """Return the node without white space that has no meaning."""
    match node:
        case Blank():
            return EMPTY
        case Seq(parts):
            return seq(*map(_compacted, parts))
        case Alt(parts):
            return alt(*map(_compacted, parts))
        case Repeat(part, least, most):
            return repeat(_compacted(part), least, most)
        case _:
            return node


def _ends(node: Node, useful: set[str]) -> bool:
    """Whether the node matches some finite text. `useful` names the rules that are known to match one."""
    match node:
        case Ref(name):
            return name in useful
        case Seq(parts):
            return all(_ends(part, useful) for part in parts)
        case Alt(parts):
            return any(_ends(part, useful) for part in parts)
        case Repeat(part, least, _):
            return least == 0 or _ends(part, useful)
        case Regular(part):
            return _ends(part, useful)
        case Chars(ranges):
            return bool(ranges)
        case Literal() | Blank():
            return True


def _pruned(node: Node, useful: set[str]) -> Node | None:
    """Return the node without the parts that match no finite text, or None if nothing is left."""
    if not _ends(node, useful):
        return None
    match node:
        case Seq(parts):
            return Seq(tuple(kept for part in parts if (kept := _pruned(part, useful)) is not None))
        case Alt(parts):
            return Alt(tuple(kept for part in parts if (kept := _pruned(part, useful)) is not None))
        case Repeat(part, least, most):
            kept = _pruned(part, useful)
            return EMPTY if kept is None else Repeat(kept, least, most)
        case Regular(part):
            return Regular(_pruned(part, useful) or EMPTY)
        case _:
            return node


def _names(node: Node) -> Iterator[str]:
    """Yield the names of the rules that a node refers to."""
    match node:
        case Ref(name):
            yield name
        case Seq(parts) | Alt(parts):
            for part in parts:
                yield from _names(part)
        case Repeat(part, _, _):
            yield from _names(part)
