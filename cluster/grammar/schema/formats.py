"""The string formats that are enforced, as regular expressions. An expression matches only valid texts of its format,
but not always all of them.
"""

_YEAR = r"[1-9]\d{3}"
_LEAP = r"(?:[1-9]\d(?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    rf"|02-(?:0[1-9]|1\d|2[0-8]))|{_LEAP}-02-29)"
)
_HOUR_MINUTE = r"(?:[01]\d|2[0-3]):[0-5]\d"
_TIME = rf"{_HOUR_MINUTE}:[0-5]\d(?:\.\d{{1,6}})?(?:Z|[+-]{_HOUR_MINUTE})"
_CLOCK = r"T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)"
_DURATION = rf"P(?:(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)(?:{_CLOCK})?|{_CLOCK}|\d+W)"
# At most 32 letters and digits, with at most one . or - between two of them. That is at most 63 characters, so no label
# is too long. One count for the whole name keeps the automaton small; counting each label would need many more states.
_HOST = r"[A-Za-z0-9](?:[.-]?[A-Za-z0-9]){0,31}"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_PIECE = r"[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [rf"{_PIECE}(?::{_PIECE}){{7}}"]
    + [rf"(?:{_PIECE}(?::{_PIECE}){{0,{n - 1}}})?::(?:{_PIECE}(?::{_PIECE}){{0,{6 - n}}})?" for n in range(1, 7)]
)
_SAFE = r"[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2}"
_PATH = rf"(?:{_SAFE}|/)*"
_QUERY = rf"(?:{_SAFE}|[/?])*"
_AUTHORITY = rf"{_HOST}(?::\d{{1,4}})?"
_AFTER_PATH = rf"(?:\?{_QUERY})?(?:#{_QUERY})?"
_URI = rf"[A-Za-z][A-Za-z0-9+.-]*:(?://{_AUTHORITY}(?:/{_PATH})?|(?:{_SAFE}){_PATH}){_AFTER_PATH}"
_URI_REFERENCE = rf"(?:{_URI}|(?:/(?:(?:{_SAFE}){_PATH})?)?{_AFTER_PATH})"
_TEMPLATE = rf"(?:{_SAFE}|[/?#]|\{{[A-Za-z0-9_]+\}})*"
_POINTER = r"(?:/(?:[^~]|~[01])*)?"
_HEX3, _HEX4 = r"[0-9A-Fa-f]{3}", r"[0-9A-Fa-f]{4}"
_UUID = rf"[0-9A-Fa-f]{{8}}-(?:{_HEX4}-){{3}}[0-9A-Fa-f]{{12}}"
_EMAIL = rf"{_ATOM}(?:\.?{_ATOM}){{0,23}}@{_HOST}"
_NET4 = rf"(?:(?:{_BYTE}\.){{3}}0/24|(?:{_BYTE}\.){{2}}0\.0/16|{_BYTE}\.0\.0\.0/8|{_IPV4}/32)"
_NET6 = rf"(?:{_IPV6})/128"
_INTERFACE4 = rf"{_IPV4}/(?:3[0-2]|[12]?\d)"
_INTERFACE6 = rf"(?:{_IPV6})/(?:12[0-8]|1[01]\d|[1-9]?\d)"
_BASE64 = r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?"
_BASE64URL = r"(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-][AQgw]|[A-Za-z0-9_-]{2}[AEIMQUYcgkosw048])?"
_ONE_CHARACTER = r"(?:[A-Za-z0-9 _,:;=@!]|\\[dDwWsS.*+?()^$|\\\[\]{}]|\.|\[\^?(?:[A-Za-z0-9_ ]|a-z|A-Z|0-9|\\[dws])+\])"
_SOME_CHARACTERS = rf"(?:{_ONE_CHARACTER}(?:[*+?]|\{{\d{{1,2}}\}})?)"
_EXPRESSION = rf"\^?(?:{_SOME_CHARACTERS}|\((?:\?:)?{_SOME_CHARACTERS}+(?:\|{_SOME_CHARACTERS}+)*\)[*+?]?)*\$?"

# The formats of JSON Schema first, then formats that schema generators write for types of their languages.
FORMATS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "hostname": _HOST,
    "idn-hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": _UUID,
    "uri": _URI,
    "uri-reference": _URI_REFERENCE,
    "iri": _URI,
    "iri-reference": _URI_REFERENCE,
    "uri-template": _TEMPLATE,
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9]\d{{0,3}})(?:#|{_POINTER})",
    "regex": _EXPRESSION,
    "base64": _BASE64,
    "base64url": _BASE64URL,
    "byte": _BASE64,
    "path": r"[^\0]+",
    "integer": r"-?(?:0|[1-9]\d{0,17})",
    "int32": r"-?(?:0|[1-9]\d{0,8})",
    "int64": r"-?(?:0|[1-9]\d{0,17})",
    "uint32": r"(?:0|[1-9]\d{0,8})",
    "uint64": r"(?:0|[1-9]\d{0,17})",
    "boolean": "true|false",
    "emoji": r"\p{Extended_Pictographic}+",
    "multi-host-uri": rf"[a-z]{{1,20}}://{_AUTHORITY}(?:/{_PATH})?",
    "name-email": rf"[A-Za-z]{{1,20}}(?: [A-Za-z]{{1,20}}){{0,3}} <{_EMAIL}>",
    "ipv4network": _NET4,
    "ipv6network": _NET6,
    "ipvanynetwork": f"(?:{_NET4}|{_NET6})",
    "ipv4interface": _INTERFACE4,
    "ipv6interface": _INTERFACE6,
    "ipvanyinterface": f"(?:{_INTERFACE4}|{_INTERFACE6})",
    "ipvanyaddress": f"(?:{_IPV4}|{_IPV6})",
    **{
        f"uuid{version}": rf"{_HEX4}{_HEX4}-{_HEX4}-{version}{_HEX3}-[89ABab]{_HEX3}-(?:{_HEX4}){{3}}"
        for version in range(1, 9)
    },
}
# Narrower expressions for some formats, used if the expression above does not fit the schema's lengths and patterns.
NARROWER: dict[str, str] = {
    "email": r"[A-Za-z0-9_+-](?:\.?[A-Za-z0-9_+-]){0,23}@[A-Za-z0-9](?:-?[A-Za-z0-9]){0,23}(?:\.[A-Za-z]{2,8}){1,2}",
    "uri": rf"[A-Za-z]{{1,8}}://{_AUTHORITY}(?:[/?#][A-Za-z0-9._~!$&'()*+,;=:@/?-]{{0,64}})?",
}
UNRESTRICTED = frozenset({"password", "binary"})  # OpenAPI's display hints; they allow any characters
ENCODINGS = {"base64": _BASE64, "base64url": _BASE64URL, "base16": r"(?:[0-9A-F]{2})*"}
# Inclusive bounds of integers, by a number's format.
INTEGERS: dict[str, tuple[int, int]] = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
}
STORAGE_TYPES = frozenset({"float", "double", "decimal"})  # storage types; they do not restrict the value
