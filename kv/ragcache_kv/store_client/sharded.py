"""Blocking client of all shards of the cache store.

The shard that owns a chunk stores its variants (``ragcache_core.cluster.sharding``). Hot variants
also have a copy on the next shard in the same order. While a shard is lost, the chunks that it
owns are misses, unless they are hot. Answers of other shards neither fail nor wait for it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.store_key import StoreKey
from ragcache_core.identity.variant import Miss, Precision
from ragcache_core.store_api import (
    Ack,
    AsOf,
    ChunkVariants,
    LookupAnswer,
    LookupKey,
    NewVariant,
    PutOutcome,
    ReportedUses,
)
from ragcache_kv.store_client.client import LOOKUP_TIMEOUT_S
from ragcache_kv.store_client.shard import KeyedValue, Shard, ShardReader, lost_error
from ragcache_kv.store_client.shard_router import (
    NO_SHARDS,
    ShardCandidates,
    ShardedLookup,
    ShardRouter,
    group_by_shard,
)
from ragcache_kv.transport.transport import SERVICE
from ragcache_kv.values.outgoing_value import IncompleteValue, OutgoingValue
from ragcache_kv.values.stored_value import Allocate, ValueOrMiss
from ragcache_wire.peers.credentials import NO_CREDENTIALS, Credentials
from ragcache_wire.watched.members import Members

MAX_CONCURRENT_CALLS = 256
"""Threads that read several shards at once.

