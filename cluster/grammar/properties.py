"""Unicode properties that `\\p{...}` may name: the general categories of characters, and some properties of ECMAScript.

Unicode grows with each version, and a client that checks an output may know a newer version than this Python does. So
each property has two sets: characters that have the property in every version (`in_every_version`), and characters that
have it in some version (`in_some_version`). `\\p` matches only `in_every_version`. `\\P`, and `\\p` in a negated class,
exclude all of `in_some_version`.
"""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple
from unicodedata import category

from cluster.grammar.nodes import Chars, chars, complement

# These ranges contain all assigned characters of Unicode 17, except those of the private-use planes.
PLANES = ((0, 0x3347F), (0xE0000, 0xE01EF))
UNASSIGNED = "Cn"
RECLASSIFIED = frozenset({0x295, 0x1171E})  # their category differs between Unicode 14 and 17, so it is uncertain
PRIVATE_USE = chars((0xF0000, 0xFFFFD), (0x100000, 0x10FFFD))
LONG_NAMES = {
    "Letter": "L", "Cased_Letter": "LC", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Titlecase_Letter": "Lt",
    "Modifier_Letter": "Lm", "Other_Letter": "Lo", "Mark": "M", "Nonspacing_Mark": "Mn", "Spacing_Mark": "Mc",
    "Enclosing_Mark": "Me", "Number": "N", "Decimal_Number": "Nd", "Letter_Number": "Nl", "Other_Number": "No",
    "Punctuation": "P", "Connector_Punctuation": "Pc", "Dash_Punctuation": "Pd", "Open_Punctuation": "Ps",
    "Close_Punctuation": "Pe", "Initial_Punctuation": "Pi", "Final_Punctuation": "Pf", "Other_Punctuation": "Po",
    "Symbol": "S", "Math_Symbol": "Sm", "Currency_Symbol": "Sc", "Modifier_Symbol": "Sk", "Other_Symbol": "So",
    "Separator": "Z", "Space_Separator": "Zs", "Line_Separator": "Zl", "Paragraph_Separator": "Zp", "Other": "C",
    "Control": "Cc", "Format": "Cf", "Private_Use": "Co",
}  # fmt: skip
CATEGORY_GROUPS = {"LC": ("Lu", "Ll", "Lt")}
CATEGORIES = frozenset(LONG_NAMES.values())


class Property(NamedTuple):
    """The characters that have a property in every version of Unicode, and those that may have it in some version."""

    in_every_version: Chars
    in_some_version: Chars


# Unicode's PropList and emoji-data, version 17.
REGIONAL_INDICATOR = chars((0x1F1E6, 0x1F1FF))
EMOJI_COMPONENT = chars(
    (0x23, 0x23), (0x2A, 0x2A), (0x30, 0x39), (0x200D, 0x200D), (0x20E3, 0x20E3), (0xFE0F, 0xFE0F), (0x1F1E6, 0x1F1FF),
    (0x1F3FB, 0x1F3FF), (0x1F9B0, 0x1F9B3), (0xE0020, 0xE007F),
)  # fmt: skip
WHITE_SPACE = chars(
    (0x09, 0x0D), (0x20, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000),
)  # fmt: skip
# PICTOGRAPHS: some of the characters that are pictographs in every version. MAYBE_PICTOGRAPHS: all characters that are
# pictographs in some version.
PICTOGRAPHS = chars(
    (0x231A, 0x231B), (0x23E9, 0x23F3), (0x23F8, 0x23FA), (0x25FB, 0x25FE), (0x2600, 0x2604), (0x2614, 0x2615),
    (0x2648, 0x2653), (0x265F, 0x2660), (0x2665, 0x2666), (0x2692, 0x2697), (0x26BD, 0x26BE), (0x26F0, 0x26F5),
    (0x2708, 0x270D), (0x2728, 0x2728), (0x2753, 0x2755), (0x2763, 0x2764), (0x2795, 0x2797), (0x2B50, 0x2B50),
    (0x1F300, 0x1F321), (0x1F324, 0x1F393), (0x1F3A0, 0x1F3F0), (0x1F400, 0x1F4FD), (0x1F4FF, 0x1F53D),
    (0x1F550, 0x1F567), (0x1F5FB, 0x1F64F), (0x1F680, 0x1F6C5), (0x1F910, 0x1F93A), (0x1F940, 0x1F945),
    (0x1F950, 0x1F9AF), (0x1F9B4, 0x1F9FF),
)  # fmt: skip
MAYBE_PICTOGRAPHS = chars((0xA9, 0xA9), (0xAE, 0xAE), (0x2000, 0x32FF), (0x1F000, 0x1FFFF))

