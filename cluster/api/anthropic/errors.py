"""Errors in Anthropic's envelope. The HTTP status is unchanged: Anthropic's client retries 503 as it does 529."""

from collections.abc import Mapping
from typing import Any

from cluster.api.core.errors import ApiError

TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
}

_KINDS = sorted({*TYPES.values(), "invalid_request_error", "overloaded_error"})
ENVELOPE: Mapping[str, Any] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"enum": _KINDS}, "message": {"type": "string"}},
        },
    },
}
"""The JSON schema of the envelope."""


def anthropic_envelope(error: ApiError) -> dict[str, Any]:
    """Return the body of an error answer, or the data of the event `error`. The message names the wrong field."""
    kind = TYPES.get(error.status, "api_error" if error.status > 500 else "invalid_request_error")
    if error.code == "overloaded":
        kind = "overloaded_error"
    return {"type": "error", "error": {"type": kind, "message": error.message}}
