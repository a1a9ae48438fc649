"""The retriever's errors in the words of this API.

It names fields and fixes as its own callers, gRPC clients, know them.
"""

from __future__ import annotations

from collections.abc import Mapping

from ragcache_core.errors import InvalidInput, NotFound, RagCacheError, TooLarge

_FIELDS = {"page_size": "limit", "page_token": "after"}

_FIXES = {
    "collection": "create it with PUT /v1/collections/NAME, or see GET /v1/collections",
    "document": "GET /v1/documents lists the ids there are",
}


def in_rest_terms(error: RagCacheError, names: Mapping[str, str] = _FIELDS) -> RagCacheError:
    """The error with its field, or the way out of it, called what the client calls it.

    names: what a field is called here, if not what it is called there.
    """
    match error:
        case TooLarge():
            return TooLarge(_field(error.field, names), error.problem, error.fix)
        case InvalidInput():
            return InvalidInput(_field(error.field, names), error.problem, error.fix)
        case NotFound():
            return NotFound(error.kind, error.name, _FIXES.get(error.kind, error.fix))
        case _:
            return error


def _field(field: str, names: Mapping[str, str]) -> str:
    message, dot, inner = field.partition(".")
    if dot and message in ("collection", "document"):
        field = inner
    return names.get(field, field)
