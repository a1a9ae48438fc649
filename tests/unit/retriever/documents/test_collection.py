"""Names and settings of collections have limits."""

from __future__ import annotations

from typing import Any

import pytest

from ragcache_core.errors import InvalidInput
from ragcache_retriever.__main__ import collection_defaults
from ragcache_retriever.documents.collection import (
    Chunking,
    CollectionDefaults,
    checked_chunking,
    checked_name,
    checked_window,
)
from ragcache_wire.settings import RetrieverSettings

REQUIRED: dict[str, Any] = {"listen": "127.0.0.1:0", "data_dir": "data", "model": "model"}


def test_values_in_range_are_returned() -> None:
    for name in ("a", "0", "team-docs", "a" * 63):
        assert checked_name("name", name) == name
    for size, overlap in ((16, 0), (16, 7), (17, 8), (4096, 2047)):
        assert checked_chunking("s", "o", size, overlap) == Chunking(size, overlap)
    assert checked_window("w", 8) == 8


@pytest.mark.parametrize("name", ["", "A", "-a", "a_b", "a/b", "a" * 64, "a\n", "ä"])
def test_names_no_collection_has(name: str) -> None:
    with pytest.raises(InvalidInput):
        checked_name("name", name)


@pytest.mark.parametrize(
    ("size", "overlap", "field"), [(15, 0, "s"), (4097, 0, "s"), (16, 8, "o"), (256, 128, "o")]
)
def test_chunkings_out_of_range(size: int, overlap: int, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        checked_chunking("s", "o", size, overlap)
    assert caught.value.field == field


def test_the_settings_give_the_defaults() -> None:
    assert collection_defaults(RetrieverSettings(**REQUIRED)) == CollectionDefaults(
        Chunking(256, 32), window=1
    )


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("chunk_tokens", 15),
        ("chunk_tokens", 4097),
        ("chunk_overlap_tokens", 128),
        ("window_chunks", 9),
    ],
)
def test_a_default_out_of_range_names_its_variable(setting: str, value: int) -> None:
    settings = RetrieverSettings(**REQUIRED | {setting: value})
    with pytest.raises(InvalidInput) as refused:
        collection_defaults(settings)
    assert refused.value.field == f"RAGCACHE_{setting.upper()}"
