"""All shards of the cache store as one store.

A chunk's variants live on the shard that owns the chunk (``ragcache_core.cluster.sharding``); hot ones also
on the next shard in the same order. A shard that is lost costs the chunks it owns, which are misses
until it is back unless they are hot, and nothing else: the answers of the others neither fail nor
wait for it. With one shard everything is as with its own client.

Deletes go to every shard: a chunk has had other owners if shards came or went. One that is dead
does not block them; it asks its peers before it serves again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from ragcache_core.cluster.sharding import RendezvousHash
from ragcache_core.errors import InvalidInput, RagCacheError, Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss, VariantInfo
from ragcache_core.store_api import (
    Ack,
    AsOf,
    ChunkVariants,
    Deletion,
    LookupAnswer,
    LookupKey,
    NewVariant,
    PutOutcome,
    StoredVariant,
)
from ragcache_kv.store_client.async_client import AsyncStoreClient
from ragcache_kv.store_client.client import (
    DELETE_TIMEOUT_S,
    LOOKUP_TIMEOUT_S,
    SERVICE,
    StoreClient,
    StoredValue,
)
from ragcache_kv.values.outgoing_value import IncompleteValue, OutgoingValue
from ragcache_wire.status import NoAnswer
from ragcache_wire.v1 import cachestore_pb2 as pb
from ragcache_wire.watched.members import Members

log = logging.getLogger("ragcache.store")

RETRY_S = 1.0
"""Between two tries whether a lost shard is back."""

MAX_KNOWN = 1 << 16
"""Variants whose size and replicas are remembered from lookups."""

VALUES_AHEAD = 2
"""Values that may wait for the caller, of each shard, while it reads several."""

MAX_CALLS_AT_ONCE = 256
"""Threads for shards that are read at once. A reader that had to wait for one while it holds others
would stop them, too, so that there are more than anybody needs; they start when needed."""

Found = tuple[VariantKey, StoredValue | Miss]
Allocate = Callable[[VariantInfo], memoryview]
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class ShardedLookup:
    """One Variants for each Want, in order.

    as_of: the deletes that each shard that answered knew of, by its address; a put of what was
    planned on this answer carries it.
    """

    variants: tuple[ChunkVariants, ...]
    as_of: Mapping[str, AsOf] = field(default_factory=dict)

    def held(self) -> dict[VariantKey, StoredVariant]:
        """Everything that is held, by its key."""
        return {held.key: held for variants in self.variants for held in variants.stored}


@dataclass(frozen=True, slots=True)
class DeleteResult:
    """removed: variants in all. silent: shards that did not acknowledge, by address, and why."""

    removed: int
    acknowledged: tuple[str, ...]
    silent: Mapping[str, str]


class _Shard:
    """One shard and what is known of it.

    users: calls that its channel must stay open for. outstanding_bytes: of values that it has been
    asked for and that have not come yet.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.client = StoreClient(address)
        self.users = 0
        self.outstanding_bytes = 0
        self.gone = False
        self._lock = threading.Lock()
        self._lost = False
        self._doubted = False
        self._closed = threading.Event()

    def answers(self) -> bool:
        """Whether to ask it: not while it is lost, so that nobody waits for it."""
        return not self._lost

    def lose(self, error: RagCacheError) -> None:
        """It gave no answer; it is asked in the background until it does."""
        with self._lock:
            if self._lost or self._closed.is_set():
                return
            self._lost = True
        log.warning("shard %s is lost, its chunks are misses: %s", self.address, error)
        name = f"return of {self.address}"
        threading.Thread(target=self._until_it_answers, name=name, daemon=True).start()

    def doubt(self) -> None:
        """It gave no answer, but had little time: it is asked in the background, and has more."""
        with self._lock:
            if self._lost or self._doubted or self._closed.is_set():
                return
            self._doubted = True
        name = f"doubt of {self.address}"
        threading.Thread(target=self._ask_again, name=name, daemon=True).start()

    def _ask_again(self) -> None:
        try:
            self.client.lookup((), LOOKUP_TIMEOUT_S)
        except NoAnswer as error:
            self.lose(error)
        except Exception as error:  # it is there, whatever it says
            log.warning("shard %s: %s", self.address, error)
        finally:
            self._doubted = False

    def close(self) -> None:
        """Close its channel."""
        self._closed.set()
        self.client.close()

    def _until_it_answers(self) -> None:
        while not self._closed.wait(RETRY_S):
            try:
                self.client.lookup((), LOOKUP_TIMEOUT_S)
            except RagCacheError:
                continue
            except Exception:  # nobody else would ask it ever again
                log.exception("shard %s could not be asked", self.address)
                continue
            self._lost = False
            log.info("shard %s is back", self.address)
            return


