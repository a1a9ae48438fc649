"""Copies of what is hot here on the next shard, so that its readers are served by two.

A thread looks every few seconds at what this shard has served; ``ragcache_core.cluster.replication``
decides. ``__main__`` runs, with members the shards of the store (None: it is the only one, or is to
make no copies) and own its name among them:

    replication = Replicator(store, members, own)
    replication.start()  # once it serves
    replication.close()  # before the store is closed

and the service answers ChangeReplica with ``replication.change`` in a thread.

A copy is an ordinary put with an empty AsOf, which the other shard refuses if any delete that it
knows of covers the variant: so no delete that is under way can miss the copy. The price is that
what was put again after a delete is not copied until the tombstone is a day old.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from ragcache_core.cluster.replication import ReplicationThresholds, ServedBytes, decide_replication
from ragcache_core.cluster.sharding import RendezvousHash
from ragcache_core.errors import RagCacheError
from ragcache_core.identity.keys import VariantKey
from ragcache_core.store_api import NewVariant, PutOutcome
from ragcache_kv.store_client.client import StoreClient
from ragcache_kv.values.outgoing_value import ReadyValue
from ragcache_wire.watched.members import Members

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
HALF_LIFE_S = 30.0
COPY_TIMEOUT_S = 10.0
CALL_TIMEOUT_S = 5.0


class ReplicatedStore(Protocol):
    """What this needs of a store; every method may be called from any thread."""

    def take_served(self) -> Mapping[VariantKey, int]:
        """Bytes served of each variant since the last call."""

    def export(self, key: VariantKey) -> tuple[NewVariant, ReadyValue] | None:
        """A copy of a value and all that a put of it needs, with an empty AsOf; None if not held.

        It counts as no use.
        """

    def set_replicas(self, key: VariantKey, shards: tuple[str, ...]) -> None:
        """Other shards that hold it, for lookups to tell; forgotten when the variant goes."""

    def discard(self, key: VariantKey) -> bool:
        """Drop a variant as eviction does, without a tombstone; whether it was held."""


class Replicator:
    """The replicas that this shard has made. clock: seconds, never going back."""

    def __init__(
        self,
        store: ReplicatedStore,
        members: Members | None,
        own: str,
        thresholds: ReplicationThresholds | None = None,
        *,
        look_every_s: float = LOOK_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._members = members
        self._own = own
        self._thresholds = thresholds or ReplicationThresholds()
        self._look_every_s = look_every_s
        self._clock = clock
        self._served = ServedBytes(HALF_LIFE_S)
        self._addresses: tuple[str, ...] = ()
        self._rendezvous = RendezvousHash(())
        self._held_by: dict[VariantKey, str] = {}
        # Guards the three above; a copy is made under it, one at a time: they are rare.
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_looking, name="replication", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        if self._members is not None:
            self._thread.start()

    def close(self) -> None:
        """Look no more; returns when nothing is being copied."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def change(self, key: VariantKey, shard: str, *, drop: bool) -> bool:
        """Make or drop a copy on shard, which may be this one; whether there was anything to do.

        A shard drops its own copy only if it is not the owner. Raises Unavailable if shard does not
        answer.
        """
        addresses = () if self._members is None else self._members.current()
        if shard not in addresses:
            return False
        if shard == self._own:
            # Without the lock: two shards that drop replicas of each other would wait for it.
            owned = RendezvousHash(addresses).owners([key.chunk])[0] == self._own
            return drop and not owned and self._store.discard(key)
        with self._lock:
            self._follow()
            return self._drop(key, shard) if drop else self._copy(key, shard)

    def look(self) -> None:
        """Decide and act once."""
        for key, num_bytes in self._store.take_served().items():
            self._served.add(key, num_bytes, self._clock())
        load = self._served.measure_load(self._clock())
        with self._lock:
            self._follow()
            if self._own not in self._addresses or len(self._addresses) < 2:
                return
            changes = decide_replication(load, frozenset(self._held_by), self._thresholds)
            for key in changes.drop:
                self._quietly(self._drop, key, self._held_by[key])
            for key in changes.copy:
                owner, second = self._rendezvous.ranked([key.chunk], 2)[0]
                # What is a replica here itself goes no further.
                if owner == self._own and not self._stop.is_set():
                    self._quietly(self._copy, key, second)

    def _keep_looking(self) -> None:
        while not self._stop.wait(self._look_every_s):
            try:
                self.look()
            except Exception:
                log.exception("replicas could not be looked after")

    def _follow(self) -> None:
        """Follow the members; under the lock."""
        addresses = () if self._members is None else self._members.current()
        if addresses is not self._addresses:
            self._addresses, self._rendezvous = addresses, RendezvousHash(addresses)
            for key, shard in [*self._held_by.items()]:
                if shard not in addresses:
                    self._forget(key)

    def _copy(self, key: VariantKey, shard: str) -> bool:
        exported = self._store.export(key)
        if exported is None:
            return False
        variant, value = exported
        client = StoreClient(shard)
        try:
            outcome = client.put(variant, value, COPY_TIMEOUT_S)
        finally:
            client.close()
        if outcome not in {PutOutcome.STORED, PutOutcome.ALREADY_STORED}:
            log.info("shard %s does not take a replica: %s", shard, outcome.value)
            return False
        self._held_by[key] = shard
        self._store.set_replicas(key, (shard,))
        log.info("a variant of %d bytes is hot: replica on %s", variant.info.num_bytes, shard)
        return True

    def _drop(self, key: VariantKey, shard: str) -> bool:
        # Forgotten whether or not the other answers: what it keeps it evicts some day.
        self._forget(key)
        client = StoreClient(shard)
        try:
            return client.change_replica(key, shard, drop=True, timeout_s=CALL_TIMEOUT_S)
        finally:
            client.close()

    def _forget(self, key: VariantKey) -> None:
        self._held_by.pop(key, None)
        self._store.set_replicas(key, ())

    @staticmethod
    def _quietly(act: Callable[[VariantKey, str], bool], key: VariantKey, shard: str) -> None:
        try:
            act(key, shard)
        except RagCacheError as error:
            log.warning("replica on %s: %s", shard, error)
