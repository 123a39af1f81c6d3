"""Two hundred JSON schemas and fifty expressions and grammars as applications send them."""

import json
from typing import Any

from cluster.grammar.asked import Grammar
from tests.grammar.schema.samples import SAMPLES, of
from tests.grammar.test_regex import EXPRESSIONS

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
INT: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}


def short(most: int) -> Schema:
    return {"type": "string", "maxLength": most}


def within(least: float, most: float, kind: str = "integer") -> Schema:
    return {"type": kind, "minimum": least, "maximum": most}


def one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


def pattern(expression: str) -> Schema:
    return {"type": "string", "pattern": expression}


def form(name: str) -> Schema:
    return {"type": "string", "format": name}


def some(items: Schema, least: int = 0, most: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def maybe(schema: Schema, *names: str) -> Schema:
    """An object of which only these members are required."""
    return {**schema, "required": list(names)}


def kind(which: str, /, **more: Schema) -> Schema:
    return of(type={"const": which}, **more)


def call(which: str, /, **arguments: Schema) -> Schema:
    return of(name={"const": which}, arguments=of(**arguments))


def recursive(name: str, schema: Schema) -> Schema:
    return {"$ref": f"#/$defs/{name}", "$defs": {name: schema}}


def me(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


POINT = of(lat=within(-90, 90, "number"), lon=within(-180, 180, "number"))
MONEY = of(amount={"type": "integer", "minimum": 0}, currency=pattern("^[A-Z]{3}$"))
ADDRESS = of(street=short(20), city=short(12), zip=pattern(r"^\d{5}(-\d{4})?$"), country=one_of("US", "CA", "MX"))
WILD: dict[str, Schema] = {
    "sentiment": of(sentiment=one_of("positive", "negative", "neutral"), confidence=within(0, 1, "number")),
    "labels": of(labels=some(one_of("bug", "feature", "question", "docs"), 1, 4)),
    "yes or no": of(answer=one_of("yes", "no"), why=short(30)),
    "score": of(score=within(1, 10), rationale=short(24)),
    "ranking": some(of(rank=within(1, 5), name=short(8)), 2, 3),
    "entities": of(
        entities=some(of(text=short(10), label=one_of("PER", "ORG", "LOC"), start=within(0, 999), end=within(0, 999)))
    ),
    "relations": some(of(head=short(6), relation=one_of("works_at", "born_in"), tail=short(6)), 0, 2),
    "summary": of(title=short(16), bullets=some(short(20), 1, 3)),
    "translation": of(source=pattern("^[a-z]{2}$"), target=pattern("^[a-z]{2}(-[A-Z]{2})?$"), text=short(20)),
    "steps": of(steps=some(of(explanation=short(14), output=short(10)), 1, 2), final_answer=short(8)),
    "quiz": of(question=short(20), options=some(short(6), 4, 4), answer=within(0, 3)),
    "flash cards": some(of(front=short(8), back=short(8)), 1, 2),
    "sql": of(table=pattern("^[a-z_]{1,8}$"), columns=some(pattern("^[a-z_]{1,6}$"), 1, 3), limit=within(1, 100)),
    "where": recursive(
        "cond",
        either(
            of(field=pattern("^[a-z]{1,5}$"), op=one_of("=", "<", ">"), value=either(INT, short(4))),
            of(all=some(me("cond"), 1, 2)),
            of(any=some(me("cond"), 1, 2)),
        ),
    ),
    "invoice": of(
        number=pattern(r"^INV-\d{4}$"), date=form("date"), lines=some(of(item=short(8), price=MONEY), 1, 2), total=MONEY
    ),
    "order": of(id=form("uuid"), status=one_of("new", "paid", "sent"), address=ADDRESS, gift={"type": "boolean"}),
    "cart": of(items=some(of(sku=pattern("^[A-Z0-9]{6}$"), count=within(1, 99)), 1, 3), coupon=or_null(short(8))),
    "user": of(id=INT, name=short(12), email=form("email"), roles=some(one_of("admin", "user"), 1, 2)),
    "profile": maybe(of(name=short(8), bio=short(20), age=within(13, 120), site=form("uri")), "name"),
    "address": ADDRESS,
    "point": POINT,
    "box": of(min=POINT, max=POINT),
    "geo point": of(
        type={"const": "Point"}, coordinates={"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2}
    ),
    "geo line": of(type={"const": "LineString"}, coordinates=some(some(NUMBER, 2, 2), 2, 3)),
    "feature": of(
        type={"const": "Feature"},
        geometry=or_null(kind("Point", at=POINT)),
        properties={"type": "object", "additionalProperties": short(4)},
    ),
    "event": of(title=short(12), start=form("date-time"), end=form("date-time"), attendees=some(form("email"), 0, 2)),
    "alarm": of(at=pattern(r"^([01]\d|2[0-3]):[0-5]\d$"), days=some(one_of("mon", "tue", "wed"), 0, 3)),
    "cron": of(minute=within(0, 59), hour=within(0, 23), command=short(10)),
    "recipe": of(
        name=short(12), minutes=within(1, 600), ingredients=some(of(name=short(8), grams=within(1, 5000)), 1, 3)
    ),
    "movie": of(
        title=short(12),
        year=within(1888, 2030),
        rating=within(0, 10, "number"),
        genres=some(one_of("drama", "comedy"), 1, 2),
    ),
    "book": of(title=short(12), isbn=pattern(r"^97[89]-\d{10}$"), authors=some(short(8), 1, 2)),
    "song": of(title=short(8), seconds=within(1, 3600), explicit=FLAG),
    "weather call": call("get_weather", city=short(10), unit=one_of("celsius", "fahrenheit")),
    "search call": call("search", query=short(16), top_k=within(1, 20)),
    "mail call": call("send_mail", to=some(form("email"), 1, 2), subject=short(12), body=short(20)),
    "calls": some(either(call("add", a=INT, b=INT), call("sqrt", x={"type": "number", "minimum": 0})), 1, 2),
    "tool or text": either(kind("text", text=short(16)), kind("tool", name=short(6), id=pattern("^[0-9a-f]{8}$"))),
    "shape": either(kind("circle", r=NUMBER), kind("square", side=NUMBER), kind("box", w=NUMBER, h=NUMBER)),
    "shapes": some(either(kind("circle", r=within(0, 9)), kind("square", a=within(0, 9))), 1, 3),
    "payment": {"oneOf": [kind("card", last4=pattern(r"^\d{4}$")), kind("iban", iban=pattern(r"^[A-Z]{2}\d{6}$"))]},
    "result": {"oneOf": [of(ok=INT), of(error=of(code=within(400, 599), message=short(12)))]},
    "rpc request": of(jsonrpc={"const": "2.0"}, method=pattern("^[a-z.]{1,8}$"), params=some(INT, 0, 2), id=INT),
    "rpc response": of(jsonrpc={"const": "2.0"}, id=INT, result=or_null(short(6))),
    "log line": of(
        level=one_of("DEBUG", "INFO", "ERROR"),
        at=form("date-time"),
        message=short(16),
        fields={"type": "object", "additionalProperties": INT},
    ),
    "metric": of(
        name=pattern("^[a-z_]{1,10}$"), value=NUMBER, labels={"type": "object", "additionalProperties": short(4)}
    ),
    "span": of(
        trace=pattern("^[0-9a-f]{16}$"), parent=or_null(pattern("^[0-9a-f]{8}$")), ms={"type": "number", "minimum": 0}
    ),
    "commit": of(type=one_of("feat", "fix", "docs"), scope=or_null(short(6)), subject=short(20), breaking=FLAG),
    "review": of(
        file=pattern(r"^[a-z]{1,6}\.py$"), line=within(1, 9999), severity=one_of("low", "high"), text=short(16)
    ),
    "diff": some(
        of(op=one_of("add", "remove", "replace"), path=pattern("^(/[a-z]{1,4}){1,2}$"), value=or_null(INT)), 1, 2
    ),
    "test cases": some(of(input=some(INT, 0, 3), output=INT), 1, 2),
    "function": of(
        name=pattern("^[a-z_][a-z0-9_]{0,9}$"),
        parameters=some(of(name=short(4), type=one_of("int", "str")), 0, 2),
        returns=or_null(one_of("int", "str")),
    ),
    "package": of(name=pattern("^[a-z][a-z-]{0,7}$"), version=pattern(r"^\d{1,2}\.\d{1,2}\.\d{1,2}$"), private=FLAG),
    "dependencies": {"type": "object", "additionalProperties": pattern(r"^\^?\d\.\d$")},
    "container": of(
        image=pattern(r"^[a-z]{1,6}:[0-9.]{1,4}$"),
        ports=some(within(1, 65535), 0, 2),
        env=some(of(name=short(4), value=short(4)), 0, 1),
    ),
    "pod": of(
        apiVersion={"const": "v1"},
        kind={"const": "Pod"},
        metadata=of(name=pattern("^[a-z-]{1,8}$")),
        spec=of(replicas=within(0, 9)),
    ),
    "workflow": of(on=some(one_of("push", "pull_request"), 1, 2), jobs=some(of(name=short(6), run=short(10)), 1, 2)),
    "server": of(host=form("hostname"), port=within(1, 65535), tls=FLAG),
    "network": of(address=form("ipv4"), mask=within(0, 32), gateway=or_null(form("ipv4"))),
    "dns": of(type=one_of("A", "AAAA", "MX"), ttl=within(60, 86400), value=either(form("ipv4"), form("ipv6"))),
    "certificate": of(cn=form("hostname"), serial=pattern("^[0-9A-F]{8}$"), not_after=form("date")),
    "color": pattern("^#[0-9a-f]{6}$"),
    "theme": of(primary=pattern("^#[0-9a-f]{3}$"), dark=FLAG, radius=within(0, 24)),
    "phone": pattern(r"^\+[1-9]\d{7,11}$"),
    "plate": pattern("^[A-Z]{1,3}-[A-Z]{1,2} [1-9][0-9]{0,3}$"),
    "price": pattern(r"^\d{1,3}\.\d{2}$"),
    "percent": {"type": "number", "minimum": 0, "maximum": 100},
    "temperature": of(celsius=within(-273.15, 1000, "number")),
    "dice": some(within(1, 6), 2, 2),
    "board": some(some(one_of("x", "o", ""), 3, 3), 3, 3),
    "chess": of(move=pattern("^[a-h][1-8][a-h][1-8]$"), check=FLAG, evaluation=within(-99, 99, "number")),
    "matrix": some(some(within(-9, 9), 2, 2), 2, 2),
    "vector": some(NUMBER, 3, 3),
    "tuple": {"type": "array", "prefixItems": [short(4), INT, FLAG], "items": False, "minItems": 3},
    "pairs": some({"type": "array", "prefixItems": [short(3), INT], "items": False, "minItems": 2}, 1, 2),
    "range": {"type": "array", "prefixItems": [within(0, 9), within(10, 19)], "items": False, "minItems": 2},
    "list": recursive("node", of(value=INT, next=or_null(me("node")))),
    "binary tree": recursive("t", of(v=within(0, 9), l=or_null(me("t")), r=or_null(me("t")))),
    "expression": recursive("e", either(of(n=INT), of(op=one_of("+", "*"), a=me("e"), b=me("e")))),
    "lisp": recursive("s", either(INT, some(me("s"), 0, 2))),
    "folder": recursive("f", of(name=short(4), files=some(short(4), 0, 2), folders=some(me("f"), 0, 1))),
    "thread": recursive("c", of(author=short(5), text=short(8), replies=some(me("c"), 0, 1))),
    "menu": recursive("m", maybe(of(label=short(6), url=pattern("^/[a-z]{0,5}$"), items=some(me("m"), 1, 2)), "label")),
    "team": recursive("p", of(name=short(5), reports=some(me("p"), 0, 1))),
    "widget": recursive("w", either(kind("text", value=short(5)), kind("row", children=some(me("w"), 1, 2)))),
    "markup": recursive("h", of(tag=one_of("p", "b", "i"), inside=some(either(short(5), me("h")), 0, 2))),
    "json": recursive(
        "j", either(NULL, FLAG, INT, short(4), some(me("j"), 0, 2), {"type": "object", "additionalProperties": me("j")})
    ),
    "two kinds of node": {
        "$ref": "#/$defs/a",
        "$defs": {"a": of(b=or_null(me("b"))), "b": of(a=or_null(me("a")), n=within(0, 3))},
    },
    "nullable number": of(value={"type": ["number", "null"]}),
    "text or number": {"type": ["string", "integer"], "maxLength": 4},
    "many types": some({"type": ["boolean", "null", "integer"]}, 1, 4),
    "constant": of(version={"const": 3}, kind={"const": "x"}),
    "nested constants": of(a=of(b=of(c={"const": [1, {"d": None}]}))),
    "mixed enum": of(value=one_of(1, "one", None, True, [1], {"one": 1})),
    "unicode enum": of(size=one_of("größe", "大きい", "μικρό", "🙂")),
    "quotes in an enum": one_of('say "hi"', "back\\slash", "new\nline", "tab\t"),
    "long enum": one_of(*(f"value_{at:03d}" for at in range(120))),
    "countries": of(countries=some(one_of("AT", "BE", "CH", "DE", "DK", "ES", "FR", "GB", "IE", "IT"), 1, 3)),
    "optional": maybe(of(a=INT, b=INT, c=INT, d=INT)),
    "optional between": maybe(of(a=INT, b=short(2), c=INT), "a", "c"),
    "open map": {"type": "object", "additionalProperties": within(0, 9)},
    "map of maps": {"type": "object", "additionalProperties": {"type": "object", "additionalProperties": FLAG}},
    "map beside members": {
        "type": "object",
        "properties": {"id": INT},
        "required": ["id"],
        "additionalProperties": short(3),
    },
    "named by pattern": {"type": "object", "patternProperties": {"^x_[a-z]{1,3}$": INT}, "additionalProperties": False},
    "map by pattern": {"type": "object", "additionalProperties": INT, "propertyNames": {"pattern": "^[a-z]{2}$"}},
    "closed": {"type": "object", "properties": {"only": short(3)}, "additionalProperties": False},
    "open": {"type": "object", "properties": {"id": INT}, "required": ["id"]},
    "at least 1": {"type": "integer", "minimum": 1},
    "below zero": {"type": "integer", "exclusiveMaximum": 0},
    "even": {"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": 40},
    "exclusive": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "wide": {"type": "integer", "minimum": -1000000, "maximum": 1000000},
    "odd bounds": {"type": "integer", "minimum": 97, "maximum": 10203},
    "port or name": either(within(1, 65535), pattern("^[a-z]{1,8}$")),
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": INT}, "required": ["a"]},
            {"properties": {"b": FLAG}, "required": ["b"]},
        ]
    },
    "inherited": {
        "allOf": [me("base"), {"properties": {"breed": short(5)}, "required": ["breed"]}],
        "$defs": {"base": {"type": "object", "properties": {"name": short(5)}, "required": ["name"]}},
    },
    "shared": {
        "type": "object",
        "properties": {"from": me("p"), "to": me("p")},
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
        **of(a={**INT, "description": "How many", "examples": [3], "default": 1}),
        "title": "Count",
        "$schema": "https://json-schema.org/draft/2020-12/schema",
    },
    "times": of(start=form("time"), duration=form("duration")),
    "identifiers": some(form("uuid"), 1, 2),
    "ipv6": form("ipv6"),
    "escapes": of(text={"type": "string", "pattern": '^["\\\\/]{1,3}$'}),
    "exactly": of(code={"type": "string", "minLength": 4, "maxLength": 4}),
    "at least some": {"type": "string", "minLength": 3, "maxLength": 12},
    "deep list": some(some(some(some(within(0, 1), 1, 1), 1, 1), 1, 2), 1, 2),
    "two answers": {"anyOf": [of(answer=short(8)), of(question=short(8))]},
    "survey": of(**{f"q{at}": within(1, 5) for at in range(1, 9)}),
    "flags": of(**dict.fromkeys(("read", "write", "execute", "share", "delete", "archive"), FLAG)),
    "resume": of(
        name=short(8),
        contact=of(email=form("email"), phone=or_null(pattern(r"^\+\d{8,10}$"))),
        jobs=some(of(title=short(8), years=within(0, 50, "number")), 0, 2),
        skills=some(short(6), 1, 3),
    ),
    "patient": of(
        age=within(0, 120),
        sex=one_of("f", "m", "x"),
        pressure=of(systolic=within(60, 250), diastolic=within(30, 150)),
        notes=or_null(short(10)),
    ),
    "lab": some(of(test=one_of("Hb", "Na", "K"), value=within(0, 300, "number"), unit=one_of("g/l", "mmol/l")), 1, 2),
    "flight": of(
        number=pattern(r"^[A-Z]{2}\d{2,4}$"),
        origin=pattern("^[A-Z]{3}$"),
        target=pattern("^[A-Z]{3}$"),
        stops=within(0, 3),
    ),
    "hotel": of(nights=within(1, 30), rooms=within(1, 5), board=one_of("none", "half", "full"), price=MONEY),
    "contract": of(
        parties=some(short(8), 2, 2),
        signed=form("date"),
        clauses=some(of(id=pattern(r"^\d(\.\d)?$"), text=short(12)), 1, 2),
    ),
    "agent": of(thought=short(16), action=either(kind("search", query=short(8)), kind("finish", answer=short(8)))),
    "plan": some(of(id=within(1, 9), task=short(10), after=some(within(1, 9), 0, 2)), 1, 2),
    "graph": of(
        nodes=some(pattern("^[a-z]$"), 1, 3), edges=some(of(a=pattern("^[a-z]$"), b=pattern("^[a-z]$"), w=NUMBER), 0, 2)
    ),
    "machine": of(
        states=some(short(3), 1, 2),
        moves=some(
            {"type": "array", "prefixItems": [short(3), short(1), short(3)], "items": False, "minItems": 3}, 0, 1
        ),
    ),
    "grid": of(width=within(1, 8), height=within(1, 8), cells=some(within(0, 3), 1, 6)),
    "music": some(of(note=pattern("^[A-G][#b]?[0-8]$"), beats=one_of(1, 2, 4, 0.5)), 1, 3),
    "date parts": of(year=within(1900, 2100), month=within(1, 12), day=within(1, 31)),
    "roman": of(number=pattern("^M{0,3}(CM|CD|D?C{0,3})(XC|XL|L?X{0,3})(IX|IV|V?I{0,3})$")),
    "base64": of(data=pattern("^([A-Za-z0-9+/]{4}){1,3}$")),
    "slug": of(slug=pattern("^[a-z0-9]+(-[a-z0-9]+){0,2}$")),
    "semver": pattern(r"^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9a-z]{1,4})?$"),
}
# Values of any length that a random model does not end.
UNBOUNDED = frozenset({"anything", "empty schema", "annotations only"})
SCHEMAS: dict[str, Schema] = {
    **{f"sample: {name}": schema for name, (schema, _) in SAMPLES.items() if name not in UNBOUNDED and schema},
    **{f"wild: {name}": schema for name, schema in WILD.items()},
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
