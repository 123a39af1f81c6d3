"""In whose form an error is said: that of the API which the path belongs to."""

from collections.abc import Mapping

from starlette.types import Scope

from cluster.api.anthropic.errors import anthropic_envelope
from cluster.api.core.errors import ApiError, Envelope

OF_PATHS: Mapping[str, Envelope] = {"/v1/messages": anthropic_envelope}
"""By path, with all paths below it; all others are OpenAI's."""


def envelope_of(scope: Scope) -> Envelope:
    """The envelope for a request, whether or not a route is declared for its path."""
    path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
    for above, envelope in OF_PATHS.items():
        if path == above or path.startswith(f"{above}/"):
            return envelope
    return ApiError.envelope