@dataclass(frozen=True, slots=True)
class _Known:
    """What a lookup said of a variant."""

    num_bytes: int
    replicas: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Holders:
    """Who may hold a key: its owner, and after it those that may have a replica."""

    owner: _Shard
    others: tuple[_Shard, ...]

    def all(self) -> tuple[_Shard, ...]:
        return (self.owner, *self.others)


class ShardedStore:
    """Blocking client of every shard among members; safe to share between threads.

    It connects to a shard when that is first asked. The channel of one that is no member any more
    is closed when its last call has ended.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._lock = threading.Lock()
        self._addresses: tuple[str, ...] = ()
        self._rendezvous = RendezvousHash(())
        self._shards: dict[str, _Shard] = {}
        self._known: OrderedDict[VariantKey, _Known] = OrderedDict()
        # Its threads start when several shards are asked at once, on the thread that asks.
        self._pool = ThreadPoolExecutor(MAX_CALLS_AT_ONCE, "shards")

    def close(self) -> None:
        """Close every channel; calls in flight end."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for shard in self._shards.values():
            shard.close()

    def connect(self, timeout_s: float) -> None:
        """Connect to every shard, so that the first visitor need not wait for it. Never raises."""
        with self._every() as shards:
            calls = {shard: partial(shard.client.lookup, (), timeout_s) for shard in shards}
            self._ask(calls, timeout_s)

    def transports(self) -> dict[str, str]:
        """The data transport to each shard that has been connected to, by its address."""
        with self._lock:
            shards = list(self._shards.values())
        return {
            shard.address: transport for shard in shards if (transport := shard.client.transport)
        }

    def lookup(
        self,
        wants: Sequence[LookupKey],
        timeout_s: float = LOOKUP_TIMEOUT_S,
        *,
        exact: bool = False,
        domain: str = "",
    ) -> ShardedLookup:
        """What is held of wants. Raises Unavailable if no shard that may hold any answers.

        What a lost shard owns is asked of the next one, which has it if it is hot.
        """
        with self._holders([want.chunk for want in wants]) as holders:
            asked = [_first_that_answers(who) for who in holders]
            parts = _parts(wants, asked)
            if holders and not parts:
                raise _lost(holders)
            calls = {
                shard: partial(shard.client.lookup, part, timeout_s, exact=exact, domain=domain)
                for shard, part in parts.items()
            }
            answers = self._ask(calls, timeout_s)
            replies = {s: a for s, a in answers.items() if isinstance(a, LookupAnswer)}
            failures = [a for a in answers.values() if isinstance(a, RagCacheError)]
            if failures and not replies:
                raise failures[0]
            told = {shard: iter(reply.variants) for shard, reply in replies.items()}
            lost = ChunkVariants(miss=Miss.LOST)
            variants = [
                _as_known(next(told[shard], lost), who, shard)
                if shard is not None and shard in told
                else lost
                for who, shard in zip(holders, asked, strict=True)
            ]
            # Where there are no shards, nothing is held.
            variants += [lost] * (len(wants) - len(variants))
            as_of = {shard.address: reply.as_of for shard, reply in replies.items()}
            answer = ShardedLookup(tuple(variants), as_of)
            self._remember(answer)
            return answer

    def get(
        self,
        keys: Sequence[VariantKey],
        timeout_s: float,
        *,
        exact: bool = False,
        domain: str = "",
        allocate: Allocate | None = None,
    ) -> Iterator[Found]:
        """Values in the order of keys, each as soon as it is whole; a Miss where there is none.

        All shards read at once. A value with replicas comes from the holder that has the least to
        send; what is not found there is asked of its owner. What a lost shard owns is a miss;
        raises Unavailable only if nobody can be asked. A shard that falls silent just now takes the
        time of the values after its own, too: those are misses this once. A caller that stops early
        ends the calls. allocate: see StoreClient; called on threads of this store's own where
        several shards are read.
        """
        ends = time.monotonic() + timeout_s
        options: dict[str, Any] = {"exact": exact, "domain": domain, "allocate": allocate}
        with (
            self._holders([key.chunk for key in keys], keys) as holders,
            contextlib.ExitStack() as ending,
        ):
            if not holders:
                yield from ((key, Miss.LOST) for key in keys)
                return
            asked, sizes = self._choose(keys, holders)
            ending.callback(self._give_back, sizes, asked)
            parts = _parts(keys, asked)
            if not parts:
                raise _lost(holders)
            readings = {
                shard: ending.enter_context(
                    _Reading(
                        partial(shard.client.get, part, timeout_s, **options),
                        self._pool if len(parts) > 1 else None,
                    )
                )
                for shard, part in parts.items()
            }
            failed = False
            for place, key in enumerate(keys):
                shard, who = asked[place], holders[place]
                found: StoredValue | Miss = Miss.LOST
                if shard is not None and shard in readings:
                    try:
                        found = readings[shard].next_value(ends)
                    except RagCacheError as error:
                        # When one was waited for in vain the time of the others is over as well.
                        if not failed:
                            self._note(shard, error, timeout_s)
                        if len(parts) == 1 and not who.others:
                            raise
                        failed = True
                        del readings[shard]
                if isinstance(found, Miss):
                    found = self._elsewhere(key, found, shard, who, ends, options)
                yield key, found

    def put(
        self,
        variant: NewVariant,
        value: OutgoingValue,
        timeout_s: float,
        ack: Ack = Ack.ACCEPTED,
        *,
        as_of: Mapping[str, AsOf] | None = None,
    ) -> PutOutcome:
        """Store a value on its chunk's owner. Raises Unavailable, InvalidInput, IncompleteValue.

        as_of: that of the lookup which the computation was planned on. An owner that it does not
        name has become one since then, and refuses the value if any delete covers it.
        """
        with self._holders([variant.key.chunk]) as holders:
            if not holders:
                raise Unavailable(SERVICE, "it has no shards")
            shard = holders[0].owner
            if not shard.answers():
                raise _lost(holders)
            known = variant.as_of if as_of is None else as_of.get(shard.address, AsOf())
            try:
                return shard.client.put(replace(variant, as_of=known), value, timeout_s, ack)
            except IncompleteValue:  # which says nothing of the shard
                raise
            except RagCacheError as error:
                self._note(shard, error, timeout_s)
                raise

    def note_reads(self, keys: Sequence[VariantKey], timeout_s: float = LOOKUP_TIMEOUT_S) -> None:
        """Say that copies of values that the caller keeps were read; see StoreClient. Never raises.

        Their owners are told, and nobody in place of one that is lost.
        """
        with self._holders([key.chunk for key in keys]) as holders:
            owners = [who.owner if who.owner.answers() else None for who in holders]
            calls = {
                shard: partial(shard.client.note_reads, part, timeout_s)
                for shard, part in _parts(keys, owners).items()
            }
            self._ask(calls, timeout_s)

    def prefetch(self, keys: Sequence[VariantKey], timeout_s: float = LOOKUP_TIMEOUT_S) -> int:
        """Bring variants from disk into memory; returns how many are on their way.

        A hint: what a lost shard owns is left out.
        """
        return self._sum(
            keys,
            lambda shard, part: partial(shard.client.prefetch, part, timeout_s=timeout_s),
            timeout_s,
        )

    def delete(self, deletion: Deletion, timeout_s: float = DELETE_TIMEOUT_S) -> DeleteResult:
        """Delete on every shard. Raises Unavailable if none acknowledges, InvalidInput."""
        with self._every() as shards:
            calls = {
                shard: partial(shard.client.delete, deletion, timeout_s=timeout_s)
                for shard in shards
            }
            answers = self._ask(calls, timeout_s)
        return _delete_result({shard.address: answer for shard, answer in answers.items()})

    def _sum(
        self,
        keys: Sequence[VariantKey],
        call: Callable[[_Shard, list[VariantKey]], Callable[[], int]],
        timeout_s: float,
    ) -> int:
        with self._holders([key.chunk for key in keys]) as holders:
            parts = _parts(keys, [_first_that_answers(who) for who in holders])
            calls = {shard: call(shard, part) for shard, part in parts.items()}
            answers = self._ask(calls, timeout_s)
            return sum(answer for answer in answers.values() if isinstance(answer, int))

    def _ask(
        self, calls: Mapping[_Shard, Callable[[], R]], timeout_s: float
    ) -> dict[_Shard, R | RagCacheError]:
        """Make calls at once; each gives its result, or its error if that is one of ours.

        timeout_s: what each of them has.
        """
        *others, last = calls or (None,)
        if last is None:
            return {}

        def result(shard: _Shard) -> R | RagCacheError:
            try:
                return calls[shard]()
            except RagCacheError as error:
                self._note(shard, error, timeout_s)
                return error

        waits: dict[_Shard, Future[R | RagCacheError]] = {
            # In a copy of the context: the calls belong to the caller's trace.
            shard: self._pool.submit(copy_context().run, result, shard)
            for shard in others
        }
        # The last one is asked on this thread, which needs no other to wake it.
        own = result(last)
        return {shard: wait.result() for shard, wait in waits.items()} | {last: own}

    def _choose(
        self, keys: Sequence[VariantKey], holders: Sequence[_Holders]
    ) -> tuple[list[_Shard | None], list[int]]:
        """Who is asked for each key, by outstanding bytes, and the bytes that counted for it."""
        asked: list[_Shard | None] = []
        sizes = []
        with self._lock:
            for key, who in zip(keys, holders, strict=True):
                known = self._known.get(key)
                size = known.num_bytes if known else 0
                # A guess that the next one has it is worth a call only if the owner has none.
                sure = who.all() if known and known.replicas else (who.owner,)
                able = [shard for shard in sure if shard.answers()] or [
                    shard for shard in who.others if shard.answers()
                ]
                shard = min(able, key=lambda shard: shard.outstanding_bytes, default=None)
                if shard is not None:
                    shard.outstanding_bytes += size
                asked.append(shard)
                sizes.append(size)
        return asked, sizes

    def _give_back(self, sizes: Sequence[int], asked: Sequence[_Shard | None]) -> None:
        with self._lock:
            for size, shard in zip(sizes, asked, strict=True):
                if shard is not None:
                    shard.outstanding_bytes -= size

    def _elsewhere(
        self,
        key: VariantKey,
        miss: Miss,
        asked: _Shard | None,
        who: _Holders,
        ends: float,
        options: Mapping[str, Any],
    ) -> StoredValue | Miss:
        """A value that whoever was asked does not have or did not send; miss: why."""
        if asked is who.owner and miss is not Miss.LOST:
            return miss
        for shard in who.all():
            left_s = ends - time.monotonic()
            if shard is asked or not shard.answers():
                continue
            if left_s <= 0:
                return Miss.TIMED_OUT
            try:
                _, found = next(iter(shard.client.get([key], left_s, **options)))
            except RagCacheError as error:
                self._note(shard, error, left_s)
                continue
            if not isinstance(found, Miss) or shard is who.owner:
                return found
        # Only its owner could say that it is nowhere.
        return Miss.LOST

    def _remember(self, answer: ShardedLookup) -> None:
        with self._lock:
            for key, held in answer.held().items():
                self._known[key] = _Known(held.info.num_bytes, held.replicas)
                self._known.move_to_end(key)
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)

    @contextlib.contextmanager
    def _holders(
        self, chunks: Sequence[bytes], keys: Sequence[VariantKey] = ()
    ) -> Iterator[list[_Holders]]:
        """Holders of each chunk, their channels kept open meanwhile; none if there are no shards.

        keys: as many as chunks, or none; then replicas that lookups told of are among the holders.
        """
        with self._lock:
            self._refresh()
            if len(self._shards) == 1:
                [only] = self._shards.values()
                holders = [_Holders(only, ())] * len(chunks)
            elif self._shards:
                ranked = self._rendezvous.ranked(chunks, 2) if chunks else []
                holders = [
                    self._who(names, self._known.get(keys[place]) if keys else None)
                    for place, names in enumerate(ranked)
                ]
            else:
                holders = []
            used = self._use(shard for who in holders for shard in who.all())
        try:
            yield holders
        finally:
            self._leave(used)

    @contextlib.contextmanager
    def _every(self) -> Iterator[list[_Shard]]:
        """Every shard, their channels kept open meanwhile."""
        with self._lock:
            self._refresh()
            shards = list(self._shards.values())
            used = self._use(shards)
        try:
            yield shards
        finally:
            self._leave(used)

    def _who(self, names: Sequence[str], known: _Known | None) -> _Holders:
        owner, *others = names
        others = list(known.replicas) if known and known.replicas else others
        there = [self._shards[name] for name in others if name in self._shards and name != owner]
        return _Holders(self._shards[owner], tuple(there))

    @staticmethod
    def _use(shards: Iterable[_Shard]) -> set[_Shard]:
        """Under the lock."""
        used = set(shards)
        for shard in used:
            shard.users += 1
        return used

    def _leave(self, used: set[_Shard]) -> None:
        with self._lock:
            for shard in used:
                shard.users -= 1
            idle = [shard for shard in used if shard.gone and not shard.users]
        for shard in idle:
            shard.close()

    def _refresh(self) -> None:
        """Follow the members; under the lock."""
        addresses = self._members.current()
        if addresses is self._addresses:
            return
        self._addresses = addresses
        self._rendezvous = RendezvousHash(addresses)
        before = self._shards
        self._shards = {name: before.get(name) or _Shard(name) for name in addresses}
        # Owners have changed, and with them who knows of replicas.
        self._known.clear()
        for name in before.keys() - self._shards.keys():
            before[name].gone = True
            if not before[name].users:
                before[name].close()

    def _note(self, shard: _Shard, error: RagCacheError, had_s: float) -> None:
        # An only shard is asked every time: there is nothing else to go on with.
        if isinstance(error, NoAnswer) and len(self._shards) > 1:
            # One that had little time for its answer is not lost for that.
            if had_s >= RETRY_S:
                shard.lose(error)
            else:
                shard.doubt()
        elif len(self._shards) > 1:
            log.warning("shard %s: %s", shard.address, error)


