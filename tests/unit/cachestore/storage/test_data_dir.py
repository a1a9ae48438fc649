"""The data folder: one process, one layout, and error messages with a fix."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ragcache_cachestore.storage.data_dir import FORMAT, DataDir
from ragcache_core.errors import InvalidInput


def test_a_new_folder_is_created_with_its_layout(tmp_path: Path) -> None:
    folder = DataDir(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / "FORMAT").read_text() == FORMAT == "ragcache-cachestore 6\n"
    folder.close()
    DataDir(tmp_path / "a" / "b").close()


def test_a_volume_with_only_lost_and_found_counts_as_empty(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    DataDir(tmp_path).close()


@pytest.mark.parametrize("layout", ["ragcache-cachestore 2", "ragcache-cachestore 99"])
def test_an_unknown_layout_is_refused_and_left_unchanged(tmp_path: Path, layout: str) -> None:
    (tmp_path / "FORMAT").write_text(f"{layout}\n")
    (tmp_path / "rocksdb").mkdir()
    for _ in range(2):  # the lock is released, so the second error is the same
        with pytest.raises(InvalidInput, match="RAGCACHE_DATA_DIR") as caught:
            DataDir(tmp_path)
        assert f"has the layout {layout!r}" in caught.value.problem
        assert "empty the folder" in caught.value.fix
    assert (tmp_path / "rocksdb").is_dir()


@pytest.mark.parametrize("name", ["records", "values"])
def test_a_folder_without_a_version_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(InvalidInput, match="has the layout 'unknown'"):
        DataDir(tmp_path)


def test_a_version_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "FORMAT").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match="has the layout"):
        DataDir(tmp_path)


def test_a_folder_in_use_is_refused_until_it_is_closed(tmp_path: Path) -> None:
    folder = DataDir(tmp_path)
    with pytest.raises(InvalidInput, match="in use by another process"):
        DataDir(tmp_path)
    folder.close()
    DataDir(tmp_path).close()


def test_a_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match="cannot be written"):
        DataDir(tmp_path / "file" / "folder")


def test_a_full_volume_is_refused_and_the_lock_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        with pytest.raises(InvalidInput, match="No space left"):
            DataDir(tmp_path)
    DataDir(tmp_path).close()