A reader that waits for a thread while it has others would block them. There are therefore more
threads than any caller needs. They start on demand.
"""

T = TypeVar("T")


class ShardedStore:
    """Blocking client of every shard among members. Safe for threads.

    It connects to a shard at the first call to it.

    Args:
        members: The shards.
        credentials: With what the client proves that it belongs to the platform.
        store_key: Makes and checks the tags of values. None: they are put without one, and read
            with any.
        encodings: Precisions that the shards may give to values, which are tagged in each.
    """

    def __init__(
        self,
        members: Members,
        credentials: Credentials = NO_CREDENTIALS,
        store_key: StoreKey | None = None,
        encodings: Sequence[Precision] = (),
    ) -> None:
        self._router = ShardRouter(members, credentials, store_key, encodings)
        # Its threads start when a call goes to several shards.
        self._pool = ThreadPoolExecutor(MAX_CONCURRENT_CALLS, "shards")

    def close(self) -> None:
        """Close every channel and end running calls."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._router.close()

    def connect(self, timeout_s: float) -> None:
        """Connect to every shard before the first request needs it. Never raises."""
        with self._router.all_shards() as shards:
            calls = {shard: partial(shard.client.lookup, (), timeout_s) for shard in shards}
            self._call(calls, timeout_s)

    def transports(self) -> dict[str, str]:
        """Return the transport to each shard that is connected, by the shard's address."""
        return self._router.transports()

    def lookup(
        self,
        keys: Sequence[LookupKey],
        timeout_s: float = LOOKUP_TIMEOUT_S,
        *,
        exact: bool = False,
        domain: str = "",
        lossy: bool = False,
    ) -> ShardedLookup:
        """Return what the shards store of keys.

        For a lost owner, the next shard is asked, which has the hot variants.

        Args:
            keys: What to look for.
            timeout_s: Time for the answer.
            exact: Whether to find only variants that equal a full computation.
            domain: Find only variants of this domain; "" for any.
            lossy: Whether the caller may use values of lossy precision. It finds them in any case.

        Raises:
            Unavailable: No shard that may store a chunk answers.
        """
        with self._router.candidates([key.chunk for key in keys]) as candidates:
            asked = [one.first_available() for one in candidates]
            groups = group_by_shard(keys, asked)
            if candidates and not groups:
                raise _all_lost(candidates)
            calls = {
                shard: partial(
                    shard.client.lookup, group, timeout_s, exact=exact, domain=domain, lossy=lossy
                )
                for shard, group in groups.items()
            }
            lookup = _merge_lookups(keys, candidates, asked, self._call(calls, timeout_s))
            self._router.remember(lookup)
            return lookup

    def get(
        self,
        keys: Sequence[VariantKey],
        timeout_s: float,
        *,
        exact: bool = False,
        domain: str = "",
        allocate: Allocate | None = None,
        fix_overheads: Mapping[VariantKey, float] | None = None,
    ) -> Iterator[KeyedValue]:
        """Yield values in the order of keys, each when it is complete; a Miss where there is none.

        All shards are read concurrently. A value with copies comes from the shard that has the
        fewest bytes left to send. If that shard misses it, its owner is asked. A value of a lost
        shard is a miss. A shard that stops to answer also uses up the time of the values after its
        own, which are then misses. A caller that stops early ends the calls.

        Args:
            keys: The variants.
            timeout_s: Time for all of them.
            exact: Whether to read only variants that equal a full computation.
            domain: Read only variants of this domain; "" for any.
            allocate: Returns the memory of a value. If several shards are read, other threads
                call it.
            fix_overheads: Cache-Craft's CFO of the use of each key; 0 for a key that it lacks.

        Raises:
            Unavailable: No shard can be asked.
        """
        deadline = time.monotonic() + timeout_s
        options: dict[str, Any] = {
            "exact": exact,
            "domain": domain,
            "allocate": allocate,
            "fix_overheads": fix_overheads,
        }
        with (
            self._router.candidates([key.chunk for key in keys], keys) as candidates,
            contextlib.ExitStack() as stack,
        ):
            if not candidates:
                yield from ((key, Miss.LOST) for key in keys)
                return
            asked = stack.enter_context(self._router.least_loaded(keys, candidates))
            groups = group_by_shard(keys, asked)
            if not groups:
                raise _all_lost(candidates)
            readers = self._start_readers(groups, timeout_s, options, stack)
            is_only = len(groups) == 1
            for key, shard, one in zip(keys, asked, candidates, strict=True):
                value: ValueOrMiss = Miss.LOST
                if shard is not None and shard in readers:
                    try:
                        value = readers[shard].next_value(deadline)
                    except RagCacheError as error:
                        # After the first failure the time of the other shards is over, too.
                        if len(readers) == len(groups):
                            self._router.note_failure(shard, error, timeout_s)
                        if is_only and not one.others:
                            raise
                        del readers[shard]
                if isinstance(value, Miss):
                    value = self._get_elsewhere(key, value, shard, one, deadline, options)
                yield key, value

    def put(
        self,
        variant: NewVariant,
        value: OutgoingValue,
        timeout_s: float,
        ack: Ack = Ack.ACCEPTED,
        *,
        as_of: Mapping[str, AsOf] | None = None,
    ) -> PutOutcome:
        """Store a value on the owner of its chunk.

        Args:
            variant: The variant.
            value: Its value.
            timeout_s: Time for the put.
            ack: When the store acknowledges it.
            as_of: ``ShardedLookup.as_of`` of the lookup on which the computation was planned. An
                owner that is not in it refuses the value if any delete covers it.

        Raises:
            Unavailable: The owner does not answer.
            InvalidInput: The value does not match its variant.
            IncompleteValue: The value was not completed in time.
        """
        with self._router.candidates([variant.key.chunk]) as candidates:
            if not candidates:
                raise Unavailable(SERVICE, NO_SHARDS)
            shard = candidates[0].owner
            if not shard.is_available:
                raise _all_lost(candidates)
            known = variant.as_of if as_of is None else as_of.get(shard.address, AsOf())
            try:
                return shard.client.put(replace(variant, as_of=known), value, timeout_s, ack)
            except IncompleteValue:  # no failure of the shard
                raise
            except RagCacheError as error:
                self._router.note_failure(shard, error, timeout_s)
                raise

    def report_uses(
        self, reports: Sequence[ReportedUses], timeout_s: float = LOOKUP_TIMEOUT_S
    ) -> int:
        """Report uses that needed no read to the owners of the variants. Never raises.

        Uses of a lost owner's variants are not reported. A report that fails makes no shard lost.

        Returns:
            How many uses the shards counted: those of variants that they have.
        """
        with self._router.candidates([one.key.chunk for one in reports]) as candidates:
            owners = [one.owner if one.owner.is_available else None for one in candidates]
            calls = {
                shard: partial(shard.client.report_uses, group, timeout_s)
                for shard, group in group_by_shard(reports, owners).items()
            }
            counts = self._call(calls, timeout_s, in_background=True).values()
            return sum(count for count in counts if isinstance(count, int))

    def prefetch(
        self,
        keys: Sequence[VariantKey],
        timeout_s: float = LOOKUP_TIMEOUT_S,
        *,
        hold_s: float = 0.0,
    ) -> int:
        """Bring variants from disk into memory, except those of lost shards.

        Args:
            keys: The variants.
            timeout_s: Of the calls.
            hold_s: Time for which the shards do not evict them, within their bounds.

        Returns:
            The number of variants for which that started.
        """
        with self._router.candidates([key.chunk for key in keys]) as candidates:
            groups = group_by_shard(keys, [one.first_available() for one in candidates])
            calls = {
                shard: partial(shard.client.prefetch, group, timeout_s=timeout_s, hold_s=hold_s)
                for shard, group in groups.items()
            }
            answers = self._call(calls, timeout_s)
            return sum(answer for answer in answers.values() if isinstance(answer, int))

    def _call(
        self,
        calls: Mapping[Shard, Callable[[], T]],
        timeout_s: float,
        *,
        in_background: bool = False,
    ) -> dict[Shard, T | RagCacheError]:
        """Make calls concurrently. Return the result of each, or its core error.

        Args:
            calls: The calls.
            timeout_s: The time that each call has.
            in_background: Whether a shard may answer these calls late although it serves requests.
                After a call without an answer the shard is then only probed.
        """
        *others, last = calls or (None,)
        if last is None:
            return {}

        def result(shard: Shard) -> T | RagCacheError:
            try:
                return calls[shard]()
            except RagCacheError as error:
                self._router.note_failure(shard, error, 0.0 if in_background else timeout_s)
                return error

        futures: dict[Shard, Future[T | RagCacheError]] = {
            # In a copy of the context: the calls belong to the caller's trace.
            shard: self._pool.submit(copy_context().run, result, shard)
            for shard in others
        }
        # This thread makes the last call, which saves a wake-up.
        own = result(last)
        return {shard: future.result() for shard, future in futures.items()} | {last: own}

    def _start_readers(
        self,
        groups: Mapping[Shard, list[VariantKey]],
        timeout_s: float,
        options: Mapping[str, Any],
        stack: contextlib.ExitStack,
    ) -> dict[Shard, ShardReader]:
        """Start to read each shard's values. Several shards are read ahead on other threads."""
        pool = self._pool if len(groups) > 1 else None
        return {
            shard: stack.enter_context(
                ShardReader(partial(shard.client.get, group, timeout_s, **options), pool)
            )
            for shard, group in groups.items()
        }

    def _get_elsewhere(
        self,
        key: VariantKey,
        miss: Miss,
        asked: Shard | None,
        candidates: ShardCandidates,
        deadline: float,
        options: Mapping[str, Any],
    ) -> ValueOrMiss:
        """Ask the other candidates for a value that the asked shard missed."""
        if asked is candidates.owner and miss is not Miss.LOST:
            return miss
        for shard in candidates.all():
            left_s = deadline - time.monotonic()
            if shard is asked or not shard.is_available:
                continue
            if left_s <= 0:
                return Miss.TIMED_OUT
            try:
                _, value = next(iter(shard.client.get([key], left_s, **options)))
            except RagCacheError as error:
                self._router.note_failure(shard, error, left_s)
                continue
            if not isinstance(value, Miss) or shard is candidates.owner:
                return value
        # Only the owner knows that a variant is not stored.
        return Miss.LOST


