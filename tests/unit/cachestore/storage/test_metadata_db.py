"""MetadataDb on a real RocksDB: durability, and damaged files."""

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
    Influence,
    Origin,
    Precision,
    Provenance,
    ValuePart,
    ValueShape,
    VariantInfo,
)
from ragcache_core.storage.extents import PAGE_BYTES, Extent, ExtentAllocator
from ragcache_core.store_api import Deletion, ForgottenDeletes, Tombstone

PAGES = 64


def key(number: int) -> VariantKey:
    """A variant key by a small number."""
    return VariantKey(number.to_bytes(16), bytes(16))


def metadata(page: int, num_bytes: int = 100, put_order: int = 1) -> DiskVariant:
    """Metadata of a value at a page."""
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
    """A delete with one item of each kind."""
    deletion = Deletion(
        sequence.to_bytes(16), (bytes(16),), (key(4),), ("a", "ü"), "hr", made_at_ms
    )
    return Tombstone(sequence, deletion)


@contextmanager
def opened(folder: Path) -> Iterator[MetadataDb]:
    db = MetadataDb(folder / "records")
    try:
        yield db
    finally:
        db.close()


def make_allocator() -> ExtentAllocator:
    """An allocator large enough for every test."""
    return ExtentAllocator(PAGES * PAGE_BYTES)


u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
codecs = st.sampled_from(Codec)
keys16 = st.binary(min_size=16, max_size=16)
digests = st.just(b"") | keys16
names = st.text(max_size=20)


@st.composite
def any_record(draw: st.DrawFn) -> DiskVariant:
    """Metadata with consistent sizes."""
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
            draw(st.floats(0, allow_infinity=False)),
            draw(st.builds(Influence, digests, digests, u32)),
        ),
        draw(u32),
        draw(u64),
        draw(u64),
    )


@given(any_record())
def test_metadata_round_trips(found: DiskVariant) -> None:
    assert DiskVariant.from_bytes(found.to_bytes()) == found


@given(any_record(), st.data())
def test_metadata_of_the_wrong_length_is_refused(found: DiskVariant, data: st.DataObject) -> None:
    raw = found.to_bytes()
    with pytest.raises(ValueError, match="ends too early"):
        DiskVariant.from_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])
    with pytest.raises(ValueError, match="after its end"):
        DiskVariant.from_bytes(raw + b"x")


