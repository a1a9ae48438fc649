"""The data folder: one process, one layout, and errors that say what to do."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest

from ragcache_cachestore.storage.data_dir import FORMAT, DataDir
from ragcache_core.errors import InvalidInput


def test_a_new_folder_is_made_and_says_its_layout(tmp_path: Path) -> None:
    folder = DataDir(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / "FORMAT").read_text() == FORMAT == "ragcache-cachestore 2\n"
    folder.close()
    DataDir(tmp_path / "a" / "b").close()


def test_an_empty_volume_with_what_its_file_system_made_is_fine(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    DataDir(tmp_path).close()


def test_a_layout_that_is_not_known_is_refused_with_the_fix_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "FORMAT").write_text("ragcache-cachestore 99\n")
    (tmp_path / "rocksdb").mkdir()
    for _ in range(2):  # the lock was given back, so the error stays the same
        with pytest.raises(InvalidInput, match="RAGCACHE_DATA_DIR") as caught:
            DataDir(tmp_path)
        assert "holds format 'ragcache-cachestore 99'" in caught.value.problem
        assert "empty the folder" in caught.value.fix
    assert (tmp_path / "rocksdb").is_dir()


def earlier_release(folder: Path) -> None:
    """A folder as the first release left it, with something else beside it."""
    (folder / "FORMAT").write_text("ragcache-cachestore 1\n")
    (folder / "rocksdb").mkdir()
    (folder / "rocksdb" / "000007.sst").write_bytes(b"values")
    (folder / "lost+found").mkdir()


def test_what_an_earlier_release_left_is_dropped_and_said_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    earlier_release(tmp_path)
    with caplog.at_level(logging.WARNING):
        DataDir(tmp_path).close()
    assert "'ragcache-cachestore 1' of an earlier release: dropped" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["FORMAT", "LOCK", "lost+found"]
    assert (tmp_path / "FORMAT").read_text() == FORMAT
    caplog.clear()
    DataDir(tmp_path).close()
    assert not caplog.text


def test_a_kill_while_it_is_dropped_is_made_good_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def kill(folder: Path) -> None:
        (folder / "000007.sst").unlink()
        raise Killed

    earlier_release(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", kill)
        with pytest.raises(Killed):
            DataDir(tmp_path)
    assert (tmp_path / "FORMAT").read_text() == "ragcache-cachestore 1\n"
    # A process's end gives its lock back; here the descriptor is still open.
    (tmp_path / "LOCK").unlink()
    DataDir(tmp_path).close()
    assert not (tmp_path / "rocksdb").exists()
    assert (tmp_path / "FORMAT").read_text() == FORMAT


@pytest.mark.parametrize("name", ["rocksdb", "records", "values"])
def test_a_folder_without_a_version_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(InvalidInput, match="holds format 'unknown'"):
        DataDir(tmp_path)


def test_a_version_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "FORMAT").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match="holds format"):
        DataDir(tmp_path)


def test_a_folder_in_use_is_refused_until_it_is_closed(tmp_path: Path) -> None:
    folder = DataDir(tmp_path)
    with pytest.raises(InvalidInput, match="in use by another process"):
        DataDir(tmp_path)
    folder.close()
    DataDir(tmp_path).close()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match="cannot be written"):
        DataDir(tmp_path / "file" / "folder")


def test_a_full_volume_is_refused_and_the_lock_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        with pytest.raises(InvalidInput, match="No space left"):
            DataDir(tmp_path)
    DataDir(tmp_path).close()
