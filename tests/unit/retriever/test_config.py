"""The environment is read once; a bad value names its variable."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragcache_core.errors import InvalidInput
from ragcache_retriever.config import BUNDLED_EMBEDDER, Config, EmbedderConfig
from ragcache_retriever.documents.collection import (
    Chunking,
    Defaults,
    checked_chunking,
    checked_name,
    checked_window,
)

REQUIRED = {
    "RAGCACHE_LISTEN": "127.0.0.1:0",
    "RAGCACHE_DATA_DIR": "data",
    "RAGCACHE_MODEL": "model",
}


def test_defaults() -> None:
    assert Config.from_environment(REQUIRED) == Config(
        listen="127.0.0.1:0",
        data_dir=Path("data"),
        model="model",
        embedder=EmbedderConfig(BUNDLED_EMBEDDER, threads=1),
        defaults=Defaults(Chunking(256, 32), window=1),
        log_level="info",
    )


def test_an_endpoint() -> None:
    config = Config.from_environment(
        REQUIRED
        | {
            "RAGCACHE_EMBEDDER": "http://host/v1/",
            "RAGCACHE_EMBEDDER_MODEL": "m",
            "RAGCACHE_EMBEDDER_API_KEY": "secret",
        }
    )
    assert config.embedder == EmbedderConfig("http://host/v1", "m", "secret")
    assert config.embedder.is_endpoint
    assert "secret" not in repr(config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RAGCACHE_LISTEN", ""),
        ("RAGCACHE_LISTEN", "8080"),
        ("RAGCACHE_LISTEN", "host:port"),
        ("RAGCACHE_LISTEN", "host:99999"),
        ("RAGCACHE_HEALTH_LISTEN", "8081"),
        ("RAGCACHE_DATA_DIR", ""),
        ("RAGCACHE_MODEL", " "),
        ("RAGCACHE_EMBEDDER", "minilm"),
        ("RAGCACHE_EMBEDDER_THREADS", "0"),
        ("RAGCACHE_EMBEDDER_THREADS", "many"),
        ("RAGCACHE_CHUNK_TOKENS", "15"),
        ("RAGCACHE_CHUNK_TOKENS", "4097"),
        ("RAGCACHE_CHUNK_TOKENS", "-1"),
        ("RAGCACHE_CHUNK_OVERLAP_TOKENS", "128"),
        ("RAGCACHE_WINDOW_CHUNKS", "9"),
        ("RAGCACHE_LOG_LEVEL", "loud"),
    ],
)
def test_a_bad_value_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Config.from_environment(REQUIRED | {name: value})
    assert caught.value.field == name


def test_an_endpoint_needs_a_model() -> None:
    with pytest.raises(InvalidInput) as caught:
        Config.from_environment(REQUIRED | {"RAGCACHE_EMBEDDER": "https://host/v1"})
    assert caught.value.field == "RAGCACHE_EMBEDDER_MODEL"


@pytest.mark.parametrize("name", ["a", "0", "team-docs", "a" * 63])
def test_names_of_collections(name: str) -> None:
    assert checked_name("name", name) == name


@pytest.mark.parametrize("name", ["", "A", "-a", "a_b", "a/b", "a" * 64, "a\n", "ä"])
def test_names_no_collection_has(name: str) -> None:
    with pytest.raises(InvalidInput):
        checked_name("name", name)


@pytest.mark.parametrize(("size", "overlap"), [(16, 0), (16, 7), (17, 8), (4096, 2047)])
def test_chunkings(size: int, overlap: int) -> None:
    assert checked_chunking("s", "o", size, overlap) == Chunking(size, overlap)


@pytest.mark.parametrize(
    ("size", "overlap", "field"), [(15, 0, "s"), (4097, 0, "s"), (16, 8, "o"), (256, 128, "o")]
)
def test_chunkings_out_of_range(size: int, overlap: int, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        checked_chunking("s", "o", size, overlap)
    assert caught.value.field == field


def test_windows() -> None:
    assert checked_window("w", 8) == 8
    with pytest.raises(InvalidInput):
        checked_window("w", 9)
