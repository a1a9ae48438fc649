"""The async client of the shards does what the blocking clients do."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from pathlib import Path

import pytest

from ragcache_core.cluster.sharding import RendezvousHash
from ragcache_core.errors import Unavailable
from ragcache_core.store_api import Deletion, LookupKey
from ragcache_kv.store_client.async_sharded import AsyncShardedStore, AsyncStoreClient
from ragcache_wire.watched.members import FixedMembers
from tests.kit.store import key, put_value, serving, value

RAW = value(300_000)


async def test_one_store_is_asked(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        put_value(served.client, key(1), RAW)
        client = AsyncStoreClient(served.address)
        found, missing = await client.lookup([LookupKey.for_variant(key(n)) for n in (1, 2)])
        assert found.stored[0].info.num_bytes == len(RAW)
        assert not missing.stored
        assert await client.prefetch([key(1)]) == 0, "it is in memory"
        deletion = Deletion(os.urandom(16), (key(1).chunk,), made_at_ms=time.time_ns() // 10**6)
        assert await client.delete(deletion) == 1
        assert (await client.stats()).tombstones == 1
        await client.close()


async def test_an_outage_is_an_exception() -> None:
    client = AsyncStoreClient("127.0.0.1:9")
    for call in (client.stats(), client.lookup([LookupKey.for_variant(key(1))])):
        with pytest.raises(Unavailable):
            await call
    await client.close()


async def test_a_prefetch_goes_to_the_shards_that_own_the_chunks(tmp_path: Path) -> None:
    with serving(tmp_path / "a") as one, serving(tmp_path / "b") as other:
        addresses = (one.address, other.address, "127.0.0.1:9")
        store = AsyncShardedStore(FixedMembers(addresses))
        for served in (one, other):
            for number in range(8):
                put_value(served.client, key(number), value(1000, number))
        assert await store.prefetch([key(number) for number in range(8)]) == 0
        assert await store.prefetch([]) == 0
        await store.close()


async def test_a_prefetch_that_is_cancelled_before_it_begins_leaves_no_call(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        store = AsyncShardedStore(FixedMembers((served.address,)))
        asking = asyncio.create_task(store.prefetch([key(1)]))
        await asyncio.sleep(0)  # its calls are made and have not begun
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        gc.collect()  # a call that was never awaited would be reported here
        await store.close()


async def test_a_lookup_asks_the_owners_of_the_chunks(tmp_path: Path) -> None:
    with serving(tmp_path / "a") as one, serving(tmp_path / "b") as other:
        store = AsyncShardedStore(FixedMembers((one.address, other.address)))
        keys = [key(number << 64) for number in range(16)]
        owners = RendezvousHash((one.address, other.address)).owners([one.chunk for one in keys])
        clients = {one.address: one.client, other.address: other.client}
        assert set(owners) == clients.keys()
        for i, owner in enumerate(owners):
            if i % 3:
                put_value(clients[owner], keys[i], value(1000, i))
        found = await store.lookup([LookupKey.for_variant(one) for one in keys])
        assert [bool(variants.stored) for variants in found] == [bool(i % 3) for i in range(16)]
        assert [variants.stored[0].key for variants in found if variants.stored] == [
            one for i, one in enumerate(keys) if i % 3
        ]
        await store.close()


async def test_a_lookup_without_an_answer_is_an_exception() -> None:
    for addresses in ((), ("127.0.0.1:9",)):
        store = AsyncShardedStore(FixedMembers(addresses))
        with pytest.raises(Unavailable):
            await store.lookup([LookupKey.for_variant(key(1))])
        await store.close()
