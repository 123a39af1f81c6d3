"""JSON Schemas of the kinds that clients send. Each has a value that its grammar must accept."""

from typing import Any

PERSON = {
    "title": "Person",
    "type": "object",
    "properties": {
        "name": {"type": "string", "title": "Name"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "email": {"anyOf": [{"type": "string", "format": "email"}, {"type": "null"}], "default": None},
    },
    "required": ["name", "age"],
}
TREE = {
    "$ref": "#/$defs/Node",
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}},
            },
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}, "name": {"type": "string"}}, "required": ["kind"]}
CALL = {
    "type": "object",
    "properties": {
        "name": {"enum": ["get_weather", "get_time"]},
        "arguments": {
            "type": "object",
            "properties": {"city": {"type": "string", "minLength": 1}, "unit": {"enum": ["C", "F"]}},
            "required": ["city"],
        },
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}


def object_of(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with exactly these properties, all of them required."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SAMPLES: dict[str, tuple[Any, Any]] = {
    "anything": (True, {"a": [1, None, "x"]}),
    "empty schema": ({}, [1.5e3]),
    "annotations only": ({"title": "x", "description": "y", "default": 3, "$schema": "s", "x-order": 1}, "z"),
    "string": ({"type": "string"}, 'a"\\\n€😀'),
    "integer": ({"type": "integer"}, -12),
    "number": ({"type": "number"}, -0.5e-7),
    "boolean": ({"type": "boolean"}, True),
    "null": ({"type": "null"}, None),
    "any object": ({"type": "object"}, {"b": {"c": []}}),
    "any array": ({"type": "array"}, [{}, []]),
    "several types": ({"type": ["string", "null", "integer"]}, None),
    "bounds beside several types": ({"type": ["integer", "null"], "minimum": 3}, 3),
    "person": (PERSON, {"name": "Ada", "age": 36, "email": None}),
    "optional left out": (PERSON, {"name": "Ada", "age": 36}),
    "tree": (TREE, {"value": 1, "children": [{"value": 2, "children": []}]}),
    "call": (CALL, {"name": "get_time", "arguments": {"city": "Rome"}}),
    "all optional": (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "c": {"type": "null"}}},
        {"b": 1},
    ),
    "no properties": ({"type": "object", "properties": {}}, {}),
    "properties without type": ({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"a": 1}),
    "open": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True},
        {"a": 1, "ab": 0},
    ),
    "a map": ({"type": "object", "additionalProperties": {"type": "number"}}, {"x": 1.5, "y": 2}),
    "open with names that need escapes": (
        {"type": "object", "properties": {'a"b': {"type": "null"}}, "additionalProperties": {"type": "boolean"}},
        {'a"b': None, "c": True},
    ),
    "required undeclared": (
        {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["b"]},
        {"a": None, "b": 1},
    ),
    "required only": (
        {"type": "object", "required": ["b"], "additionalProperties": {"type": "integer"}},
        {"b": 1, "c": 2},
    ),
    "pattern of names": ({"type": "object", "patternProperties": {"^x-[a-z]{1,3}$": {"type": "integer"}}}, {"x-ab": 1}),
    "a pattern over a property": (
        {
            "type": "object",
            "properties": {"n1": {"minimum": 3}},
            "patternProperties": {"^n\\d$": {"type": "integer"}},
            "required": ["n2"],
            "additionalProperties": False,
        },
        {"n1": 3, "n2": 0, "n4": 1},
    ),
    "names by length": ({"type": "object", "propertyNames": {"maxLength": 2}}, {"ab": 1}),
    "names by enum": ({"propertyNames": {"enum": ["x", "y"]}, "additionalProperties": {"type": "integer"}}, {"y": 1}),
    "at most two": (
        {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
        {"a": 1, "b": 2},
    ),
    "none at all": ({"type": "object", "maxProperties": 0}, {}),
    "at least one": ({"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1}, {"a": 1}),
    "two or three of four": (
        {
            "type": "object",
            "properties": {name: {"type": "boolean"} for name in "abcd"},
            "required": ["c"],
            "minProperties": 2,
            "maxProperties": 3,
        },
        {"a": True, "c": False, "d": True},
    ),
    "a forbidden property": (
        {"type": "object", "properties": {"a": False, "b": {"type": "null"}}, "additionalProperties": True},
        {"b": None, "c": 1},
    ),
    "unevaluated": ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, {"a": 1}),
    "array of integers": ({"type": "array", "items": {"type": "integer"}}, [1, 2, 3]),
    "array bounds": (
        {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
        [True, False, True],
    ),
    "no item": ({"type": "array", "maxItems": 0}, []),
    "bounds without items": ({"type": "array", "minItems": 1, "maxItems": 2}, [None]),
    "tuple": ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False}, [1, "a"]),
    "tuple and more": (
        {
            "type": "array",
            "prefixItems": [{"type": "integer"}],
            "items": {"type": "null"},
            "minItems": 2,
            "maxItems": 3,
        },
        [1, None],
    ),
    "tuple cut short": ({"prefixItems": [{"type": "integer"}, {"type": "string"}], "maxItems": 1}, [1]),
    "matrix": (
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
            "maxItems": 2,
        },
        [[1, 2], [3.5, -4]],
    ),
    "not unique is no demand": ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, [1, 1]),
    "min length": ({"type": "string", "minLength": 3}, "a\nb"),
    "max length": ({"type": "string", "maxLength": 3}, 'é"😀'),
    "both lengths": ({"type": "string", "minLength": 2, "maxLength": 5}, "abcde"),
    "long": ({"type": "string", "maxLength": 300}, "a" * 300),
    "long enough": ({"type": "string", "minLength": 120}, "a" * 121),
    "pattern": ({"type": "string", "pattern": "^[A-Z]{2}\\d{3}$"}, "AB123"),
    "pattern with quotes": ({"type": "string", "pattern": '^"[^"]{0,3}"\\\\$'}, '"a\n"\\'),
    "pattern of any": ({"type": "string", "pattern": "^.{1,4}$"}, 'a"\\é'),
    "emoji": ({"type": "string", "format": "emoji"}, "😀👍"),
    "pattern within lengths": ({"type": "string", "pattern": "^[ab]{2,4}$", "minLength": 1, "maxLength": 4}, "abab"),
    "date": ({"type": "string", "format": "date"}, "2024-02-29"),
    "date-time": ({"type": "string", "format": "date-time"}, "2024-12-31T23:59:59.5+02:00"),
    "time": ({"type": "string", "format": "time"}, "00:00:00Z"),
    "duration": ({"type": "string", "format": "duration"}, "P1Y2M3DT4H"),
    "email": ({"type": "string", "format": "email"}, "a.b+c@example.org"),
    "uuid": ({"type": "string", "format": "uuid"}, "123e4567-e89b-12d3-a456-426614174000"),
    "ipv4": ({"type": "string", "format": "ipv4"}, "192.168.0.255"),
    "ipv6": ({"type": "string", "format": "ipv6"}, "2001:db8::1"),
    "hostname": ({"type": "string", "format": "hostname"}, "www.example-1.org"),
    "uri": ({"type": "string", "format": "uri"}, "https://example.org:80/a/b?c=d#e"),
    "enum": ({"enum": ["a", 1, None, {"x": [1.5]}, 'q"']}, {"x": [1.5]}),
    "enum of a type": ({"type": "string", "enum": ["a", 1, "b"]}, "b"),
    "const": ({"const": {"a": [True, "é"]}}, {"a": [True, "é"]}),
    "const of null": ({"const": None}, None),
    "any of": ({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]}, "ab"),
    "enum beside any of with other enums": ({"enum": [1, 2], "anyOf": [{"enum": [1]}, {"enum": [5]}]}, 1),
    "const beside any of with another const": ({"const": 1, "anyOf": [{"const": 1}, {"const": 2}]}, 1),
    "any of beside properties": (
        object_of(a={"type": "integer"}, b={"type": "integer"})
        | {"required": [], "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"b": 1},
    ),
    "one of by type": ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, 3),
    "one of by constant": (
        {"oneOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}], "$defs": {"c": CAT, "d": DOG}},
        {"kind": "dog"},
    ),
    "one of by what is required": (
        {"oneOf": [object_of(meow={"type": "string"}), object_of(bark={"type": "string"})]},
        {"bark": "w"},
    ),
    "all of one": ({"allOf": [{"type": "integer", "minimum": 3}]}, 4),
    "all of several": (
        {
            "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": {"type": "string"}}, "required": ["b"]}],
            "$defs": {"base": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
        },
        {"a": 1, "b": ""},
    ),
    "all of bounds": (
        {"allOf": [{"type": "number", "minimum": 1}, {"type": "integer", "maximum": 3, "minimum": 0}]},
        2,
    ),
    "reference with bounds": ({"$ref": "#/$defs/s", "maxLength": 1, "$defs": {"s": {"type": "string"}}}, "x"),
    "reference to the root": (
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
        {"next": {"next": None}},
    ),
    "escaped reference": ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}}}, None),
    "old definitions": ({"$ref": "#/definitions/x", "definitions": {"x": {"type": "boolean"}}}, False),
    "integer bounds": ({"type": "integer", "minimum": -5, "exclusiveMaximum": 1200}, 1199),
    "number bounds": ({"type": "number", "minimum": 0.25, "exclusiveMaximum": 2}, 1.99),
    "a share": ({"type": "number", "minimum": 0, "maximum": 1}, 0.5),
    "multiples": ({"type": "integer", "multipleOf": 7}, -21),
    "multiples within bounds": ({"type": "integer", "multipleOf": 5, "minimum": 3, "maximum": 21}, 20),
    "whole numbers": ({"type": "number", "multipleOf": 1}, 12),
    "pattern beside format": (
        {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$", "format": "date"},
        "2024-02-29",
    ),
    "format and pattern cross": (
        {"type": "string", "pattern": "^2[^ZT]*T[^.]*Z$", "format": "date-time"},
        "2024-02-29T00:00:00Z",
    ),
    "several patterns": (
        {"type": "string", "allOf": [{"pattern": "^a.*$"}, {"pattern": "^.{2,4}$"}, {"pattern": "c$"}]},
        "abc",
    ),
    "a pattern of the beginning": ({"type": "string", "pattern": "^https://"}, "https://example.org"),
    "pattern shorter": ({"type": "string", "pattern": "^a[bc]*$", "minLength": 2, "maxLength": 2000}, "abcb"),
    "pattern of words shorter": ({"type": "string", "pattern": "^(ab|c)+$", "minLength": 3, "maxLength": 7}, "abcab"),
    "format shorter": (
        {"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083},
        "https://example.org/a?b=c",
    ),
    "lookaheads": ({"type": "string", "pattern": "^(?=.*\\d)(?!.*--)[a-z\\d-]{3,9}$"}, "ab-12"),
    "a lookahead inside": ({"type": "string", "pattern": "^(?:(?!ab)[abc])+$"}, "acbba"),
    "quotes by automaton": ({"type": "string", "pattern": '^(?!a)[a"\\\\\\n]{2}$'}, '"\\'),
    "base64": ({"type": "string", "contentEncoding": "base64"}, "AAEC"),
    "int32": ({"type": "integer", "format": "int32"}, -(2**31)),
    "double": ({"type": "number", "format": "double", "minimum": 0}, 0.5),
    "hundredths": ({"type": "number", "multipleOf": 0.01}, -12.34),
    "hundredths between": ({"type": "number", "multipleOf": 0.25, "minimum": 0.3, "maximum": 7}, 6.75),
    "multiples above": ({"type": "integer", "multipleOf": 7, "minimum": 3}, 7000),
    "multiples between": (
        {"type": "integer", "multipleOf": 5, "minimum": -9007199254740991, "maximum": 9007199254740991},
        -5,
    ),
    "a set": ({"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 1}, ["c", "a"]),
    "a large set": (
        {"type": "array", "items": {"enum": list("abcdefgh")}, "uniqueItems": True, "maxItems": 3},
        ["b", "h"],
    ),
    "a set of one": ({"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 1}, ["x"]),
    "not these": ({"type": "string", "not": {"enum": ["a", "bc"]}}, "b"),
    "not null": ({"type": ["string", "null"], "not": {"const": None}}, "b"),
    "never": ({"type": "object", "properties": {"a": {"not": {}}, "b": {"type": "null"}}}, {"b": None}),
    "if": (
        {
            "type": "object",
            "properties": {"kind": {"enum": ["cat", "dog", "cow"]}},
            "required": ["kind"],
            "allOf": [
                {"if": {"properties": {"kind": {"const": "cat"}}}, "then": CAT},
                {"if": {"properties": {"kind": {"const": "dog"}}}, "then": {**DOG, "required": ["name"]}},
            ],
        },
        {"kind": "dog", "name": "Rex"},
    ),
    "if and else": (
        {
            "properties": {"a": {"enum": [1, 2]}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "if": {"properties": {"a": {"const": 1}}, "required": ["a"]},
            "then": {"properties": {"b": {"minimum": 5}}},
            "else": {"properties": {"b": {"maximum": -5}}},
        },
        {"a": 2, "b": -5},
    ),
    "unevaluated over all of": (
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"type": "object", "properties": {"b": {"type": "null"}}},
            ],
            "unevaluatedProperties": False,
        },
        {"a": 1, "b": None},
    ),
    "closed inside all of": ({"allOf": [object_of(a={"type": "null"}), {"properties": {"b": {}}}]}, {"a": None}),
    "names by reference": (
        {
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/n"},
            "additionalProperties": {"type": "integer"},
            "$defs": {"n": {"type": "string", "enum": ["x", "y"]}},
        },
        {"x": 1, "y": 2},
    ),
    "required names of an enum": (
        {"propertyNames": {"enum": ["x", "y"]}, "additionalProperties": {"type": "integer"}, "required": ["x"]},
        {"x": 1},
    ),
    "percent-encoded reference": (
        {"$ref": "#/definitions/Box%3Cn%3E", "definitions": {"Box<n>": {"type": "boolean"}}},
        True,
    ),
    "anchor": ({"$ref": "#here", "$defs": {"x": {"$anchor": "here", "type": "null"}}}, None),
    "named by itself": (
        {
            "$ref": "tree",
            "$defs": {
                "t": {
                    "$id": "tree",
                    "type": "array",
                    "items": {"$ref": "#/$defs/leaf"},
                    "$defs": {"leaf": {"anyOf": [{"type": "null"}, {"$ref": "tree"}]}},
                }
            },
        },
        [None, [None]],
    ),
    "deep": (
        object_of(a=object_of(b=object_of(c=object_of(d={"type": "array", "items": object_of(e={"enum": [1, 2]})})))),
        {"a": {"b": {"c": {"d": [{"e": 1}, {"e": 2}]}}}},
    ),
    "reviews": (
        {
            "type": "array",
            "minItems": 1,
            "items": object_of(
                stars={"type": "integer", "minimum": 1, "maximum": 5}, text={"type": "string", "maxLength": 40}
            ),
        },
        [{"stars": 5, "text": "good"}],
    ),
}
