"""Encrypted values on disk: what is in the files, and what a store does with other keys."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ragcache_cachestore.state.leases import ReadLease
from ragcache_cachestore.storage.disk_cipher import PARAMS_BYTES, DiskCipher, EncryptionParams
from ragcache_cachestore.store import Store
from ragcache_core.errors import Unavailable
from ragcache_core.identity.variant import Miss, Origin, Tier
from ragcache_core.store_api import Ack, PutOutcome
from ragcache_wire.watched.key_lines import DiskKeys
from tests.kit.store import MIB, get, key, opened, put, value

PAGE = 65536
MARKER = b"the salary of the director is 40,000 florins "


class KeyFile:
    """A file of keys. Its clock tells a store when to read it again."""

    def __init__(self, path: Path, *keys: str) -> None:
        self.path, self._now = path, 0.0
        self.write(*keys)

    def write(self, *keys: str) -> None:
        self.path.write_text("".join(f"{one}\n" for one in keys))
        self._now += 10.0

    def keys(self) -> DiskKeys:
        return DiskKeys(self.path, clock=lambda: self._now)


OLD, NEW = ("11" * 32, "22" * 32)


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "disk.key", OLD)


@contextmanager
def encrypted(folder: Path, file: KeyFile | None, **settings: Any) -> Iterator[Store]:
    keys = None if file is None else file.keys()
    with opened(folder / "data", disk_keys=keys, **settings) as store:
        yield store


def marked(size: int, seed: int = 0) -> bytes:
    """A value with a text that a reader of the volume would find."""
    raw = bytearray(value(size, seed))
    for at in range(0, size - len(MARKER), PAGE // 2):
        raw[at : at + len(MARKER)] = MARKER
    return bytes(raw)


def bytes_on_disk(folder: Path) -> bytes:
    """All files of a store: values, and those of RocksDB."""
    files = [path for path in sorted((folder / "data").rglob("*")) if path.is_file()]
    return b"".join(path.read_bytes() for path in files)


def dropped(store: Store, reason: str) -> float:
    name = "ragcache_store_undecrypted_total"
    return store.telemetry.collectors.get_sample_value(name, {"reason": reason}) or 0.0


@pytest.mark.parametrize("size", [1, PAGE - 1, MIB, 3 * MIB + 5])
def test_no_byte_of_a_value_is_on_disk_and_it_is_read_back(
    tmp_path: Path, file: KeyFile, size: int
) -> None:
    raw = marked(size)
    with encrypted(tmp_path, file) as store:
        assert put(store, key(1), raw, ack=Ack.DURABLE) is PutOutcome.STORED
    if size > 32:
        assert raw[-32:] not in bytes_on_disk(tmp_path)
    assert MARKER not in bytes_on_disk(tmp_path)
    with encrypted(tmp_path, file) as store:
        assert get(store, key(1)) == raw


def test_without_keys_the_marker_is_found(tmp_path: Path) -> None:
    """The check above finds plain values."""
    with encrypted(tmp_path, None) as store:
        put(store, key(1), marked(MIB), ack=Ack.DURABLE)
    assert MARKER in bytes_on_disk(tmp_path)


def test_equal_values_differ_on_disk(tmp_path: Path, file: KeyFile) -> None:
    raw = bytes(PAGE)
    with encrypted(tmp_path, file) as store:
        found = []
        for number in range(4):
            put(store, key(number), raw, ack=Ack.DURABLE)
            variant = store.state.catalog.get(key(number))
            assert variant is not None
            assert variant.disk is not None
            page = bytearray(PAGE)
            store.disk_tier.read_into(variant.disk.extents, [memoryview(page)])
            found.append((variant.disk.encryption, bytes(page)))
        assert len({params for params, _ in found}) == 4
        assert len({page for _, page in found}) == 4
        assert bytes(PAGE) not in {page for _, page in found}


def test_a_read_counts_for_the_disk_and_its_lease_is_in_memory(
    tmp_path: Path, file: KeyFile
) -> None:
    """No client gets the bytes of the file."""
    with encrypted(tmp_path, file) as store:
        put(store, key(1), value(PAGE), ack=Ack.DURABLE)
    with encrypted(tmp_path, file) as store:
        opened_ = store.reads.open([key(1)])
        store.reads.note_opened(opened_)
        (lease,) = opened_
        assert isinstance(lease, ReadLease)
        assert not lease.on_disk
        assert lease.header.tier is Tier.DISK
        store.reads.release([lease.id])
        assert store.stats().hits_disk == 1
        assert store.stats().hits_memory == 0


def test_a_new_key_encrypts_and_an_old_one_still_reads(tmp_path: Path, file: KeyFile) -> None:
    first, second = value(PAGE, 1), value(PAGE, 2)
    with encrypted(tmp_path, file, memory_bytes=2 * PAGE) as store:
        put(store, key(1), first, ack=Ack.DURABLE)
        file.write(NEW, OLD)  # while the store runs
        put(store, key(2), second, ack=Ack.DURABLE)
        assert get(store, key(1)) == first
    file.write(NEW)
    with encrypted(tmp_path, file) as store:
        assert get(store, key(2)) == second
        assert isinstance(get(store, key(1)), Miss), "its key is gone"
        assert dropped(store, "no_key") == 1


@pytest.mark.parametrize("keys", [None, (NEW,)])
def test_values_without_their_key_are_dropped_at_the_start(
    tmp_path: Path, file: KeyFile, keys: tuple[str] | None, caplog: pytest.LogCaptureFixture
) -> None:
    with encrypted(tmp_path, file) as store:
        for number in range(3):
            put(store, key(number), value(PAGE, number), ack=Ack.DURABLE)
    if keys is not None:
        file.write(*keys)
    with encrypted(tmp_path, None if keys is None else file) as store:
        assert len(store) == 0
        assert [get(store, key(number)) for number in range(3)] == [Miss.NEVER_STORED] * 3
        assert dropped(store, "no_key") == 3
        assert store.stats().disk_bytes == 0, "their pages are free"
        assert put(store, key(0), value(PAGE, 9), ack=Ack.DURABLE) is PutOutcome.STORED
        assert get(store, key(0)) == value(PAGE, 9)
    assert "count=3 reason=no_key" in caplog.text


def test_a_key_that_goes_while_the_store_runs_makes_its_values_misses(
    tmp_path: Path, file: KeyFile
) -> None:
    with encrypted(tmp_path, file) as store:
        put(store, key(1), value(PAGE), ack=Ack.DURABLE)
    with encrypted(tmp_path, file) as store:
        file.write(NEW)
        assert get(store, key(1)) is Miss.CORRUPT
        assert dropped(store, "no_key") == 1
        assert get(store, key(1)) is Miss.CORRUPT, "it is gone"
        assert dropped(store, "no_key") == 1


def test_plain_values_are_dropped_and_erased_when_encryption_begins(
    tmp_path: Path, file: KeyFile
) -> None:
    with encrypted(tmp_path, None) as store:
        put(store, key(1), marked(MIB), ack=Ack.DURABLE)
        put(store, key(2), marked(MIB, 2), ack=Ack.DURABLE)
        deleted = store.state.catalog.get(key(2))
        assert deleted is not None
        with store.state.lock:  # its pages are free, and have its bytes
            store.state.drop(deleted, Miss.EVICTED)
        store.mover.free_dropped_copies()
    assert MARKER in bytes_on_disk(tmp_path)
    with encrypted(tmp_path, file) as store:
        assert len(store) == 0
        assert dropped(store, "plain") == 1
        assert MARKER not in bytes_on_disk(tmp_path)


def test_changed_bytes_are_a_miss(tmp_path: Path, file: KeyFile) -> None:
    """Also if the checksum in the metadata is changed with them: it is no secret."""
    raw = value(2 * MIB)
    with encrypted(tmp_path, file) as store:
        put(store, key(1), raw, ack=Ack.DURABLE)
        variant = store.state.catalog.get(key(1))
        assert variant is not None
        assert variant.disk is not None
        offset = variant.disk.extents[0].offset
    with (tmp_path / "data" / "values").open("r+b") as values:
        values.seek(offset + MIB)
        (byte,) = values.read(1)
        values.seek(offset + MIB)
        values.write(bytes([byte ^ 1]))
    with encrypted(tmp_path, file) as store:
        assert get(store, key(1)) is Miss.CORRUPT
        assert dropped(store, "changed") == 1
        assert store.stats().corrupt == 1


def test_a_value_cannot_replace_another(tmp_path: Path, file: KeyFile) -> None:
    """Its name is authenticated, so equal sizes and checksums do not help."""
    cipher = DiskCipher(file.keys())
    raw = bytearray(value(PAGE))
    encryption = cipher.encryption(b"one")
    encryption.encrypt(memoryview(bytes(raw)), memoryview(raw))
    params = encryption.end()
    assert not cipher.decrypt(b"two", params, [memoryview(bytearray(raw))])
    assert cipher.decrypt(b"one", params, [memoryview(raw)])
    assert bytes(raw) == value(PAGE)


@pytest.mark.parametrize("index", [0, 8, 40, PARAMS_BYTES - 1])
def test_changed_parameters_decrypt_nothing(tmp_path: Path, file: KeyFile, index: int) -> None:
    cipher = DiskCipher(file.keys())
    raw = bytearray(100)
    encryption = cipher.encryption(b"one")
    encryption.encrypt(memoryview(bytes(100)), memoryview(raw))
    changed = bytearray(encryption.end().to_bytes())
    changed[index] ^= 1
    assert not cipher.decrypt(
        b"one", EncryptionParams.from_bytes(bytes(changed)), [memoryview(raw)]
    )


def test_a_copy_for_another_shard_is_decrypted(tmp_path: Path, file: KeyFile) -> None:
    raw = value(3 * PAGE)
    with encrypted(tmp_path, file) as store:
        put(store, key(1), raw, ack=Ack.DURABLE)
    with encrypted(tmp_path, file) as store:
        variant = store.state.catalog.get(key(1))
        assert variant is not None
        assert store.variants.read(key(1), variant.identity) == raw


def test_a_child_on_disk_is_read_without_its_parents(tmp_path: Path, file: KeyFile) -> None:
    """Under exact reuse memory keeps no child without its parent, but a reader needs none."""
    with encrypted(tmp_path, file, leaves_only=True) as store:
        put(store, key(1), value(PAGE, 1), ack=Ack.DURABLE)
        origin = Origin(prefix_chunks=(key(1).chunk,), parent=key(1))
        put(store, key(2), value(PAGE, 2), ack=Ack.DURABLE, origin=origin)
    with encrypted(tmp_path, file, leaves_only=True) as store:
        read, count = store.disk_tier.read_into, 0

        def counted(*given: Any) -> bool:
            nonlocal count
            count += 1
            return read(*given)

        store.disk_tier.read_into = counted  # type: ignore[method-assign,assignment]
        (lease,) = store.reads.open([key(2)])
        assert isinstance(lease, ReadLease)
        assert b"".join(store.memory_tier.views(lease.copy.extents)) == value(PAGE, 2)
        assert count == 1
        store.check()
        store.reads.release([lease.id])
        assert store.stats().memory_bytes == 0, "the copy was for this read"


def test_a_read_without_room_in_memory_is_a_miss_and_no_error(
    tmp_path: Path, file: KeyFile
) -> None:
    with encrypted(tmp_path, file, memory_bytes=4 * PAGE) as store:
        for number in range(3):
            put(store, key(number), value(2 * PAGE, number), ack=Ack.DURABLE)
        leases = store.reads.open([key(0), key(1)])
        assert all(isinstance(one, ReadLease) for one in leases)
        assert get(store, key(2)) is Miss.TIMED_OUT
        store.reads.release([one.id for one in leases if isinstance(one, ReadLease)])
        assert get(store, key(2)) == value(2 * PAGE, 2)


def test_readers_of_one_value_at_once_all_get_it(tmp_path: Path, file: KeyFile) -> None:
    with encrypted(tmp_path, file) as store:
        put(store, key(1), value(MIB), ack=Ack.DURABLE)
    with encrypted(tmp_path, file) as store:
        barrier, read = threading.Barrier(4), store.disk_tier.read_into
        found: list[bytes | Miss] = []

        def together(*given: object) -> bool:
            barrier.wait(60)
            return read(*given)  # type: ignore[arg-type]

        store.disk_tier.read_into = together  # type: ignore[method-assign,assignment]
        threads = [
            threading.Thread(target=lambda: found.append(get(store, key(1)))) for _ in range(4)
        ]
        for one in threads:
            one.start()
        for one in threads:
            one.join(60)
        assert found == [value(MIB)] * 4


def test_a_write_that_ends_in_the_middle_leaves_no_metadata(tmp_path: Path, file: KeyFile) -> None:
    with encrypted(tmp_path, file, flush=False) as store:
        write = store.disk_tier.write

        def torn(extents: Sequence[object], views: Sequence[memoryview], *rest: object) -> None:
            write(extents, views, *rest)  # type: ignore[arg-type]
            raise Unavailable("cachestore", "its disk refuses writes")

        store.disk_tier.write = torn  # type: ignore[method-assign,assignment]
        with pytest.raises(Unavailable):
            put(store, key(1), value(MIB), ack=Ack.DURABLE)
    with encrypted(tmp_path, file) as store:
        assert get(store, key(1)) is Miss.NEVER_STORED
        assert store.stats().disk_bytes == 0


def test_keys_are_random_bytes_of_any_form_that_signing_keys_have(tmp_path: Path) -> None:
    path = tmp_path / "disk.key"
    path.write_text(f"{secrets.token_hex(32)}\n\n{os.urandom(48).hex()}\n")
    assert len(DiskKeys(path).current()) == 2