class _Reading:
    """One shard's values in order: read on the caller's thread, or ahead of it on the pool's."""

    def __init__(
        self, begin: Callable[[], Iterator[Found]], pool: ThreadPoolExecutor | None
    ) -> None:
        self._stop = threading.Event()
        self._ahead: queue.Queue[StoredValue | Miss | BaseException] | None = None
        if pool is None:
            self._values = _begun_by_the_first(begin)
        else:
            self._ahead = queue.Queue(VALUES_AHEAD)
            pool.submit(copy_context().run, self._read, begin)

    def __enter__(self) -> _Reading:
        return self

    def __exit__(self, *_: object) -> None:
        """End the call."""
        self._stop.set()
        if self._ahead is None:
            _close(self._values)

    def next_value(self, ends: float) -> StoredValue | Miss:
        """The next one. ends: of the call, on time.monotonic's clock. Raises what the call does."""
        if self._ahead is None:
            return next((found for _, found in self._values), Miss.LOST)
        try:
            # The call ends by itself then, unless it never began: the store is being closed.
            found = self._ahead.get(timeout=max(0.0, ends - time.monotonic()) + RETRY_S)
        except queue.Empty as error:
            raise NoAnswer(SERVICE, "it was not asked") from error
        if isinstance(found, BaseException):
            raise found
        return found

    def _read(self, begin: Callable[[], Iterator[Found]]) -> None:
        assert self._ahead is not None
        try:
            values = begin()
            try:
                for _, found in values:
                    self._hand_over(found)
                    if self._stop.is_set():
                        return
            finally:
                _close(values)
            self._hand_over(NoAnswer(SERVICE, "it ended early"))
        except BaseException as error:
            self._hand_over(error)

    def _hand_over(self, found: StoredValue | Miss | BaseException) -> None:
        assert self._ahead is not None
        while not self._stop.is_set():
            with contextlib.suppress(queue.Full):
                self._ahead.put(found, timeout=0.1)
                return


