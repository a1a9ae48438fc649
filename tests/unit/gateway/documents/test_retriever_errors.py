"""The retriever's errors in the names of the REST API."""

from __future__ import annotations

from ragcache_core.errors import InvalidInput, NotFound, TooLarge, Unavailable
from ragcache_gateway.documents.retriever_errors import to_rest_error


def test_the_retrievers_errors_get_the_field_names_of_the_rest_api() -> None:
    error = to_rest_error(InvalidInput("collection.chunking.size_tokens", "is odd", "fix it"))
    assert str(error) == "chunking.size_tokens: is odd; fix it"
    assert to_rest_error(TooLarge("document.text", "x", "y")).field == "text"  # type: ignore[attr-defined]
    assert to_rest_error(InvalidInput("page_token", "x", "y")).field == "after"  # type: ignore[attr-defined]
    assert "PUT /v1/collections/" in str(
        to_rest_error(NotFound("collection", "x", "PutCollection"))
    )
    away = Unavailable("retriever", "x")
    assert to_rest_error(away) is away
