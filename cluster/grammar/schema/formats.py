"""The formats of strings that are enforced, as regular expressions: a part of what each of them allows, never more."""

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
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,14}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,6}}"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,20}"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_PIECE = r"[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [rf"{_PIECE}(?::{_PIECE}){{7}}"]
    + [rf"(?:{_PIECE}(?::{_PIECE}){{0,{n - 1}}})?::(?:{_PIECE}(?::{_PIECE}){{0,{6 - n}}})?" for n in range(1, 7)]
)
_SAFE = r"[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2}"
_QUERY = rf"(?:{_SAFE}|[/?])*"
_AUTHORITY = rf"(?:{_HOST}|{_IPV4})(?::\d{{1,4}})?"
_URI = rf"[A-Za-z][A-Za-z0-9+.-]*:(?://{_AUTHORITY}(?:/(?:{_SAFE})*)*|(?:{_SAFE})+(?:/(?:{_SAFE})*)*)(?:\?{_QUERY})?(?:#{_QUERY})?"

FORMATS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "email": rf"{_ATOM}(?:\.{_ATOM}){{0,2}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": r"[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}",
    "uri": _URI,
}
