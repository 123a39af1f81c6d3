"""A JSON Schema validator that is independent of the grammars. It computes with decimals and checks formats."""

import base64
import ipaddress
import json
import re
from collections.abc import Callable
from datetime import date, datetime, time
from typing import Any
from uuid import UUID

from jsonschema import Draft7Validator, Draft202012Validator, FormatChecker

from cluster.grammar.schema.convert import parse_exact_json

FORMAT_CHECKER = FormatChecker(formats=())
# Functions that parse a text of a format, or raise an error.
PARSERS: dict[str, Callable[[str], object]] = {
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "date-time": datetime.fromisoformat,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "ipv4network": ipaddress.IPv4Network,
    "ipv6network": ipaddress.IPv6Network,
    "ipv4interface": ipaddress.IPv4Interface,
    "ipv6interface": ipaddress.IPv6Interface,
    "uuid": UUID,
    "uuid4": UUID,
    "hostname": lambda text: text.encode("idna"),
    "base64": lambda text: base64.b64decode(text, validate=True),
    "byte": lambda text: base64.b64decode(text, validate=True),
    "base64url": lambda text: base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)),
    "regex": re.compile,
    "integer": int,
}
# Regular expressions that a text of a format must match.
PATTERNS = {
    "email": r"[^@\s.]+(\.[^@\s.]+)*@[\w-]+(\.[\w-]+)*",
    "uri": r"[A-Za-z][\w+.-]*:[!-~]+",
    "uri-reference": r"[!-~]*",
    "duration": r"P(?!$)(\d+[YMWD])*(T(?!$)(\d+[HMS])*)?",
    "time": r".*(Z|[+-]\d\d:\d\d)",
    "date-time": r".*T.*(Z|[+-]\d\d:\d\d)",
    "uuid4": r"[^-]*-[^-]*-4[^-]*-[89abAB].*",
    "json-pointer": r"(/([^~/]|~[01])*)*",
}


def format_check(name: str) -> Callable[[object], bool]:
    """Return a function that checks whether a value has the format `name`. It may raise an error for a wrong value."""

    def has_format(value: object) -> bool:
        if not isinstance(value, str):
            return True
        flags = re.ASCII | re.DOTALL
        return PARSERS.get(name, str)(value) is not None and bool(re.fullmatch(PATTERNS.get(name, ".*"), value, flags))

    return has_format


for format_name in PARSERS | PATTERNS:
    FORMAT_CHECKER.checks(format_name, (ValueError, UnicodeError, re.error))(format_check(format_name))


def validator_of(schema: Any) -> Draft7Validator | Draft202012Validator:
    """Return a validator of a schema. It uses decimals, so 0.07 is a multiple of 0.01.

    A schema with a list of `items` is validated as draft 7.
    """
    kind = Draft7Validator if re.search(r'"items": \[|draft-07', json.dumps(schema)) else Draft202012Validator
    return kind(parse_exact_json(json.dumps(schema)), format_checker=FORMAT_CHECKER)
