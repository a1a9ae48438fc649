"""All shards of the cache store as one store.

A chunk's variants live on the shard that owns the chunk (``ragcache_core.sharding``). A shard that
is lost costs the chunks it owns, which are misses until it is back, and nothing else: the answers
of the others neither fail nor wait for it. With one shard everything is as with its own client.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_core.keys import ChunkKey, VariantKey
from ragcache_core.reuse import VariantInfo
from ragcache_core.sharding import Rendezvous
from ragcache_wire.cachestore_client import (
    DELETE_TIMEOUT_S,
    LOOKUP_TIMEOUT_S,
    PART,
    AsyncCacheStoreClient,
    CacheStoreClient,
    StoredValue,
)
from ragcache_wire.members import Members
from ragcache_wire.status import NoAnswer
from ragcache_wire.v1 import cachestore_pb2 as pb

log = logging.getLogger("ragcache.store")

RETRY_S = 1.0
"""Between two tries whether a lost shard is back, should the first have failed."""

WAIT_FOR_RETURN_S = 600.0
"""How long one try lasts, which ends as soon as the shard answers."""

R = TypeVar("R")


class _Shard:
    """One shard and what is known of it. users: calls that its channel must stay open for."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.client = CacheStoreClient(address)
        self.users = 0
        self.gone = False
        self._lost = False
        self._trying = False
        self._next_try = 0.0

    def answers(self) -> bool:
        """Whether to ask it: not while it is lost, so that nobody waits for it."""
        if self._lost:
            self._try()
        return not self._lost

    def lose(self, error: RagCacheError) -> None:
        """It gave no answer; it is asked in the background until it does."""
        if not self._lost:
            self._lost = True
            log.warning("shard %s is lost, its chunks are misses: %s", self.address, error)
            self._try()

    def _try(self) -> None:
        if self._trying or time.monotonic() < self._next_try:
            return
        self._trying, self._next_try = True, time.monotonic() + RETRY_S
        self.client.when_it_answers(self._tried, WAIT_FOR_RETURN_S)

    def _tried(self, answered: bool) -> None:
        self._trying = False
        if answered:
            self._lost = False
            log.info("shard %s is back", self.address)


