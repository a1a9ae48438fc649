"""The disk tier, on a real RocksDB: what is written is whole, and what went wrong says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ragcache_cachestore.disk import FREE_RESERVE_BYTES, Disk
from ragcache_cachestore.pieces import PIECE_BYTES
from ragcache_core.errors import InvalidInput, Unavailable
from tests.cachestore_parts import entry, key, pieces_of, value

SMALL = value(100)
LARGE = value(3 * PIECE_BYTES + 7)


@contextmanager
def opened(folder: Path) -> Iterator[Disk]:
    disk = Disk(folder)
    try:
        yield disk
    finally:
        disk.close()


@pytest.mark.parametrize("raw", [b"x", SMALL, value(PIECE_BYTES), value(PIECE_BYTES + 1), LARGE])
def test_a_value_comes_back_as_it_was(tmp_path: Path, raw: bytes) -> None:
    with opened(tmp_path) as disk:
        disk.write(key(1), entry(raw), pieces_of(raw))
        assert disk.read(entry(raw)) == pieces_of(raw)
    with opened(tmp_path) as disk:
        assert disk.load() == [(key(1), entry(raw))]
        assert disk.read(entry(raw)) == pieces_of(raw)


def test_loading_gives_the_order_of_puts(tmp_path: Path) -> None:
    with opened(tmp_path) as disk:
        for slot, number in enumerate([5, 3, 9, 1], start=1):
            disk.write(key(number), entry(SMALL, slot), (SMALL,))
    with opened(tmp_path) as disk:
        assert [variant for variant, _ in disk.load()] == [key(n) for n in (5, 3, 9, 1)]


def test_a_replaced_value_is_gone(tmp_path: Path) -> None:
    with opened(tmp_path) as disk:
        disk.write(key(1), entry(LARGE, 1), pieces_of(LARGE))
        disk.write(key(1), entry(SMALL, 2), (SMALL,))
        assert disk.load() == [(key(1), entry(SMALL, 2))]
        assert disk.read(entry(LARGE, 1)) is None
        assert disk.read(entry(SMALL, 2)) == (SMALL,)


def test_discarding_an_old_entry_leaves_its_successor(tmp_path: Path) -> None:
    with opened(tmp_path) as disk:
        disk.write(key(1), entry(SMALL, 1), (SMALL,))
        disk.write(key(1), entry(LARGE, 2), pieces_of(LARGE))
        disk.discard(key(1), entry(SMALL, 1))
        assert disk.load() == [(key(1), entry(LARGE, 2))]
        disk.discard(key(1), entry(LARGE, 2))
        assert disk.load() == []
        assert disk.read(entry(LARGE, 2)) is None


def test_deleting_a_chunk_takes_all_its_variants_and_no_other(tmp_path: Path) -> None:
    with opened(tmp_path) as disk:
        for slot, variant in enumerate([key(1, 0), key(1, 9), key(2, 0), key(0, 2**128 - 1)]):
            disk.write(variant, entry(SMALL, slot), (SMALL,))
        assert disk.delete([key(1).chunk, key(7).chunk], []) == 2
        assert {variant for variant, _ in disk.load()} == {key(2, 0), key(0, 2**128 - 1)}


def test_deleting_the_last_chunk_there_can_be(tmp_path: Path) -> None:
    last = key(2**128 - 1, 2**128 - 1)
    with opened(tmp_path) as disk:
        disk.write(last, entry(SMALL), (SMALL,))
        assert disk.delete([last.chunk], []) == 1
        assert disk.load() == []


def test_deleting_variants_counts_each_once(tmp_path: Path) -> None:
    with opened(tmp_path) as disk:
        disk.write(key(1, 1), entry(SMALL, 1), (SMALL,))
        disk.write(key(1, 2), entry(SMALL, 2), (SMALL,))
        assert disk.delete([key(1).chunk], [key(1, 1), key(4, 4)]) == 2


class DyingDisk(Disk):
    """Stops for good, as a killed process does, after some batches."""

    batches_left = 2

    def _apply(self, changes: list[tuple[object, bytes, bytes | None]]) -> None:
        if self.batches_left == 0:
            raise KeyboardInterrupt
        self.batches_left -= 1
        super()._apply(changes)


def test_a_put_that_a_crash_cut_short_leaves_nothing(tmp_path: Path) -> None:
    disk = DyingDisk(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        disk.write(key(1), entry(LARGE, slot=1), pieces_of(LARGE))
    disk.close()
    with opened(tmp_path) as disk:
        assert disk.load() == []
        # the slot may be used again, and nothing of the old value shows
        disk.write(key(2), entry(LARGE, slot=1), pieces_of(LARGE)[:1])
        assert disk.read(entry(LARGE[:PIECE_BYTES], slot=1)) == pieces_of(LARGE)[:1]
        assert disk.read(entry(LARGE, slot=1)) is None


def test_a_full_disk_refuses_and_goes_on_serving(tmp_path: Path) -> None:
    free = [10 * FREE_RESERVE_BYTES]
    disk = Disk(tmp_path, free_bytes=lambda: free[0])
    disk.write(key(1), entry(SMALL, 1), (SMALL,))
    free[0] = FREE_RESERVE_BYTES
    with pytest.raises(Unavailable, match="disk is full"):
        disk.write(key(2), entry(SMALL, 2), (SMALL,))
    assert disk.read(entry(SMALL, 1)) == (SMALL,)
    free[0] = 10 * FREE_RESERVE_BYTES
    disk.write(key(2), entry(SMALL, 2), (SMALL,))
    assert len(disk.load()) == 2
    disk.close()


def test_garbage_is_collected_before_a_put_is_refused(tmp_path: Path) -> None:
    free = iter([0, 10 * FREE_RESERVE_BYTES])
    disk = Disk(tmp_path, free_bytes=lambda: next(free))
    disk.write(key(1), entry(SMALL, 1), (SMALL,))
    assert disk.read(entry(SMALL, 1)) == (SMALL,)
    disk.close()


def test_a_folder_of_another_version_is_refused(tmp_path: Path) -> None:
    Disk(tmp_path).close()
    (tmp_path / "FORMAT").write_text("ragcache-cachestore 99\n")
    with pytest.raises(InvalidInput, match="holds format 'ragcache-cachestore 99'"):
        Disk(tmp_path)


def test_a_folder_without_a_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rocksdb").mkdir()
    with pytest.raises(InvalidInput, match="holds format 'unknown'"):
        Disk(tmp_path)


def test_a_folder_in_use_is_refused_until_it_is_closed(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(InvalidInput, match="in use by another process"):
        Disk(tmp_path)
    Disk(tmp_path).close()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match="RAGCACHE_DATA_DIR"):
        Disk(tmp_path / "file" / "folder")


def test_a_damaged_database_is_refused_with_its_folder_named(tmp_path: Path) -> None:
    Disk(tmp_path).close()
    (tmp_path / "rocksdb" / "CURRENT").write_text("nonsense")
    with pytest.raises(InvalidInput, match="does not open"):
        Disk(tmp_path)
    # the lock was given back, so the error stays the same
    with pytest.raises(InvalidInput, match="does not open"):
        Disk(tmp_path)