def _merge_lookups(
    keys: Sequence[LookupKey],
    candidates: Sequence[ShardCandidates],
    asked: Sequence[Shard | None],
    answers: Mapping[Shard, LookupAnswer | RagCacheError],
) -> ShardedLookup:
    """Merge the shards' answers in the order of keys. Raises the error if all of them failed."""
    replies = {s: answer for s, answer in answers.items() if isinstance(answer, LookupAnswer)}
    failures = [answer for answer in answers.values() if isinstance(answer, RagCacheError)]
    if failures and not replies:
        raise failures[0]
    unread = {shard: iter(reply.variants) for shard, reply in replies.items()}
    lost = ChunkVariants(miss=Miss.LOST)
    variants = [lost] * len(keys)
    for i, (one, shard) in enumerate(zip(candidates, asked, strict=True)):
        if shard is not None and shard in unread:
            found = next(unread[shard], lost)
            # Only the owner knows that a variant is not stored.
            variants[i] = found if found.stored or shard is one.owner else lost
    as_of = {shard.address: reply.as_of for shard, reply in replies.items()}
    return ShardedLookup(tuple(variants), as_of)


def _all_lost(candidates: Sequence[ShardCandidates]) -> Unavailable:
    return lost_error(shard for one in candidates for shard in one.all())
