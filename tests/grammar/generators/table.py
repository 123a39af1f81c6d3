"""The table of docs/schema-generators.md: python -m tests.grammar.generators.table writes it."""

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
`starts_with`, restricts nothing by itself: the pattern beside it does. A generator that has fewer keywords than others
in a row does not write them. **refused** is answered with HTTP 400 and the reason below the table. – means that the
generator, or its language, has no such type.

`tests/grammar/test_generators.py` samples outputs of every grammar and checks them
with `jsonschema`, formats included. It also checks that no value is accepted which `jsonschema` calls invalid, and that
this page is true. `python -m tests.grammar.generators.table` writes the page. [grammars.md](grammars.md) says what the
keywords mean here.

"""


def generators() -> dict[str, dict[str, Any]]:
    """The schemas of each generator by type, by the generator's name and version. None: it has no such type."""
    found = {}
    for name in FILES:
        text = json.loads((HERE / f"{name}.json").read_text())
        found[text["generator"]] = text["types"]
    return found


def refusal(schema: Any) -> str | None:
    """Why a schema is refused; None if it is not."""
    try:
        schema_grammar(parse_exact_json(json.dumps(schema)))
    except GrammarError as error:
        return str(error)
    return None


def keywords(schema: Any) -> str:
    """What restricts the property `v` of a schema."""
    references = References(schema)
    of = schema
    while "properties" not in of:
        of = references.resolve(of["$ref"], of, "#")
    of = of["properties"]["v"]
    words = []
    while isinstance(of, dict) and "$ref" in of:
        of = references.resolve(of["$ref"], of, "#")
        words = ["$ref to"]
    kept = {} if of is True else {name: value for name, value in of.items() if name not in ANNOTATIONS}
    kinds = [kept.pop("type")] if "type" in kept else []
    words += [kind if isinstance(kind, str) else "/".join(kind) for kind in kinds]
    words += [str(kept[name]) if name == "format" else name for name in sorted(kept) if not name.startswith("qt-")]
    return " ".join(words) or "anything"


def page() -> str:
    """The whole page."""
    columns = generators()
    lines = [f"| type | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    reasons: dict[str, int] = {}
    for name in next(iter(columns.values())):
        cells = []
        for types in columns.values():
            schema = types[name]
            why = None if schema is None else refusal(schema)
            if why is not None:
                number = reasons.setdefault(why.partition(": ")[2], len(reasons) + 1)
                cells.append(f"**refused** ({number})")
            else:
                cells.append("–" if schema is None else f"`{keywords(schema)}`")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    notes = [f"{number}. {why}" for why, number in reasons.items()]
    return HEAD + "\n".join([*lines, "", *notes]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
