"""MetadataDb on a real RocksDB: what returned survives, and what is damaged says so or is dropped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_cachestore.storage.disk_variant import DiskVariant
from ragcache_cachestore.storage.metadata_db import MetadataDb
from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import (
    Codec,
    Origin,
    Precision,
    Provenance,
    ValuePart,
    ValueShape,
    VariantInfo,
)
from ragcache_core.storage.extents import PAGE_BYTES, Extent, ExtentAllocator
from ragcache_core.store_api import Deletion, Tombstone

PAGES = 64


def key(number: int) -> VariantKey:
    """A variant key by a small number."""
    return VariantKey(number.to_bytes(16), bytes(16))


def record(page: int, num_bytes: int = 100, put_order: int = 1) -> DiskVariant:
    """A record whose value lies at a page."""
    return DiskVariant(
        (Extent(page * PAGE_BYTES, num_bytes),),
        VariantInfo(256, num_bytes, 17, Provenance(exact=True)),
        None,
        (ValuePart(num_bytes, 99),),
        Origin(),
        1,
        0,
        put_order,
    )


def tombstone(sequence: int, made_at_ms: int = 1000) -> Tombstone:
    """A delete of one of everything."""
    deletion = Deletion(
        sequence.to_bytes(16), (bytes(16),), (key(4),), ("a", "ü"), "hr", made_at_ms
    )
    return Tombstone(sequence, deletion)


@contextmanager
def opened(folder: Path) -> Iterator[MetadataDb]:
    records = MetadataDb(folder / "records")
    try:
        yield records
    finally:
        records.close()


def allocator() -> ExtentAllocator:
    """Room for all records of a test."""
    return ExtentAllocator(PAGES * PAGE_BYTES)


u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
codecs = st.sampled_from(Codec)
keys16 = st.binary(min_size=16, max_size=16)
names = st.text(max_size=20)


@st.composite
def any_record(draw: st.DrawFn) -> DiskVariant:
    """A record whose sizes agree."""
    sizes = draw(st.lists(st.integers(1, 2**40), max_size=5))
    num_bytes = sum(sizes)
    parts = tuple(ValuePart(size, draw(u64)) for size in sizes)
    extents = (Extent(draw(u64), num_bytes),) if num_bytes else ()
    return DiskVariant(
        extents,
        VariantInfo(
            draw(u32),
            num_bytes,
            draw(u32),
            Provenance(draw(st.booleans())),
            Precision(draw(codecs), draw(codecs)),
        ),
        draw(st.none() | st.builds(ValueShape, u32, u32, u32, names)),
        parts,
        Origin(
            tuple(draw(st.lists(keys16, max_size=4))),
            draw(st.none() | st.builds(VariantKey, keys16, keys16)),
            draw(names),
            draw(names),
            draw(st.floats(0, allow_infinity=False)),
        ),
        draw(u32),
        draw(u64),
        draw(u64),
    )


@given(any_record())
def test_a_record_comes_back_as_it_was(found: DiskVariant) -> None:
    assert DiskVariant.from_bytes(found.to_bytes()) == found


@given(any_record(), st.data())
def test_a_record_cut_short_or_too_long_does_not_parse(
    found: DiskVariant, data: st.DataObject
) -> None:
    raw = found.to_bytes()
    with pytest.raises(ValueError, match="ends too early"):
        DiskVariant.from_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])
    with pytest.raises(ValueError, match="after its end"):
        DiskVariant.from_bytes(raw + b"x")


@given(any_record(), st.data())
def test_a_damaged_record_parses_or_is_a_value_error(
    found: DiskVariant, data: st.DataObject
) -> None:
    raw = bytearray(found.to_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with suppress(ValueError):
        DiskVariant.from_bytes(bytes(raw))


def test_loading_gives_the_order_of_puts_and_takes_their_places(tmp_path: Path) -> None:
    with opened(tmp_path) as records:
        for order, number in enumerate([5, 3, 9, 1]):
            records.put(key(number), record(number, put_order=order))
    places = allocator()
    with opened(tmp_path) as records:
        found = records.load(places)
        assert [variant for variant, _ in found] == [key(n) for n in (5, 3, 9, 1)]
        assert found[1][1] == record(3, put_order=1)
        assert records.num_damaged == 0
    assert (places.used_pages, places.used_bytes) == (4, 400)


def test_what_was_removed_or_replaced_is_gone(tmp_path: Path) -> None:
    with opened(tmp_path) as records:
        for number in range(5):
            records.put(key(number), record(number))
        records.put(key(4), record(40, put_order=2))
        records.remove([key(0), key(2), key(77)])
        records.remove([])
    with opened(tmp_path) as records:
        found = dict(records.load(allocator()))
        assert found == {key(1): record(1), key(3): record(3), key(4): record(40, put_order=2)}


def test_of_two_in_one_place_the_newer_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as records:
        records.put(key(1), record(7, 2 * PAGE_BYTES, put_order=1))
        records.put(key(2), record(8, put_order=2))
        assert [variant for variant, _ in records.load(allocator())] == [key(2)]
        assert records.num_damaged == 1
        assert key(1).to_bytes().hex() in caplog.text
        assert len(records.load(allocator())) == 1
        assert records.num_damaged == 1, "it was not removed"


def test_what_lies_outside_of_the_file_or_does_not_parse_is_dropped(tmp_path: Path) -> None:
    with opened(tmp_path) as records:
        records.put(key(1), record(PAGES))
        records.put(key(2), record(0, PAGES * PAGE_BYTES + 1))
        records.put(key(3), record(3))
        for raw_key, raw in (
            (b"v" + key(4).to_bytes(), b"\1garbage"),
            (b"v" + key(5).to_bytes(), b""),
            (b"v" + key(6).to_bytes(), b"\7" + record(6).to_bytes()[1:]),
            (b"vshort", record(7).to_bytes()),
        ):
            records._db.put(raw_key, raw)
        places = allocator()
        assert [variant for variant, _ in records.load(places)] == [key(3)]
        assert records.num_damaged == 6
        assert places.used_pages == 1
        assert len(records.load(allocator())) == 1
        assert records.num_damaged == 6


def test_tombstones_come_back_in_order_with_the_last_sequence(tmp_path: Path) -> None:
    with opened(tmp_path) as records:
        assert (records.delete_sequence, records.tombstones()) == (0, [])
        for sequence in (1, 2, 300):
            records.put_tombstones([tombstone(sequence)])
        assert records.delete_sequence == 300
    with opened(tmp_path) as records:
        assert records.delete_sequence == 300
        assert records.tombstones() == [tombstone(n) for n in (1, 2, 300)]


def test_old_tombstones_are_dropped_and_the_sequence_goes_on(tmp_path: Path) -> None:
    with opened(tmp_path) as records:
        for sequence, made_at_ms in ((1, 500), (2, 1000), (3, 999)):
            records.put_tombstones([tombstone(sequence, made_at_ms)])
        assert records.drop_tombstones(before_ms=1000) == 2
        assert records.tombstones() == [tombstone(2, 1000)]
        assert records.drop_tombstones(before_ms=2000) == 1
    with opened(tmp_path) as records:
        assert (records.tombstones(), records.delete_sequence) == ([], 3)


def test_a_damaged_tombstone_is_not_passed_over(tmp_path: Path) -> None:
    with opened(tmp_path) as records:
        records.put_tombstones([tombstone(1)])
        records._db.put(b"t" + (2).to_bytes(8), b"\1nonsense")
        with pytest.raises(InvalidInput, match="RAGCACHE_DATA_DIR"):
            records.tombstones()


def test_meta_stays_with_the_folder(tmp_path: Path) -> None:
    with opened(tmp_path / "a") as records:
        store_id = records.store_id
        assert (len(store_id), records.last_alive_ms) == (16, 0)
        records.note_alive(12345)
    with opened(tmp_path / "a") as records:
        assert (records.store_id, records.last_alive_ms) == (store_id, 12345)
    with opened(tmp_path / "b") as other:
        assert other.store_id != store_id


def test_clearing_leaves_the_identity_and_the_sequence(tmp_path: Path) -> None:
    with opened(tmp_path) as records:
        records.put(key(1), record(1))
        records.put_tombstones([tombstone(5)])
        store_id = records.store_id
        records.clear()
    with opened(tmp_path) as records:
        assert (records.load(allocator()), records.tombstones()) == ([], [])
        assert (records.store_id, records.delete_sequence) == (store_id, 5)


WRITER = """
import sys
from pathlib import Path
from tests.unit.cachestore.storage.test_metadata_db import key, record, tombstone
from ragcache_cachestore.storage.metadata_db import MetadataDb
records = MetadataDb(Path(sys.argv[1]))
for number in range(60):
    records.put(key(number), record(number, put_order=number))
