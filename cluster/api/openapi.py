"""What /openapi.json says about bodies: the handlers read those themselves, so FastAPI cannot know."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from cluster.api.content import Strict
from cluster.api.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

BODIES: tuple[type[Strict], ...] = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
PLACE = "#/components/schemas/{model}"


def body_of(fields: type[Strict]) -> dict[str, Any]:
    """The `openapi_extra` of a route whose body is `fields`."""
    content = {"application/json": {"schema": {"$ref": PLACE.format(model=fields.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


def describe(app: FastAPI) -> None:
    """Make the app's description name every field of every body."""
    _, found = models_json_schema([(fields, "validation") for fields in BODIES], ref_template=PLACE)

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            app.openapi_schema.setdefault("components", {})["schemas"] = found["$defs"]
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