class AsyncShardedStore:
    """Async client for what services other than the engine ask of every shard among members."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._addresses: tuple[str, ...] = ()
        self._clients: dict[str, AsyncStoreClient] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Close every channel; calls in flight end at once."""
        for client in self._clients.values():
            await client.close()
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def addresses(self) -> tuple[str, ...]:
        """The shards that there are now."""
        return tuple(self._current())

    async def delete_on(self, address: str, deletion: Deletion) -> int:
        """Delete on one shard; how many variants went. Raises Unavailable, InvalidInput."""
        client = self._current().get(address)
        if client is None:
            raise Unavailable(SERVICE, f"shard {address} is no member")
        return await client.delete(deletion, DELETE_TIMEOUT_S)

    async def stats(self) -> dict[str, pb.StatsReply | None]:
        """Counters and sizes of each shard by its address; None for one that does not answer."""
        clients = self._current()
        replies = await _all(client.stats() for client in clients.values())
        return {
            address: None if isinstance(reply, RagCacheError) else reply
            for address, reply in zip(clients, replies, strict=True)
        }

    async def lookup(self, wants: Sequence[LookupKey]) -> tuple[ChunkVariants, ...]:
        """What the owners of the chunks hold of each want. Raises Unavailable if one is silent."""
        clients = self._current()
        if not clients:
            raise Unavailable(SERVICE, "it has no shards")
        parts: dict[str, list[int]] = {}
        for place, owner in enumerate(RendezvousHash(clients).owners([one.chunk for one in wants])):
            parts.setdefault(owner, []).append(place)
        answers = await asyncio.gather(
            *(clients[owner].lookup([wants[n] for n in part]) for owner, part in parts.items())
        )
        found = dict(
            pair
            for part, answer in zip(parts.values(), answers, strict=True)
            for pair in zip(part, answer.variants, strict=True)
        )
        return tuple(found[place] for place in range(len(wants)))

    async def prefetch(self, keys: Sequence[VariantKey]) -> int:
        """Bring variants from disk into memory; returns how many are on their way. Never raises."""
        clients = self._current()
        if not clients or not keys:
            return 0
        owners = RendezvousHash(clients).owners([key.chunk for key in keys])
        parts: dict[str, list[VariantKey]] = {}
        for key, owner in zip(keys, owners, strict=True):
            parts.setdefault(owner, []).append(key)
        started = await _all(clients[owner].prefetch(part) for owner, part in parts.items())
        return sum(number for number in started if isinstance(number, int))

    def _current(self) -> dict[str, AsyncStoreClient]:
        addresses = self._members.current()
        if addresses is not self._addresses:
            self._addresses = addresses
            before = self._clients
            # Only calls go here, no values, so that no faster transport is worth connecting.
            self._clients = {
                name: before.get(name) or AsyncStoreClient(name, ("grpc",)) for name in addresses
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


def _delete_result(answers: Mapping[str, int | RagCacheError]) -> DeleteResult:
    """What became of a delete. Raises Unavailable, InvalidInput."""
    if not answers:
        raise Unavailable(SERVICE, "it has no shards")
    errors = {name: error for name, error in answers.items() if isinstance(error, RagCacheError)}
    for error in errors.values():
        # The caller's mistake is the same on every shard.
        if isinstance(error, InvalidInput):
            raise error
    acknowledged = tuple(name for name in answers if name not in errors)
    if not acknowledged:
        raise next(iter(errors.values()))
    removed = sum(answer for answer in answers.values() if isinstance(answer, int))
    return DeleteResult(removed, acknowledged, {name: str(e) for name, e in errors.items()})


def _first_that_answers(who: _Holders) -> _Shard | None:
    return next((shard for shard in who.all() if shard.answers()), None)


def _as_known(variants: ChunkVariants, who: _Holders, asked: _Shard) -> ChunkVariants:
    """An answer as good as who gave it: only its owner can say that something is nowhere."""
    if variants.stored or asked is who.owner:
        return variants
    return ChunkVariants(miss=Miss.LOST)


def _parts(items: Sequence[R], asked: Sequence[_Shard | None]) -> dict[_Shard, list[R]]:
    """What each shard is asked for, in order."""
    parts: dict[_Shard, list[R]] = {}
    for item, shard in zip(items, asked, strict=False):
        if shard is not None:
            parts.setdefault(shard, []).append(item)
    return parts


def _lost(holders: Iterable[_Holders]) -> Unavailable:
    names = {shard.address for who in holders for shard in who.all()}
    return Unavailable(SERVICE, f"shard {', '.join(sorted(names))} is lost", RETRY_S)


def _begun_by_the_first(begin: Callable[[], Iterator[Found]]) -> Iterator[Found]:
    """Values of a call that is made when the first of them is asked for."""
    yield from begin()


def _close(values: Iterator[Found]) -> None:
    # A generator's own; whatever iterates otherwise ends with its last reference.
    close = getattr(values, "close", None)
    if close is not None:
        close()
