"""Translates the retriever's errors into the names of the REST API.

The retriever names fields and fixes as its gRPC clients know them.
"""

from __future__ import annotations

from collections.abc import Mapping

from ragcache_core.errors import InvalidInput, NotFound, RagCacheError, TooLarge

_REST_FIELDS = {"page_size": "limit", "page_token": "after"}

_FIXES = {
    "collection": "create it with PUT /v1/collections/NAME, or see GET /v1/collections",
    "document": "GET /v1/documents lists the ids there are",
}


def to_rest_error(
    error: RagCacheError, rest_fields: Mapping[str, str] = _REST_FIELDS
) -> RagCacheError:
    """Return the error with the field and the fix as a REST client knows them.

    Args:
        rest_fields: REST name of each field that gRPC calls otherwise.
    """
    match error:
        case TooLarge():
            return TooLarge(_rest_field(error.field, rest_fields), error.problem, error.fix)
        case InvalidInput():
            return InvalidInput(_rest_field(error.field, rest_fields), error.problem, error.fix)
        case NotFound():
            return NotFound(error.kind, error.name, _FIXES.get(error.kind, error.fix))
        case _:
            return error


def _rest_field(field: str, rest_fields: Mapping[str, str]) -> str:
    message, dot, inner = field.partition(".")
    if dot and message in ("collection", "document"):
        field = inner
    return rest_fields.get(field, field)