VERSION_INDEPENDENT = {
    "ASCII": chars((0, 0x7F)),
    "Any": complement(Chars(())),
    "Emoji_Component": EMOJI_COMPONENT,
    "Regional_Indicator": REGIONAL_INDICATOR,
    "White_Space": WHITE_SPACE,
}
NAMED_PROPERTIES = {name: Property(members, members) for name, members in VERSION_INDEPENDENT.items()}
NAMED_PROPERTIES["Extended_Pictographic"] = Property(PICTOGRAPHS, MAYBE_PICTOGRAPHS)
# For each property: categories whose characters all have it, and categories of which some characters have it.
FROM_CATEGORIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "Alphabetic": (("L", "Nl"), ("M", "So")),
    "Lowercase": (("Ll",), ("Lm", "Lo", "Mn", "Nl", "So")),
    "Uppercase": (("Lu",), ("Nl", "So")),
}
OTHER_PROPERTY_NAMES = (*NAMED_PROPERTIES, *FROM_CATEGORIES)  # the properties that are not general categories


def property_of(name: str) -> Property | None:
    """Return the property that `\\p{name}` names, or None if it is not supported; scripts, for example, are not. A
    category may have its short or its long name, and `gc=` or `General_Category=` may come before the name.
    """
    category_name = name.removeprefix("gc=").removeprefix("General_Category=")
    if LONG_NAMES.get(category_name, category_name) in CATEGORIES:
        return _from_categories((LONG_NAMES.get(category_name, category_name),))
    return _from_categories(*FROM_CATEGORIES[name]) if name in FROM_CATEGORIES else NAMED_PROPERTIES.get(name)


@cache
def _from_categories(full_categories: tuple[str, ...], partial_categories: tuple[str, ...] = ()) -> Property:
    """Return a property that all characters of the `full_categories` have, and some characters of the
    `partial_categories`.

    A character that this Python's Unicode does not assign yet may get any category, so it is in `in_some_version`.
    """
    characters_of_category = _categories()

    def ranges_of(categories: tuple[str, ...]) -> Iterator[tuple[int, int]]:
        for name in categories:
            for short_name, members in characters_of_category.items():
                if short_name != UNASSIGNED and (
                    short_name in CATEGORY_GROUPS.get(name, ()) or short_name.startswith(name)
                ):
                    yield from members.ranges

    return Property(
        chars(*ranges_of(full_categories)),
        chars(*ranges_of(full_categories), *ranges_of(partial_categories), *characters_of_category[UNASSIGNED].ranges),
    )


@cache
def _categories() -> dict[str, Chars]:
    """Return the characters of each two-letter category, according to this Python's Unicode version."""
    ranges_of_category: dict[str, list[tuple[int, int]]] = {"Co": list(PRIVATE_USE.ranges)}
    for low, high in PLANES:
        for code in range(low, high + 1):
            if code not in RECLASSIFIED:
                ranges_of_category.setdefault(category(chr(code)), []).append((code, code))
    ranges_of_category.pop(UNASSIGNED, None)
    assigned = chars(*(pair for pairs in ranges_of_category.values() for pair in pairs))
    return {name: chars(*pairs) for name, pairs in ranges_of_category.items()} | {UNASSIGNED: complement(assigned)}
