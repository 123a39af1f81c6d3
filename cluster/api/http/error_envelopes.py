"""Chooses the JSON form of an error: that of the API to which the path of the request belongs."""

from collections.abc import Mapping

from starlette.types import Scope

from cluster.api.anthropic.errors import anthropic_envelope
from cluster.api.core.errors import ApiError, Envelope

OF_PATHS: Mapping[str, Envelope] = {"/v1/messages": anthropic_envelope}
"""The envelope of a path and of all paths below it. All other paths use OpenAI's envelope."""


def envelope_of(scope: Scope) -> Envelope:
    """Return the envelope for errors of a request, also for a path without a route."""
    path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
    for above, envelope in OF_PATHS.items():
        if path == above or path.startswith(f"{above}/"):
            return envelope
    return ApiError.envelope
