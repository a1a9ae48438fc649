"""URLs of Milvus."""

from __future__ import annotations

import pytest

from ragcache_core.errors import InvalidInput
from ragcache_retriever.search.milvus import (
    NO_PINGS,
    RECONNECT,
    MilvusIndexes,
    client_arguments,
)


@pytest.mark.parametrize(
    ("url", "arguments"),
    [
        ("http://milvus", {"uri": "http://milvus:19530", "grpc_options": RECONNECT}),
        (
            "https://me:p%40ss@milvus:443/docs",
            {
                "uri": "https://milvus:443",
                "grpc_options": RECONNECT,
                "token": "me:p@ss",
                "db_name": "docs",
            },
        ),
        ("/data/vectors.db", {"uri": "/data/vectors.db", "grpc_options": RECONNECT | NO_PINGS}),
    ],
)
def test_urls_become_arguments(url: str, arguments: dict[str, object]) -> None:
    assert client_arguments(url) == arguments


@pytest.mark.parametrize(
    "url", ["", "milvus:19530", "postgresql://h/d", "http://:x", "http://u:s3cret@h:p"]
)
def test_other_urls_are_refused_without_their_password(url: str) -> None:
    with pytest.raises(InvalidInput, match="RAGCACHE_BACKEND_URL") as caught:
        MilvusIndexes(url, "identity")
    assert "s3cret" not in str(caught.value)
