"""JSON text as the model wrote it: finds where a growing value ends, and splits a value into its parts unchanged."""

import json
import re
from json import JSONDecodeError, JSONDecoder
from typing import Any, NoReturn

MARKS = re.compile(r'["\\{}\[\]]')
SPACE = re.compile(r"[ \t\n\r]*")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number in JSON")


DECODER = JSONDecoder(parse_constant=_refuse)


class ValueEnd:
    """Finds the end of an object or list in a growing text; each character is examined once."""

    def __init__(self, start: int) -> None:
        self._at = start
        self._depth = 0
        self._in_string = False

    def find(self, text: str) -> int | None:
        """Return the index after the value's last bracket, or None if it is missing. `text` may only grow between
        calls.
        """
        while (mark := MARKS.search(text, self._at)) is not None:
            character = mark[0]
            if character == "\\" and self._in_string and mark.end() == len(text):
                break  # the escaped character has not come yet
            self._at = mark.end() + (character == "\\" and self._in_string)
            if character == '"':
                self._in_string = not self._in_string
            elif not self._in_string and character != "\\":
                self._depth += 1 if character in "{[" else -1
                if self._depth <= 0:
                    return self._at
        else:
            self._at = max(self._at, len(text))
        return None


def members(text: str) -> dict[str, str] | None:
    """Return the text of each member of an object, or None if the text is no object. A repeated name has its last
    value.
    """
    found: dict[str, str] = {}
    try:
        at = _after(text, 0, "{")
        if text[at : at + 1] == "}":
            return found if not text[at + 1 :].strip() else None
        while True:
            name, at = _value(text, at)
            if not isinstance(name, str):
                return None
            start = _after(text, _space(text, at), ":")
            _, end = _value(text, start)
            found[name] = text[start:end]
            at = _space(text, end)
            if text[at : at + 1] == "}":
                return found if not text[at + 1 :].strip() else None
            at = _after(text, at, ",")
    except (ValueError, RecursionError):
        return None


def items(text: str) -> list[str] | None:
    """Return the texts of a list's items, or None if the text is not a list or the list is empty."""
    found = []
    try:
        at = _after(text, 0, "[")
        while True:
            _, end = _value(text, at)
            found.append(text[at:end])
            at = _space(text, end)
            if text[at : at + 1] == "]":
                return found if not text[at + 1 :].strip() else None
            at = _after(text, at, ",")
    except (ValueError, RecursionError):
        return None


def loaded(text: str) -> Any:
    """Return the value of a JSON text, or None if the text is invalid. The value of null is also None."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _space(text: str, at: int) -> int:
    found = SPACE.match(text, at)
    return at if found is None else found.end()


def _after(text: str, at: int, expected: str) -> int:
    if text[at : at + 1] != expected:
        raise JSONDecodeError(f"expected {expected}", "", at)
    return _space(text, at + 1)


def _value(text: str, at: int) -> tuple[Any, int]:
    return DECODER.raw_decode(text, at)
