"""The OpenAPI document, with the models that FastAPI cannot find in the routes."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from ragcache_gateway.chat.schema import ChatCompletionChunk
from ragcache_gateway.documents.schema import DocumentIn
from ragcache_gateway.http.batch import BatchEvent, BatchSummary
from ragcache_gateway.http.errors import ErrorBody

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The message names the field and the fix."},
    404: {"model": ErrorBody, "description": "A named object does not exist."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    429: {"model": ErrorBody, "description": "Too many requests are in flight."},
    "default": {"model": ErrorBody, "description": "Any other error."},
}
UPSTREAM_ERRORS: dict[int | str, dict[str, Any]] = {
    503: {
        "model": ErrorBody,
        "description": "A part is unavailable; Retry-After says when to try again.",
    },
}


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the document, which is built once."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title, version=app.version, summary=app.summary, routes=app.routes
        )
        # FastAPI does not see the chunks of a stream, nor a body that a route reads itself.
        _, extra = models_json_schema(
            [
                (ChatCompletionChunk, "serialization"),
                (DocumentIn, "validation"),
                (BatchEvent, "serialization"),
                (BatchSummary, "serialization"),
            ],
            ref_template="#/components/schemas/{model}",
        )
        schemas = schema["components"]["schemas"]
        for name, model in extra["$defs"].items():
            schemas.setdefault(name, model)
        app.openapi_schema = schema
    return app.openapi_schema
