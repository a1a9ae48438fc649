"""A store on a damaged RocksDB: it starts empty, once, and says so."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ragcache_cachestore.storage.data_dir import DataDir, open_metadata
from ragcache_cachestore.storage.metadata_db import DamagedMetadata, MetadataDb
from ragcache_core.errors import InvalidInput
from ragcache_core.identity.variant import Miss
from ragcache_core.store_api import Ack, AsOf, Deletion, PutOutcome
from tests.kit.store import get, key, opened, put, value

PAGE = 64 << 10


def only(folder: Path, pattern: str) -> Path:
    """Return the largest file of a pattern."""
    return max(folder.glob(pattern), key=lambda path: path.stat().st_size)


def overwrite(path: Path, offset: int, num_bytes: int) -> None:
    """Set bytes of a file to zero."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes(num_bytes))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "CURRENT with other words": lambda folder: (folder / "CURRENT").write_bytes(b"nonsense"),
    "CURRENT empty": lambda folder: (folder / "CURRENT").write_bytes(b""),
    "CURRENT missing": lambda folder: (folder / "CURRENT").unlink(),
    "MANIFEST overwritten": lambda folder: overwrite(only(folder, "MANIFEST*"), 10, 30),
    "MANIFEST cut": lambda folder: os.truncate(only(folder, "MANIFEST*"), 20),
    "MANIFEST missing": lambda folder: only(folder, "MANIFEST*").unlink(),
    "table overwritten in a block": lambda folder: overwrite(only(folder, "*.sst"), 100, 40),
    "table cut": lambda folder: os.truncate(only(folder, "*.sst"), 100),
    "table missing": lambda folder: only(folder, "*.sst").unlink(),
}


def fill(folder: Path) -> AsOf:
    """Store values durably, and their metadata in a table. Return the deletes seen before one."""
    with opened(folder) as store:
        for number in range(20):
            put(store, key(number), value(PAGE, number), ack=Ack.DURABLE)
        before = store.reads.lookup([]).as_of
        store.deletes.apply([Deletion(b"", (key(3).chunk,))])
        store.metadata._db.flush()
    return before


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_store_on_a_damaged_database_starts_empty(
    tmp_path: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    before = fill(tmp_path)
    damage(tmp_path / "records")
    began_ms = time.time_ns() // 1_000_000
    with opened(tmp_path) as store:
        assert len(store) == 0
        stats = store.stats()
        assert began_ms <= stats.reset_at_ms
        assert "is damaged" in stats.reset_reason
        assert stats.reset_reason in caplog.text
        assert store.store_id != before.store
        # What was planned before may be deleted, and nothing here remembers it.
        assert put(store, key(3), b"old plan", as_of=before) is PutOutcome.DELETED
        assert put(store, key(3), b"unknown", as_of=AsOf()) is PutOutcome.DELETED
        for number in range(5, 9):
            assert put(store, key(number), value(PAGE), ack=Ack.DURABLE) is PutOutcome.STORED
    with opened(tmp_path) as store:  # the next start is an ordinary one
        assert get(store, key(5)) == value(PAGE)
        assert get(store, key(1)) in {Miss.NEVER_STORED, Miss.EVICTED}
        assert store.stats().reset_at_ms == stats.reset_at_ms
    assert caplog.text.count("so the folder starts empty") == 1


def test_only_the_last_damaged_database_is_kept(tmp_path: Path) -> None:
    for round_ in range(3):
        fill(tmp_path)
        (tmp_path / "records" / "CURRENT").write_text(f"damage {round_}")
        opened(tmp_path).__enter__().close()
        # Without metadata, the old values are of no use, and take no space.
        assert (tmp_path / "values").stat().st_blocks == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("FORMAT", "LOCK", "records", "records.damaged", "values"),
    ]
    assert (tmp_path / "records.damaged" / "CURRENT").read_text() == "damage 2"


def test_a_damaged_delete_resets_the_folder(tmp_path: Path) -> None:
    fill(tmp_path)
    data = DataDir(tmp_path)
    database = MetadataDb(data.metadata)
    database._db.put(b"t" + (2).to_bytes(8), b"\1nonsense")
    with pytest.raises(DamagedMetadata):
        database.verify()
    database.close()
    reset = open_metadata(data, now_ms=7)
    assert reset.reset is not None
    assert reset.reset.at_ms == 7
    reset.close()
    data.close()


def test_other_errors_set_nothing_aside(tmp_path: Path) -> None:
    fill(tmp_path)
    data = DataDir(tmp_path)
    holder = MetadataDb(data.metadata)  # holds RocksDB's lock
    with pytest.raises(InvalidInput, match="cannot be opened") as caught:
        open_metadata(data, now_ms=7)
    assert not isinstance(caught.value, DamagedMetadata)
    assert not data.damaged_metadata.exists()
    holder.close()
    data.close()
    with opened(tmp_path) as store:
        assert len(store) == 19
        assert store.stats().reset_at_ms == 0
