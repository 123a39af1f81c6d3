"""Two hundred JSON schemas, and fifty regular expressions and EBNF grammars, as applications send them."""

import json
from typing import Any

from cluster.grammar.asked import Grammar
from tests.grammar.schema.samples import SAMPLES, object_of
from tests.grammar.test_regex import EXPRESSIONS

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
INT: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}


def chars(max_length: int) -> Schema:
    return {"type": "string", "maxLength": max_length}


def number(minimum: float, maximum: float, number_type: str = "integer") -> Schema:
    return {"type": number_type, "minimum": minimum, "maximum": maximum}


def enum(*values: Any) -> Schema:
    return {"enum": list(values)}


def pattern(expression: str) -> Schema:
    return {"type": "string", "pattern": expression}


def fmt(name: str) -> Schema:
    return {"type": "string", "format": name}


def some(items: Schema, min_items: int = 0, max_items: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": min_items, "maxItems": max_items}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def any_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def requires(schema: Schema, *names: str) -> Schema:
    """Return the object schema with only these members required."""
    return {**schema, "required": list(names)}


def tagged(tag: str, /, **properties: Schema) -> Schema:
    """Return an object schema whose member `type` is a constant."""
    return object_of(type={"const": tag}, **properties)


def tool(tool_name: str, /, **arguments: Schema) -> Schema:
    """Return the schema of a call of one tool."""
    return object_of(name={"const": tool_name}, arguments=object_of(**arguments))


def recursive(name: str, schema: Schema) -> Schema:
    return {"$ref": f"#/$defs/{name}", "$defs": {name: schema}}


def ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


POINT = object_of(lat=number(-90, 90, "number"), lon=number(-180, 180, "number"))
MONEY = object_of(amount={"type": "integer", "minimum": 0}, currency=pattern("^[A-Z]{3}$"))
ADDRESS = object_of(street=chars(20), city=chars(12), zip=pattern(r"^\d{5}(-\d{4})?$"), country=enum("US", "CA", "MX"))
APPLICATION_SCHEMAS: dict[str, Schema] = {
    "sentiment": object_of(sentiment=enum("positive", "negative", "neutral"), confidence=number(0, 1, "number")),
    "labels": object_of(labels=some(enum("bug", "feature", "question", "docs"), 1, 4)),
    "yes or no": object_of(answer=enum("yes", "no"), why=chars(30)),
    "score": object_of(score=number(1, 10), rationale=chars(24)),
    "ranking": some(object_of(rank=number(1, 5), name=chars(8)), 2, 3),
    "entities": object_of(
        entities=some(
            object_of(text=chars(10), label=enum("PER", "ORG", "LOC"), start=number(0, 999), end=number(0, 999))
        )
    ),
    "relations": some(object_of(head=chars(6), relation=enum("works_at", "born_in"), tail=chars(6)), 0, 2),
    "summary": object_of(title=chars(16), bullets=some(chars(20), 1, 3)),
    "translation": object_of(source=pattern("^[a-z]{2}$"), target=pattern("^[a-z]{2}(-[A-Z]{2})?$"), text=chars(20)),
    "steps": object_of(steps=some(object_of(explanation=chars(14), output=chars(10)), 1, 2), final_answer=chars(8)),
    "quiz": object_of(question=chars(20), options=some(chars(6), 4, 4), answer=number(0, 3)),
    "flash cards": some(object_of(front=chars(8), back=chars(8)), 1, 2),
    "sql": object_of(
        table=pattern("^[a-z_]{1,8}$"), columns=some(pattern("^[a-z_]{1,6}$"), 1, 3), limit=number(1, 100)
    ),
    "where": recursive(
        "cond",
        any_of(
            object_of(field=pattern("^[a-z]{1,5}$"), op=enum("=", "<", ">"), value=any_of(INT, chars(4))),
            object_of(all=some(ref("cond"), 1, 2)),
            object_of(any=some(ref("cond"), 1, 2)),
        ),
    ),
    "invoice": object_of(
        number=pattern(r"^INV-\d{4}$"),
        date=fmt("date"),
        lines=some(object_of(item=chars(8), price=MONEY), 1, 2),
        total=MONEY,
    ),
    "order": object_of(id=fmt("uuid"), status=enum("new", "paid", "sent"), address=ADDRESS, gift={"type": "boolean"}),
    "cart": object_of(
        items=some(object_of(sku=pattern("^[A-Z0-9]{6}$"), count=number(1, 99)), 1, 3), coupon=or_null(chars(8))
    ),
    "user": object_of(id=INT, name=chars(12), email=fmt("email"), roles=some(enum("admin", "user"), 1, 2)),
    "profile": requires(object_of(name=chars(8), bio=chars(20), age=number(13, 120), site=fmt("uri")), "name"),
    "address": ADDRESS,
    "point": POINT,
    "box": object_of(min=POINT, max=POINT),
    "geo point": object_of(
        type={"const": "Point"}, coordinates={"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2}
    ),
    "geo line": object_of(type={"const": "LineString"}, coordinates=some(some(NUMBER, 2, 2), 2, 3)),
    "feature": object_of(
        type={"const": "Feature"},
        geometry=or_null(tagged("Point", at=POINT)),
        properties={"type": "object", "additionalProperties": chars(4)},
    ),
    "event": object_of(
        title=chars(12), start=fmt("date-time"), end=fmt("date-time"), attendees=some(fmt("email"), 0, 2)
    ),
    "alarm": object_of(at=pattern(r"^([01]\d|2[0-3]):[0-5]\d$"), days=some(enum("mon", "tue", "wed"), 0, 3)),
    "cron": object_of(minute=number(0, 59), hour=number(0, 23), command=chars(10)),
    "recipe": object_of(
        name=chars(12), minutes=number(1, 600), ingredients=some(object_of(name=chars(8), grams=number(1, 5000)), 1, 3)
    ),
    "movie": object_of(
        title=chars(12),
        year=number(1888, 2030),
        rating=number(0, 10, "number"),
        genres=some(enum("drama", "comedy"), 1, 2),
    ),
    "book": object_of(title=chars(12), isbn=pattern(r"^97[89]-\d{10}$"), authors=some(chars(8), 1, 2)),
    "song": object_of(title=chars(8), seconds=number(1, 3600), explicit=FLAG),
    "weather call": tool("get_weather", city=chars(10), unit=enum("celsius", "fahrenheit")),
    "search call": tool("search", query=chars(16), top_k=number(1, 20)),
    "mail call": tool("send_mail", to=some(fmt("email"), 1, 2), subject=chars(12), body=chars(20)),
    "calls": some(any_of(tool("add", a=INT, b=INT), tool("sqrt", x={"type": "number", "minimum": 0})), 1, 2),
    "tool or text": any_of(tagged("text", text=chars(16)), tagged("tool", name=chars(6), id=pattern("^[0-9a-f]{8}$"))),
    "shape": any_of(tagged("circle", r=NUMBER), tagged("square", side=NUMBER), tagged("box", w=NUMBER, h=NUMBER)),
    "shapes": some(any_of(tagged("circle", r=number(0, 9)), tagged("square", a=number(0, 9))), 1, 3),
    "payment": {"oneOf": [tagged("card", last4=pattern(r"^\d{4}$")), tagged("iban", iban=pattern(r"^[A-Z]{2}\d{6}$"))]},
    "result": {"oneOf": [object_of(ok=INT), object_of(error=object_of(code=number(400, 599), message=chars(12)))]},
    "rpc request": object_of(jsonrpc={"const": "2.0"}, method=pattern("^[a-z.]{1,8}$"), params=some(INT, 0, 2), id=INT),
    "rpc response": object_of(jsonrpc={"const": "2.0"}, id=INT, result=or_null(chars(6))),
    "log line": object_of(
        level=enum("DEBUG", "INFO", "ERROR"),
        at=fmt("date-time"),
        message=chars(16),
        fields={"type": "object", "additionalProperties": INT},
    ),
    "metric": object_of(
        name=pattern("^[a-z_]{1,10}$"), value=NUMBER, labels={"type": "object", "additionalProperties": chars(4)}
    ),
    "span": object_of(
        trace=pattern("^[0-9a-f]{16}$"), parent=or_null(pattern("^[0-9a-f]{8}$")), ms={"type": "number", "minimum": 0}
    ),
    "commit": object_of(type=enum("feat", "fix", "docs"), scope=or_null(chars(6)), subject=chars(20), breaking=FLAG),
    "review": object_of(
        file=pattern(r"^[a-z]{1,6}\.py$"), line=number(1, 9999), severity=enum("low", "high"), text=chars(16)
    ),
    "diff": some(
        object_of(op=enum("add", "remove", "replace"), path=pattern("^(/[a-z]{1,4}){1,2}$"), value=or_null(INT)), 1, 2
    ),
    "test cases": some(object_of(input=some(INT, 0, 3), output=INT), 1, 2),
    "function": object_of(
        name=pattern("^[a-z_][a-z0-9_]{0,9}$"),
        parameters=some(object_of(name=chars(4), type=enum("int", "str")), 0, 2),
        returns=or_null(enum("int", "str")),
    ),
    "package": object_of(
        name=pattern("^[a-z][a-z-]{0,7}$"), version=pattern(r"^\d{1,2}\.\d{1,2}\.\d{1,2}$"), private=FLAG
    ),
    "dependencies": {"type": "object", "additionalProperties": pattern(r"^\^?\d\.\d$")},
    "container": object_of(
        image=pattern(r"^[a-z]{1,6}:[0-9.]{1,4}$"),
        ports=some(number(1, 65535), 0, 2),
        env=some(object_of(name=chars(4), value=chars(4)), 0, 1),
    ),
    "pod": object_of(
        apiVersion={"const": "v1"},
        kind={"const": "Pod"},
        metadata=object_of(name=pattern("^[a-z-]{1,8}$")),
        spec=object_of(replicas=number(0, 9)),
    ),
    "workflow": object_of(
        on=some(enum("push", "pull_request"), 1, 2), jobs=some(object_of(name=chars(6), run=chars(10)), 1, 2)
    ),
    "server": object_of(host=fmt("hostname"), port=number(1, 65535), tls=FLAG),
    "network": object_of(address=fmt("ipv4"), mask=number(0, 32), gateway=or_null(fmt("ipv4"))),
    "dns": object_of(type=enum("A", "AAAA", "MX"), ttl=number(60, 86400), value=any_of(fmt("ipv4"), fmt("ipv6"))),
    "certificate": object_of(cn=fmt("hostname"), serial=pattern("^[0-9A-F]{8}$"), not_after=fmt("date")),
    "color": pattern("^#[0-9a-f]{6}$"),
    "theme": object_of(primary=pattern("^#[0-9a-f]{3}$"), dark=FLAG, radius=number(0, 24)),
    "phone": pattern(r"^\+[1-9]\d{7,11}$"),
    "plate": pattern("^[A-Z]{1,3}-[A-Z]{1,2} [1-9][0-9]{0,3}$"),
    "price": pattern(r"^\d{1,3}\.\d{2}$"),
    "percent": {"type": "number", "minimum": 0, "maximum": 100},
    "temperature": object_of(celsius=number(-273.15, 1000, "number")),
    "dice": some(number(1, 6), 2, 2),
    "board": some(some(enum("x", "o", ""), 3, 3), 3, 3),
    "chess": object_of(move=pattern("^[a-h][1-8][a-h][1-8]$"), check=FLAG, evaluation=number(-99, 99, "number")),
    "matrix": some(some(number(-9, 9), 2, 2), 2, 2),
    "vector": some(NUMBER, 3, 3),
    "tuple": {"type": "array", "prefixItems": [chars(4), INT, FLAG], "items": False, "minItems": 3},
    "pairs": some({"type": "array", "prefixItems": [chars(3), INT], "items": False, "minItems": 2}, 1, 2),
    "range": {"type": "array", "prefixItems": [number(0, 9), number(10, 19)], "items": False, "minItems": 2},
    "list": recursive("node", object_of(value=INT, next=or_null(ref("node")))),
    "binary tree": recursive("t", object_of(v=number(0, 9), l=or_null(ref("t")), r=or_null(ref("t")))),
    "expression": recursive("e", any_of(object_of(n=INT), object_of(op=enum("+", "*"), a=ref("e"), b=ref("e")))),
    "lisp": recursive("s", any_of(INT, some(ref("s"), 0, 2))),
    "folder": recursive("f", object_of(name=chars(4), files=some(chars(4), 0, 2), folders=some(ref("f"), 0, 1))),
    "thread": recursive("c", object_of(author=chars(5), text=chars(8), replies=some(ref("c"), 0, 1))),
    "menu": recursive(
        "m", requires(object_of(label=chars(6), url=pattern("^/[a-z]{0,5}$"), items=some(ref("m"), 1, 2)), "label")
    ),
    "team": recursive("p", object_of(name=chars(5), reports=some(ref("p"), 0, 1))),
    "widget": recursive("w", any_of(tagged("text", value=chars(5)), tagged("row", children=some(ref("w"), 1, 2)))),
    "markup": recursive("h", object_of(tag=enum("p", "b", "i"), inside=some(any_of(chars(5), ref("h")), 0, 2))),
    "json": recursive(
        "j",
        any_of(NULL, FLAG, INT, chars(4), some(ref("j"), 0, 2), {"type": "object", "additionalProperties": ref("j")}),
    ),
    "two kinds of node": {
        "$ref": "#/$defs/a",
        "$defs": {"a": object_of(b=or_null(ref("b"))), "b": object_of(a=or_null(ref("a")), n=number(0, 3))},
    },
    "nullable number": object_of(value={"type": ["number", "null"]}),
    "text or number": {"type": ["string", "integer"], "maxLength": 4},
    "many types": some({"type": ["boolean", "null", "integer"]}, 1, 4),
    "constant": object_of(version={"const": 3}, kind={"const": "x"}),
    "nested constants": object_of(a=object_of(b=object_of(c={"const": [1, {"d": None}]}))),
    "mixed enum": object_of(value=enum(1, "one", None, True, [1], {"one": 1})),
    "unicode enum": object_of(size=enum("größe", "大きい", "μικρό", "🙂")),
    "quotes in an enum": enum('say "hi"', "back\\slash", "new\nline", "tab\t"),
    "long enum": enum(*(f"value_{at:03d}" for at in range(120))),
    "countries": object_of(countries=some(enum("AT", "BE", "CH", "DE", "DK", "ES", "FR", "GB", "IE", "IT"), 1, 3)),
    "optional": requires(object_of(a=INT, b=INT, c=INT, d=INT)),
    "optional between": requires(object_of(a=INT, b=chars(2), c=INT), "a", "c"),
    "open map": {"type": "object", "additionalProperties": number(0, 9)},
    "map of maps": {"type": "object", "additionalProperties": {"type": "object", "additionalProperties": FLAG}},
    "map beside members": {
        "type": "object",
        "properties": {"id": INT},
        "required": ["id"],
        "additionalProperties": chars(3),
    },
    "named by pattern": {"type": "object", "patternProperties": {"^x_[a-z]{1,3}$": INT}, "additionalProperties": False},
    "map by pattern": {"type": "object", "additionalProperties": INT, "propertyNames": {"pattern": "^[a-z]{2}$"}},
    "closed": {"type": "object", "properties": {"only": chars(3)}, "additionalProperties": False},
    "open": {"type": "object", "properties": {"id": INT}, "required": ["id"]},
    "at least 1": {"type": "integer", "minimum": 1},
    "below zero": {"type": "integer", "exclusiveMaximum": 0},
    "even": {"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": 40},
    "exclusive": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "wide": {"type": "integer", "minimum": -1000000, "maximum": 1000000},
    "odd bounds": {"type": "integer", "minimum": 97, "maximum": 10203},
    "port or name": any_of(number(1, 65535), pattern("^[a-z]{1,8}$")),
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": INT}, "required": ["a"]},
            {"properties": {"b": FLAG}, "required": ["b"]},
        ]
    },
    "inherited": {
        "allOf": [ref("base"), {"properties": {"breed": chars(5)}, "required": ["breed"]}],
        "$defs": {"base": {"type": "object", "properties": {"name": chars(5)}, "required": ["name"]}},
    },
    "shared": {
        "type": "object",
        "properties": {"from": ref("p"), "to": ref("p")},
        "required": ["from", "to"],
        "$defs": {"p": POINT},
    },
    "pydantic": {
        "$defs": {
            "Size": {"enum": ["S", "M", "L"], "title": "Size", "type": "string"},
            "Item": {
                "properties": {
                    "name": {"maxLength": 6, "title": "Name", "type": "string"},
                    "size": {"$ref": "#/$defs/Size"},
                },
                "required": ["name", "size"],
                "title": "Item",
                "type": "object",
            },
        },
        "properties": {"items": {"items": {"$ref": "#/$defs/Item"}, "maxItems": 2, "title": "Items", "type": "array"}},
        "required": ["items"],
        "title": "Basket",
        "type": "object",
    },
    "described": {
        **object_of(a={**INT, "description": "How many", "examples": [3], "default": 1}),
        "title": "Count",
        "$schema": "https://json-schema.org/draft/2020-12/schema",
    },
    "times": object_of(start=fmt("time"), duration=fmt("duration")),
    "identifiers": some(fmt("uuid"), 1, 2),
    "ipv6": fmt("ipv6"),
    "escapes": object_of(text={"type": "string", "pattern": '^["\\\\/]{1,3}$'}),
    "exactly": object_of(code={"type": "string", "minLength": 4, "maxLength": 4}),
    "at least some": {"type": "string", "minLength": 3, "maxLength": 12},
    "deep list": some(some(some(some(number(0, 1), 1, 1), 1, 1), 1, 2), 1, 2),
    "two answers": {"anyOf": [object_of(answer=chars(8)), object_of(question=chars(8))]},
    "survey": object_of(**{f"q{at}": number(1, 5) for at in range(1, 9)}),
    "flags": object_of(**dict.fromkeys(("read", "write", "execute", "share", "delete", "archive"), FLAG)),
    "resume": object_of(
        name=chars(8),
        contact=object_of(email=fmt("email"), phone=or_null(pattern(r"^\+\d{8,10}$"))),
        jobs=some(object_of(title=chars(8), years=number(0, 50, "number")), 0, 2),
        skills=some(chars(6), 1, 3),
    ),
    "patient": object_of(
        age=number(0, 120),
        sex=enum("f", "m", "x"),
        pressure=object_of(systolic=number(60, 250), diastolic=number(30, 150)),
        notes=or_null(chars(10)),
    ),
    "lab": some(
        object_of(test=enum("Hb", "Na", "K"), value=number(0, 300, "number"), unit=enum("g/l", "mmol/l")), 1, 2
    ),
    "flight": object_of(
        number=pattern(r"^[A-Z]{2}\d{2,4}$"),
        origin=pattern("^[A-Z]{3}$"),
        target=pattern("^[A-Z]{3}$"),
        stops=number(0, 3),
    ),
    "hotel": object_of(nights=number(1, 30), rooms=number(1, 5), board=enum("none", "half", "full"), price=MONEY),
    "contract": object_of(
        parties=some(chars(8), 2, 2),
        signed=fmt("date"),
        clauses=some(object_of(id=pattern(r"^\d(\.\d)?$"), text=chars(12)), 1, 2),
    ),
    "agent": object_of(
        thought=chars(16), action=any_of(tagged("search", query=chars(8)), tagged("finish", answer=chars(8)))
    ),
    "plan": some(object_of(id=number(1, 9), task=chars(10), after=some(number(1, 9), 0, 2)), 1, 2),
    "graph": object_of(
        nodes=some(pattern("^[a-z]$"), 1, 3),
        edges=some(object_of(a=pattern("^[a-z]$"), b=pattern("^[a-z]$"), w=NUMBER), 0, 2),
    ),
    "machine": object_of(
        states=some(chars(3), 1, 2),
        moves=some(
            {"type": "array", "prefixItems": [chars(3), chars(1), chars(3)], "items": False, "minItems": 3}, 0, 1
        ),
    ),
    "grid": object_of(width=number(1, 8), height=number(1, 8), cells=some(number(0, 3), 1, 6)),
    "music": some(object_of(note=pattern("^[A-G][#b]?[0-8]$"), beats=enum(1, 2, 4, 0.5)), 1, 3),
    "date parts": object_of(year=number(1900, 2100), month=number(1, 12), day=number(1, 31)),
    "roman": object_of(number=pattern("^M{0,3}(CM|CD|D?C{0,3})(XC|XL|L?X{0,3})(IX|IV|V?I{0,3})$")),
    "base64": object_of(data=pattern("^([A-Za-z0-9+/]{4}){1,3}$")),
    "slug": object_of(slug=pattern("^[a-z0-9]+(-[a-z0-9]+){0,2}$")),
    "semver": pattern(r"^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9a-z]{1,4})?$"),
}
# Schemas without a bound on the length of the value: a random model does not end such a value.
UNBOUNDED = frozenset({"anything", "empty schema", "annotations only"})
SCHEMAS: dict[str, Schema] = {
    **{f"sample: {name}": schema for name, (schema, _) in SAMPLES.items() if name not in UNBOUNDED and schema},
    **{f"wild: {name}": schema for name, schema in APPLICATION_SCHEMAS.items()},
}
MORE_EXPRESSIONS = (
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}",
    r"(GET|POST|PUT) /[a-z]{1,8} HTTP/1\.[01]",
    r"#[0-9a-fA-F]{6}",
    r"[a-z]{1,6}@[a-z]{1,6}\.(com|org)",
    r"\$\d{1,3}(,\d{3})*\.\d{2}",
    r"(mon|tues|wednes|thurs|fri|satur|sun)day",
)
RULES = (
    'root ::= "<" [a-z]+ ">"',
    'root ::= item ("," item){0,4}\nitem ::= [0-9]{1,3} | "(" root ")"',
    'root ::= expr\nexpr ::= term (("+" | "-") term){0,3}\nterm ::= [0-9]{1,2} | "(" expr ")"',
    'root ::= "SELECT " column (", " column){0,2} " FROM " name ";"\ncolumn ::= name | "*"\nname ::= [a-z]{1,6}',
    'root ::= line{1,3}\nline ::= "- " [a-z ]{1,12} "\\n"',
    'root ::= "<b>" (root | [a-z]{1,4}) "</b>"',
    'root ::= ("a" root "b") | "ab"',
    'root ::= move{2,4}\nmove ::= [1-9] ". " [KQRBN]? [a-h] [1-8] " "',
    'root ::= key "=" value ("&" key "=" value){0,2}\nkey ::= [a-z]{1,4}\nvalue ::= [0-9]{1,4}',
    'root ::= "yes" | "no" | "perhaps " ("not" | "so")',
)
GRAMMARS: dict[str, Grammar] = {
    **{name: Grammar("json_schema", json.dumps(schema)) for name, schema in SCHEMAS.items()},
    **{f"regex: {text}": Grammar("regex", text) for text in (*EXPRESSIONS, *MORE_EXPRESSIONS) if text},
    **{f"rules: {at}": Grammar("ebnf", rules) for at, rules in enumerate(RULES)},
}