class ShardedStore:
    """Blocking client of every shard among members; safe to share between threads.

    It connects to a shard when that is first asked. The channel of one that is no member any more
    is closed when its last call has ended.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._lock = threading.Lock()
        self._addresses: tuple[str, ...] = ()
        self._rendezvous = Rendezvous(())
        self._shards: dict[str, _Shard] = {}

    def close(self) -> None:
        """Close every channel; calls in flight end."""
        for shard in self._shards.values():
            shard.client.close()

    def connect(self, timeout_s: float) -> None:
        """Connect to every shard, so that the first visitor need not wait for it. Never raises."""
        with self._lock:
            self._refresh()
            shards = list(self._shards.values())
        for answer in [shard.client.begin_lookup((), timeout_s) for shard in shards]:
            with contextlib.suppress(RagCacheError):
                answer()

    def lookup(
        self, keys: Sequence[VariantKey], timeout_s: float = LOOKUP_TIMEOUT_S
    ) -> dict[VariantKey, VariantInfo]:
        """Those of keys that are stored. Raises Unavailable if no shard that owns any answers."""
        with self._owners(keys) as owners:
            parts = _parts(keys, owners)
            asked = [shard for shard in parts if shard.answers()]
            if len(asked) < min(1, len(parts)):
                raise _lost(parts)
            # The last one is asked on this thread, which is faster, while the others work.
            waits = [
                partial(shard.client.lookup, parts[shard], timeout_s)
                if shard is asked[-1]
                else shard.client.begin_lookup(parts[shard], timeout_s)
                for shard in asked
            ]
            found: dict[VariantKey, VariantInfo] = {}
            failures = []
            for shard, wait in zip(reversed(asked), reversed(waits), strict=True):
                try:
                    found |= wait()
                except RagCacheError as error:
                    self._note(shard, error)
                    failures.append(error)
            if asked and len(failures) == len(asked):
                raise failures[0]
            return found

    def get(
        self, keys: Sequence[VariantKey], timeout_s: float
    ) -> Iterator[tuple[VariantKey, StoredValue | None]]:
        """Values in the order of keys, each as soon as it is whole; None for a miss.

        All shards read at once. What a lost shard owns is a miss; raises Unavailable only if it
        owns everything asked for. One that falls silent just now takes the time of the values after
        its own, too: those are misses this once. A caller that stops early ends the calls.
        """
        with self._owners(keys) as owners:
            parts = _parts(keys, owners)
            answers = {
                shard: shard.client.get(part, timeout_s)
                for shard, part in parts.items()
                if shard.answers()
            }
            if len(answers) < min(1, len(parts)):
                raise _lost(parts)
            if not owners:
                yield from ((key, None) for key in keys)
            failed = False
            for key, owner in zip(keys, owners, strict=False):
                found: tuple[VariantKey, StoredValue | None] = (key, None)
                try:
                    if owner in answers:
                        found = next(answers[owner], found)
                except RagCacheError as error:
                    # When one was waited for in vain the time of the others is over as well.
                    if not failed:
                        self._note(owner, error)
                    if len(parts) == 1:
                        raise
                    failed = True
                    del answers[owner]
                yield found

    def put(
        self,
        key: VariantKey,
        info: VariantInfo,
        value: memoryview,
        checksum: int,
        value_format: int,
        timeout_s: float,
    ) -> bool:
        """Store a value; False if it was there already. Raises Unavailable, InvalidInput."""
        with self._owners([key]) as owners:
            if not owners:
                raise Unavailable(PART, "it has no shards")
            [shard] = owners
            if not shard.answers():
                raise _lost(owners)
            try:
                return shard.client.put(key, info, value, checksum, value_format, timeout_s)
            except RagCacheError as error:
                self._note(shard, error)
                raise

    @contextlib.contextmanager
    def _owners(self, keys: Sequence[VariantKey]) -> Iterator[list[_Shard]]:
        """Owner of each key, its channel kept open meanwhile; none if there are no shards."""
        with self._lock:
            self._refresh()
            if len(self._shards) == 1:
                owners = [*self._shards.values()] * len(keys)
            elif self._shards:
                names = self._rendezvous.owners([key.chunk for key in keys])
                owners = [self._shards[name] for name in names]
            else:
                owners = []
            used = set(owners)
            for shard in used:
                shard.users += 1
        try:
            yield owners
        finally:
            with self._lock:
                for shard in used:
                    shard.users -= 1
                idle = [shard for shard in used if shard.gone and not shard.users]
            for shard in idle:
                shard.client.close()

    def _refresh(self) -> None:
        """Follow the members; under the lock."""
        addresses = self._members.current()
        if addresses is self._addresses:
            return
        self._addresses = addresses
        self._rendezvous = Rendezvous(addresses)
        before = self._shards
        self._shards = {name: before.get(name) or _Shard(name) for name in addresses}
        for name in before.keys() - self._shards.keys():
            before[name].gone = True
            if not before[name].users:
                before[name].client.close()

    def _note(self, shard: _Shard, error: RagCacheError) -> None:
        # An only shard is asked every time: there is nothing else to go on with.
        if isinstance(error, NoAnswer) and len(self._shards) > 1:
            shard.lose(error)
        elif len(self._shards) > 1:
            log.warning("shard %s: %s", shard.address, error)


class AsyncShardedStore:
    """Async client for what services other than the engine ask of every shard among members."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._addresses: tuple[str, ...] = ()
        self._clients: dict[str, AsyncCacheStoreClient] = {}
        self._retry_at: dict[str, float] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Close every channel; calls in flight end at once."""
        for client in self._clients.values():
            await client.close()
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def delete_chunks(self, chunks: Sequence[ChunkKey]) -> int:
        """Remove every variant of chunks from every shard; returns how many there were.

        From every one: a chunk has had other owners if shards came or went. Raises Unavailable if
        a shard did not answer, when the others have; that one is left alone for a moment.
        """
        clients, now = self._current(), asyncio.get_running_loop().time()
        if not clients:
            raise Unavailable(PART, "it has no shards")

        async def delete(address: str, client: AsyncCacheStoreClient) -> int:
            if now < self._retry_at.get(address, now):
                raise Unavailable(PART, f"shard {address} did not answer a moment ago")
            try:
                return await client.delete_chunks(chunks)
            except NoAnswer:
                self._retry_at[address] = asyncio.get_running_loop().time() + RETRY_S
                raise

        results = await _all(delete(address, client) for address, client in clients.items())
        for result in results:
            if isinstance(result, RagCacheError):
                raise result
        return sum(result for result in results if isinstance(result, int))

    async def stats(self) -> dict[str, pb.StatsReply | None]:
        """Counters and sizes of each shard by its address; None for one that does not answer."""
        clients = self._current()
        replies = await _all(client.stats() for client in clients.values())
        return {
            address: None if isinstance(reply, RagCacheError) else reply
            for address, reply in zip(clients, replies, strict=True)
        }

    def _current(self) -> dict[str, AsyncCacheStoreClient]:
        addresses = self._members.current()
        if addresses is not self._addresses:
            self._addresses = addresses
            before = self._clients
            self._clients = {
                name: before.get(name) or AsyncCacheStoreClient(name) for name in addresses
            }
            for name in before.keys() - self._clients.keys():
                # Calls in flight have deadlines; nobody waits here for their end.
                task = asyncio.create_task(before[name].close(DELETE_TIMEOUT_S))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
        return self._clients


async def _all(calls: Iterable[Coroutine[Any, Any, R]]) -> list[R | RagCacheError]:
    """Run calls at once; each gives its result, or its error if that is one of ours."""

    async def result(call: Coroutine[Any, Any, R]) -> R | RagCacheError:
        try:
            return await call
        except RagCacheError as error:
            return error

    return await asyncio.gather(*map(result, calls))


def _parts(keys: Sequence[VariantKey], owners: Sequence[_Shard]) -> dict[_Shard, list[VariantKey]]:
    """What each shard owns of keys, in their order."""
    parts: dict[_Shard, list[VariantKey]] = {}
    for key, owner in zip(keys, owners, strict=False):
        parts.setdefault(owner, []).append(key)
    return parts


def _lost(shards: Iterable[_Shard]) -> Unavailable:
    return Unavailable(PART, f"lost: {', '.join(shard.address for shard in shards)}")
