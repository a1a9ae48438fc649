"""The OpenAPI document, with the models that FastAPI cannot find in the routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from ragcache_gateway.chat.schema import ChatCompletionChunk
from ragcache_gateway.documents.schema import DocumentIn
from ragcache_gateway.explain.progress import StageEvent
from ragcache_gateway.http.batch import BatchEvent, BatchSummary
from ragcache_gateway.http.errors import ErrorBody

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The message names the field and the fix."},
    401: {"model": ErrorBody, "description": "The API key is missing or not known."},
    403: {"model": ErrorBody, "description": "The API key does not allow this."},
    404: {"model": ErrorBody, "description": "A named object does not exist."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    429: {
        "model": ErrorBody,
        "description": "A quota is used up, too many requests are in flight, or the answer is "
        "predicted to be too late. Retry-After says when to try again.",
    },
    "default": {"model": ErrorBody, "description": "Any other error."},
}
UPSTREAM_ERRORS: dict[int | str, dict[str, Any]] = {
    503: {
        "model": ErrorBody,
        "description": "A part is unavailable; Retry-After says when to try again.",
    },
}
ANSWER_ERRORS: dict[int | str, dict[str, Any]] = {
    **UPSTREAM_ERRORS,
    504: {"model": ErrorBody, "description": "The deadline of the request has passed."},
}


def event_schema(model: str, named: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the description of a stream whose events have JSON of a model as their data.

    OpenAPI 3.1 has no standard way to say this of a stream's events.

    Args:
        named: Models of the events that have a name, by that name.
    """
    described: dict[str, Any] = {"x-event-data": _reference(model)}
    if named:
        described["x-named-event-data"] = {name: _reference(one) for name, one in named.items()}
    return described


def _reference(model: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model}"}


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
                (StageEvent, "serialization"),
                (BatchEvent, "serialization"),
                (BatchSummary, "serialization"),
            ],
            ref_template="#/components/schemas/{model}",
        )
        schemas = schema["components"]["schemas"]
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        # A gateway without keys needs none.
        schema["security"] = [{"key": []}, {}]
        for name, model in extra["$defs"].items():
            schemas.setdefault(name, model)
        app.openapi_schema = schema
    return app.openapi_schema
