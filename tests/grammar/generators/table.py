"""Generates docs/schema-generators.md: `python -m tests.grammar.generators.table` writes the file."""

import json
from pathlib import Path
from typing import Any

from cluster.grammar.asked import GrammarError
from cluster.grammar.schema.convert import parse_exact_json, schema_grammar
from cluster.grammar.schema.keywords import ANNOTATIONS
from cluster.grammar.schema.references import References

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "schema-generators.md"
FILES = ("zod", "pydantic", "typebox", "quicktype", "ts-json-schema-generator", "victools", "invopop")
HEAD = """# Schemas as generators write them

Each row is a type, each column a generator of JSON Schemas. Every schema was written by the generator itself, with the
programs in `tests/grammar/generators`. It is an object whose property `v` has the type.
A cell has the keywords that restrict `v`; all of them are enforced. A format that JSON Schema does not define, as
`starts_with`, restricts nothing by itself: the pattern beside it does. If a cell has fewer keywords than others of
its row, its generator does not write the missing ones. **refused** is answered with HTTP 400 and the reason below the
table. – means that the generator, or its language, has no such type.

`tests/grammar/test_generators.py` samples outputs of every grammar and checks them
with `jsonschema`, formats included. It also checks that no value is accepted which `jsonschema` calls invalid, and that
this page is true. `python -m tests.grammar.generators.table` writes the page. [grammars.md](grammars.md) says what the
keywords mean here.

"""


def generators() -> dict[str, dict[str, Any]]:
    """Return the schemas by the name and version of their generator, and by type.

    A schema is None if the generator has no such type.
    """
    schemas = {}
    for name in FILES:
        data = json.loads((HERE / f"{name}.json").read_text())
        schemas[data["generator"]] = data["types"]
    return schemas


def refusal(schema: Any) -> str | None:
    """Return the reason why a schema is refused, or None if it is accepted."""
    try:
        schema_grammar(parse_exact_json(json.dumps(schema)))
    except GrammarError as error:
        return str(error)
    return None


def keywords(schema: Any) -> str:
    """Return the keywords that restrict the property `v` of a schema, as the text of a table cell."""
    references = References(schema)
    node = schema
    while "properties" not in node:
        node = references.resolve(node["$ref"], node, "#")
    node = node["properties"]["v"]
    parts = []
    while isinstance(node, dict) and "$ref" in node:
        node = references.resolve(node["$ref"], node, "#")
        parts = ["$ref to"]
    restrictions = {} if node is True else {name: value for name, value in node.items() if name not in ANNOTATIONS}
    types = [restrictions.pop("type")] if "type" in restrictions else []
    parts += [kind if isinstance(kind, str) else "/".join(kind) for kind in types]
    parts += [
        str(restrictions[name]) if name == "format" else name
        for name in sorted(restrictions)
        if not name.startswith("qt-")
    ]
    return " ".join(parts) or "anything"


def page() -> str:
    """Return the text of docs/schema-generators.md."""
    columns = generators()
    lines = [f"| type | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    reasons: dict[str, int] = {}
    for name in next(iter(columns.values())):
        cells = []
        for types in columns.values():
            schema = types[name]
            reason = None if schema is None else refusal(schema)
            if reason is not None:
                number = reasons.setdefault(reason.partition(": ")[2], len(reasons) + 1)
                cells.append(f"**refused** ({number})")
            else:
                cells.append("–" if schema is None else f"`{keywords(schema)}`")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    return HEAD + "\n".join([*lines, "", *notes]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
