"""A reader and writer of a shard's volume, with a real store process and its data port.

What the volume has tells nothing of stored KV, and what is changed on it reaches no client.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.processes import CacheStore, launch_cachestore, wait_for_cachestore
from ragcache_core.identity.variant import Miss
from ragcache_core.store_api import Ack, PutOutcome
from ragcache_kv.store_client.client import StoreClient
from tests.kit.store import key, value, variant, whole

TIMEOUT_S = 60.0
MIB = 1 << 20
MARKER = b"the salary of the director is 40,000 florins "
RAW = MARKER * 8 + value(MIB, 1) + MARKER * 8
OLD, NEW = "11" * 32, "22" * 32


@contextlib.contextmanager
def shard(folder: Path, *keys: str, kills: bool = False) -> Iterator[CacheStore]:
    """A shard that encrypts under the first key. It ends as in a crash if kills."""
    folder.mkdir(exist_ok=True)
    file = folder.parent / "disk.keys"
    file.write_text("".join(f"{one}\n" for one in keys))
    env = {"RAGCACHE_DISK_KEY_FILE": str(file)} if keys else {}
    store = launch_cachestore(folder, env=env, shared=True)
    try:
        wait_for_cachestore(store)
        yield store
        if kills:
            store.service.kill()
    finally:
        store.service.stop()


def put(client: StoreClient) -> None:
    new = variant(key(1), RAW, num_parts=3)
    assert client.put(new, whole(new, RAW), TIMEOUT_S, ack=Ack.DURABLE) is PutOutcome.STORED


def get(store: CacheStore, transport: str) -> bytes | Miss:
    with contextlib.closing(StoreClient(store.address, (transport,))) as client:
        ((_, found),) = client.get([key(1)], TIMEOUT_S)
        return found if isinstance(found, Miss) else bytes(found.value)


def files_of(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


@pytest.mark.parametrize("transport", ["shared", "socket", "grpc"])
def test_a_killed_shard_leaves_no_text_and_gives_the_value_again(
    tmp_path: Path, transport: str
) -> None:
    """Every transport: a client that shares memory reads the file itself if it is plain."""
    folder = tmp_path / "store"
    with (
        shard(folder, OLD, kills=True) as store,
        contextlib.closing(StoreClient(store.address, (transport,))) as client,
    ):
        put(client)
    assert MARKER not in files_of(folder / "data")
    with shard(folder, NEW, OLD) as store:
        assert get(store, transport) == RAW
        assert get(store, transport) == RAW, "from memory, or decrypted once more"


def test_changed_bytes_and_missing_keys_are_misses(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with (
        shard(folder, OLD) as store,
        contextlib.closing(StoreClient(store.address, ("socket",))) as client,
    ):
        put(client)
    (values,) = (folder / "data").glob("values")
    content = bytearray(values.read_bytes())
    content[MIB // 2] ^= 1
    values.write_bytes(content)
    with shard(folder, OLD) as store:
        assert get(store, "socket") is Miss.CORRUPT
        assert "reason=changed" in store.service.log.read_text()
        with contextlib.closing(StoreClient(store.address, ("socket",))) as client:
            put(client)
    with shard(folder, NEW) as store:
        assert get(store, "socket") is Miss.NEVER_STORED
        assert "count=1 reason=no_key" in store.service.log.read_text()