@given(any_record(), st.data())
def test_damaged_metadata_parses_or_raises_a_value_error(
    found: DiskVariant, data: st.DataObject
) -> None:
    raw = bytearray(found.to_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with suppress(ValueError):
        DiskVariant.from_bytes(bytes(raw))


def test_load_returns_the_order_of_puts_and_marks_extents_used(tmp_path: Path) -> None:
    with opened(tmp_path) as db:
        for order, number in enumerate([5, 3, 9, 1]):
            db.put(key(number), metadata(number, put_order=order))
    allocator = make_allocator()
    with opened(tmp_path) as db:
        found = db.load(allocator)
        assert [variant for variant, _ in found] == [key(n) for n in (5, 3, 9, 1)]
        assert found[1][1] == metadata(3, put_order=1)
        assert db.num_damaged == 0
    assert (allocator.used_pages, allocator.used_bytes) == (4, 400)


def test_removed_and_replaced_metadata_is_gone(tmp_path: Path) -> None:
    with opened(tmp_path) as db:
        for number in range(5):
            db.put(key(number), metadata(number))
        db.put(key(4), metadata(40, put_order=2))
        db.remove([key(0), key(2), key(77)])
        db.remove([])
    with opened(tmp_path) as db:
        found = dict(db.load(make_allocator()))
        assert found == {
            key(1): metadata(1),
            key(3): metadata(3),
            key(4): metadata(40, put_order=2),
        }


def test_the_newer_of_two_variants_with_the_same_extents_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as db:
        db.put(key(1), metadata(7, 2 * PAGE_BYTES, put_order=1))
        db.put(key(2), metadata(8, put_order=2))
        assert [variant for variant, _ in db.load(make_allocator())] == [key(2)]
        assert db.num_damaged == 1
        assert key(1).to_bytes().hex() in caplog.text
        assert len(db.load(make_allocator())) == 1
        assert db.num_damaged == 1, "it was not removed"


def test_metadata_outside_of_the_file_or_damaged_is_dropped(tmp_path: Path) -> None:
    with opened(tmp_path) as db:
        db.put(key(1), metadata(PAGES))
        db.put(key(2), metadata(0, PAGES * PAGE_BYTES + 1))
        db.put(key(3), metadata(3))
        for raw_key, raw in (
            (b"v" + key(4).to_bytes(), b"\1garbage"),
            (b"v" + key(5).to_bytes(), b""),
            (b"v" + key(6).to_bytes(), b"\7" + metadata(6).to_bytes()[1:]),
            (b"vshort", metadata(7).to_bytes()),
        ):
            db._db.put(raw_key, raw)
        allocator = make_allocator()
        assert [variant for variant, _ in db.load(allocator)] == [key(3)]
        assert db.num_damaged == 6
        assert allocator.used_pages == 1
        assert len(db.load(make_allocator())) == 1
        assert db.num_damaged == 6


def test_tombstones_are_loaded_in_order_with_the_last_sequence(tmp_path: Path) -> None:
    with opened(tmp_path) as db:
        assert (db.delete_sequence, list(db.tombstones())) == (0, [])
        for sequence in (1, 2, 300):
            db.put_tombstones([tombstone(sequence)])
        assert db.delete_sequence == 300
    with opened(tmp_path) as db:
        assert db.delete_sequence == 300
        assert list(db.tombstones()) == [tombstone(n) for n in (1, 2, 300)]
        assert list(db.tombstones(after=1)) == [tombstone(n) for n in (2, 300)]
        assert list(db.tombstones(after=300)) == []


def test_old_tombstones_are_dropped_and_the_sequence_continues(tmp_path: Path) -> None:
    with opened(tmp_path) as db:
        db.put_tombstones([tombstone(n) for n in (1, 2, 3)])
        assert db.forgotten == ForgottenDeletes()
        db.drop_tombstones([1, 2], ForgottenDeletes(2, 500))
        assert list(db.tombstones()) == [tombstone(3)]
    with opened(tmp_path) as db:
        assert (list(db.tombstones()), db.delete_sequence) == ([tombstone(3)], 3)
        assert db.forgotten == ForgottenDeletes(2, 500)
        db.drop_tombstones([3], ForgottenDeletes(3, 600))
        assert list(db.tombstones()) == []
        db.put(key(1), metadata(1))  # its key comes after those of tombstones
    with opened(tmp_path) as db:
        assert (db.delete_sequence, db.forgotten.sequence) == (3, 3)
        assert len(db.load(make_allocator())) == 1


def test_the_oldest_pull_positions_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragcache_cachestore.storage.metadata_db.MAX_PULL_POSITIONS", 2)
    one, two, three = (bytes([n]) * 16 for n in (9, 5, 7))
    with opened(tmp_path) as db:
        db.put_pull_position(one, 1, now_ms=10)
        db.put_pull_position(two, 2, now_ms=20)
        db.put_pull_position(one, 3, now_ms=30)
    with opened(tmp_path) as db:
        assert db.pull_positions == {one: 3, two: 2}
        db.put_pull_position(three, 4, now_ms=40)
        assert db.pull_positions == {one: 3, three: 4}
    with opened(tmp_path) as db:
        assert db.pull_positions == {one: 3, three: 4}


def test_a_damaged_tombstone_is_an_error(tmp_path: Path) -> None:
    with opened(tmp_path) as db:
        db.put_tombstones([tombstone(1)])
        db._db.put(b"t" + (2).to_bytes(8), b"\1nonsense")
        with pytest.raises(InvalidInput, match="RAGCACHE_DATA_DIR"):
            list(db.tombstones())


def test_the_folder_keeps_its_id_and_times(tmp_path: Path) -> None:
    with opened(tmp_path / "a") as db:
        store_id = db.store_id
        assert (len(store_id), db.last_alive_ms) == (16, 0)
        db.note_alive(12345)
    with opened(tmp_path / "a") as db:
        assert (db.store_id, db.last_alive_ms) == (store_id, 12345)
    with opened(tmp_path / "b") as other:
        assert other.store_id != store_id


def test_clear_keeps_the_id_and_the_deletes(tmp_path: Path) -> None:
    with opened(tmp_path) as db:
        db.put(key(1), metadata(1))
        db.put_tombstones([tombstone(5)])
        store_id = db.store_id
        db.clear_variants()
    with opened(tmp_path) as db:
        assert (db.load(make_allocator()), list(db.tombstones())) == ([], [tombstone(5)])
        assert (db.store_id, db.delete_sequence) == (store_id, 5)


WRITER = """
import sys
from pathlib import Path
from tests.unit.cachestore.storage.test_metadata_db import key, metadata, tombstone
from ragcache_cachestore.storage.metadata_db import MetadataDb
db = MetadataDb(Path(sys.argv[1]))
for number in range(60):
    db.put(key(number), metadata(number, put_order=number))
db.remove([key(3), key(4)])
db.put_tombstones([tombstone(9)])
db.put(key(60), metadata(60, put_order=60))
print("done", flush=True)
sys.stdin.read()
"""


def test_a_put_survives_a_kill_without_a_sync(tmp_path: Path) -> None:
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
    with opened(tmp_path) as db:
        found = {variant for variant, _ in db.load(make_allocator())}
        assert found == {key(n) for n in range(61)} - {key(3), key(4)}
        assert list(db.tombstones()) == [tombstone(9)]


def test_many_threads_write_more_than_the_memtables_hold(tmp_path: Path) -> None:
    parts = tuple(ValuePart(1, n) for n in range(1000))  # 16 KB a metadata, 20 MB in all
    big = DiskVariant((Extent(0, 1000),), metadata(0, 1000).info, None, parts, Origin(), 1, 0, 1)
    failures: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for number in range(300):
                db.put(key(1000 * thread + number), big)
                if number % 50 == 0:
                    db.sync()
        except BaseException as error:
            failures.append(error)

    with opened(tmp_path) as db:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert sum(1 for _ in db._items(b"v")) == 1200


def test_a_disk_error_is_unavailable(tmp_path: Path) -> None:
    with opened(tmp_path) as db:
        real = db._db

        class Refusing:
            def write(self, batch: object, options: object) -> None:
                raise RuntimeError("IO error: No space left on device")

            def flush_wal(self, sync: bool) -> None:
                raise RuntimeError("IO error: Input/output error")

        db._db = Refusing()
        with pytest.raises(Unavailable, match="No space left"):
            db.put(key(1), metadata(1))
        with pytest.raises(Unavailable, match="does not sync"):
            db.sync()
        db._db = real


@pytest.mark.parametrize("file", ["CURRENT", "MANIFEST"])
def test_a_damaged_database_names_the_setting(tmp_path: Path, file: str) -> None:
    with opened(tmp_path):
        pass
    for path in (tmp_path / "records").glob(f"{file}*"):
        path.write_text("nonsense")
    for _ in range(2):
        with pytest.raises(InvalidInput, match=r"RAGCACHE_DATA_DIR.*cannot be opened"):
            MetadataDb(tmp_path / "records")


def test_a_damaged_table_is_an_error(tmp_path: Path) -> None:
    with opened(tmp_path) as db:
        for number in range(PAGES):
            db.put(key(number), metadata(number))
        db._db.flush()
    (table,) = (tmp_path / "records").glob("*.sst")
    with table.open("r+b") as file:
        file.seek(100)
        file.write(os.urandom(200))
    with pytest.raises(InvalidInput, match="RAGCACHE_DATA_DIR"), opened(tmp_path) as db:
        db.load(make_allocator())


def test_a_truncated_log_is_recovered_up_to_its_end(tmp_path: Path) -> None:
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
    with opened(tmp_path) as db:
        found = [variant for variant, _ in db.load(make_allocator())]
    assert 0 < len(found) < 60
    assert found == [key(n) for n in range(len(found))]
