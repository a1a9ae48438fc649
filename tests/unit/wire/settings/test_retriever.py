"""The retriever's settings come from the environment; an error names the variable."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragcache_core.errors import InvalidInput
from ragcache_wire.settings.retriever import BUNDLED_EMBEDDER, RetrieverSettings
from tests.kit.settings import read_settings

REQUIRED = {
    "RAGCACHE_LISTEN": "127.0.0.1:0",
    "RAGCACHE_DATA_DIR": "data",
    "RAGCACHE_MODEL": "model",
}


def read(**changes: str) -> RetrieverSettings:
    return read_settings(RetrieverSettings, REQUIRED | changes)


def test_defaults() -> None:
    settings = read()
    assert settings.listen == "127.0.0.1:0"
    assert settings.data_dir == Path("data")
    assert settings.model == "model"
    assert (settings.embedder, settings.embedder_threads) == (BUNDLED_EMBEDDER, None)
    assert settings.embeds_itself
    assert settings.reranker == "none"
    chunking = settings.chunk_tokens, settings.chunk_overlap_tokens, settings.window_chunks
    assert chunking == (256, 32, 1)
    assert settings.log_level == "info"
    assert settings.health_listen is None
    assert settings.otlp_endpoint is None


def test_an_endpoint() -> None:
    settings = read(
        RAGCACHE_EMBEDDER="http://host/v1/",
        RAGCACHE_EMBEDDER_MODEL="m",
        RAGCACHE_EMBEDDER_API_KEY="secret",
    )
    endpoint = settings.embedder, settings.embedder_model, settings.embedder_api_key
    assert endpoint == ("http://host/v1", "m", "secret")
    assert not settings.embeds_itself
    assert "secret" not in repr(settings)


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
        ("RAGCACHE_EMBEDDER", "bundled:minilm"),
        ("RAGCACHE_EMBEDDER", "path:models/e5"),
        ("RAGCACHE_EMBEDDER", "hf:a/b/c"),
        ("RAGCACHE_EMBEDDER", "hf:../b"),
        ("RAGCACHE_EMBEDDER_THREADS", "0"),
        ("RAGCACHE_EMBEDDER_THREADS", "many"),
        ("RAGCACHE_RERANKER", "bundled"),
        ("RAGCACHE_CHUNK_TOKENS", "-1"),
        ("RAGCACHE_LOG_LEVEL", "loud"),
    ],
)
def test_a_bad_value_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read(**{name: value})
    assert caught.value.field == name


@pytest.mark.parametrize("source", ["path:/models/e5", "hf:intfloat/e5-small-v2", "hf:e5"])
def test_a_model_of_a_folder_or_of_the_hub_needs_no_name(source: str) -> None:
    settings = read(RAGCACHE_EMBEDDER=source)
    assert settings.embedder == source
    assert settings.embeds_itself


def test_an_endpoint_needs_a_model() -> None:
    with pytest.raises(InvalidInput) as caught:
        read(RAGCACHE_EMBEDDER="https://host/v1")
    assert caught.value.field == "RAGCACHE_EMBEDDER_MODEL"


@pytest.mark.parametrize("source", ["cross-encoder", "https://host/v1"])
def test_a_reranker_needs_a_model(source: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read(RAGCACHE_RERANKER=source)
    assert caught.value.field == "RAGCACHE_RERANKER_MODEL"
    settings = read(RAGCACHE_RERANKER=source, RAGCACHE_RERANKER_MODEL="m")
    assert (settings.reranker, settings.reranker_model) == (source, "m")
