"""The OpenAPI document: what FastAPI cannot see of the routes is added here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from ragcache_gateway.chat.schema import ChatCompletionChunk
from ragcache_gateway.documents.schema import DocumentIn
from ragcache_gateway.http.errors import ErrorBody

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The message names the field and the fix."},
    404: {"model": ErrorBody, "description": "Something named does not exist."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    429: {"model": ErrorBody, "description": "Too many requests are in flight."},
    "default": {"model": ErrorBody, "description": "Any other error."},
}
UPSTREAM_ERRORS: dict[int | str, dict[str, Any]] = {
    503: {"model": ErrorBody, "description": "A part is away; Retry-After says when to try again."},
}


def describe(app: FastAPI) -> dict[str, Any]:
    """The document, built once."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title, version=app.version, summary=app.summary, routes=app.routes
        )
        # Models that no route takes or gives as FastAPI knows it: a stream's, a body read by hand.
        _, extra = models_json_schema(
            [(ChatCompletionChunk, "serialization"), (DocumentIn, "validation")],
            ref_template="#/components/schemas/{model}",
        )
        schemas = schema["components"]["schemas"]
        for name, model in extra["$defs"].items():
            schemas.setdefault(name, model)
        app.openapi_schema = schema
    return app.openapi_schema
