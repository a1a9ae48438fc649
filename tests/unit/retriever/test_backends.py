"""A data folder keeps its identity, and another one has another."""

from __future__ import annotations

from pathlib import Path

from ragcache_retriever.backends import index_identity


def test_a_folder_keeps_its_identity(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    identity = index_identity(one)
    assert identity.isalnum()
    assert index_identity(one) == identity
    assert index_identity(other) != identity
