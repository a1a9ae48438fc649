"""A reserve lets documents be deleted on a full disk."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragcache_core.errors import Unavailable
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.sqlite.document_store import open_sqlite
from ragcache_retriever.store.sqlite.files.reserve import FILE_NAME, DiskReserve
from tests.kit.stored_documents import add_collection, delete, put

DISK_BYTES = 40 << 20
RESERVE_BYTES = 8 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder on a small disk of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = f"size={DISK_BYTES}"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"this user cannot mount a tmpfs: {mounted.stderr.decode()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(store: DocumentStore) -> int:
    """Put documents until the disk is full, and return their number."""
    for i in range(10_000):
        try:
            put(store, f"d{i:04}", [f"{i} {j} " + "x" * 4000 for j in range(20)])
        except Unavailable:
            return i
    raise AssertionError("the disk is never full")


def test_a_full_disk_refuses_documents_and_takes_deletes(disk: Path) -> None:
    store = open_sqlite(disk, DiskReserve(disk, RESERVE_BYTES))
    add_collection(store, "c")
    assert (disk / FILE_NAME).stat().st_blocks * 512 == RESERVE_BYTES
    num_documents = fill(store)
    # What else is free goes as well, so that only the reserve is left.
    with (disk / "other").open("wb") as other:
        free_bytes = os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize
        other.write(bytes(max(0, free_bytes - 4096)))
    for i in range(num_documents):
        assert delete(store, f"d{i:04}") is not None
    assert store.reads.page("c", "", 10) == ([], None)
    (disk / "other").unlink()
    delete(store, "missing")
    put(store, "again", ["text"])
    store.database.close()


def test_without_a_reserve_a_full_disk_refuses_deletes(disk: Path) -> None:
    store = open_sqlite(disk, DiskReserve(disk, 0))
    add_collection(store, "c")
    fill(store)
    with (disk / "other").open("wb") as other:
        free_bytes = os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize
        other.write(bytes(free_bytes))
    with pytest.raises(Unavailable, match=r"full|I/O"):
        delete(store, "d0000")
    store.database.close()


def test_the_reserve_comes_back_when_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = DiskReserve(tmp_path, RESERVE_BYTES)
    free_bytes = 10 * RESERVE_BYTES
    monkeypatch.setattr(DiskReserve, "free_bytes", lambda self: free_bytes)
    reserve.restore()
    assert (tmp_path / FILE_NAME).exists()
    reserve.release_if_needed()
    assert (tmp_path / FILE_NAME).exists()
    free_bytes = RESERVE_BYTES - 1
    reserve.release_if_needed()
    reserve.restore()
    assert not (tmp_path / FILE_NAME).exists()
    free_bytes = 2 * RESERVE_BYTES
    reserve.restore()
    assert (tmp_path / FILE_NAME).exists()