records.remove([key(3), key(4)])
records.put_tombstones([tombstone(9)])
records.put(key(60), record(60, put_order=60))
print("done", flush=True)
sys.stdin.read()
"""


def test_what_returned_survives_kill_without_a_sync(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        cwd=Path(__file__).parents[4],
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        process.send_signal(signal.SIGKILL)
    with opened(tmp_path) as records:
        found = {variant for variant, _ in records.load(allocator())}
        assert found == {key(n) for n in range(61)} - {key(3), key(4)}
        assert records.tombstones() == [tombstone(9)]


def test_many_threads_write_more_than_the_memtables_hold(tmp_path: Path) -> None:
    parts = tuple(ValuePart(1, n) for n in range(1000))  # 16 KB a record, 20 MB in all
    big = DiskVariant((Extent(0, 1000),), record(0, 1000).info, None, parts, Origin(), 1, 0, 1)
    failures: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for number in range(300):
                records.put(key(1000 * thread + number), big)
                if number % 50 == 0:
                    records.sync()
        except BaseException as error:
            failures.append(error)

    with opened(tmp_path) as records:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert sum(1 for _ in records._items(b"v")) == 1200


def test_a_disk_that_refuses_is_unavailable(tmp_path: Path) -> None:
    with opened(tmp_path) as records:
        real = records._db

        class Refusing:
            def write(self, batch: object, options: object) -> None:
                raise RuntimeError("IO error: No space left on device")

            def flush_wal(self, sync: bool) -> None:
                raise RuntimeError("IO error: Input/output error")

        records._db = Refusing()
        with pytest.raises(Unavailable, match="No space left"):
            records.put(key(1), record(1))
        with pytest.raises(Unavailable, match="does not sync"):
            records.sync()
        records._db = real


@pytest.mark.parametrize("file", ["CURRENT", "MANIFEST"])
def test_a_damaged_database_is_refused_with_its_setting_named(tmp_path: Path, file: str) -> None:
    with opened(tmp_path):
        pass
    for path in (tmp_path / "records").glob(f"{file}*"):
        path.write_text("nonsense")
    for _ in range(2):
        with pytest.raises(InvalidInput, match=r"RAGCACHE_DATA_DIR.*cannot be opened"):
            MetadataDb(tmp_path / "records")


def test_a_damaged_table_is_refused_not_read_as_the_end(tmp_path: Path) -> None:
    with opened(tmp_path) as records:
        for number in range(PAGES):
            records.put(key(number), record(number))
        records._db.flush()
    (table,) = (tmp_path / "records").glob("*.sst")
    with table.open("r+b") as file:
        file.seek(100)
        file.write(os.urandom(200))
    with pytest.raises(InvalidInput, match="RAGCACHE_DATA_DIR"), opened(tmp_path) as records:
        records.load(allocator())


def test_a_log_cut_by_a_loss_of_power_gives_what_was_before_the_cut(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        cwd=Path(__file__).parents[4],
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    log = max(folder.glob("*.log"), key=lambda path: path.stat().st_size)
    os.truncate(log, log.stat().st_size // 2)
    with opened(tmp_path) as records:
        found = [variant for variant, _ in records.load(allocator())]
    assert 0 < len(found) < 60
    assert found == [key(n) for n in range(len(found))]
