"""Chooses the JSON form (the envelope) of an error, by the API to which the request's path belongs."""

from collections.abc import Mapping

from starlette.types import Scope

from cluster.api.anthropic.errors import anthropic_envelope
from cluster.api.core.errors import ApiError, Envelope

OF_PATHS: Mapping[str, Envelope] = {"/v1/messages": anthropic_envelope}
"""Maps a path to the envelope for this path and all paths below it. All other paths use OpenAI's envelope."""


def envelope_of(scope: Scope) -> Envelope:
    """Return the envelope for errors of a request, also for a path without a route."""
    path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
    for above, envelope in OF_PATHS.items():
        if path == above or path.startswith(f"{above}/"):
            return envelope
    return ApiError.envelope
