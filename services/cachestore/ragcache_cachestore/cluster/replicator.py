"""Copies hot variants to the next shard, so that two shards serve their readers.

A thread checks every few seconds what this shard has served, and
``ragcache_core.cluster.replication`` decides. ``__main__`` runs::

    replicator = Replicator(store, members, own)  # members: None if this is the only shard
    replicator.start()  # when it serves
    replicator.close()  # before the store is closed

The gRPC service answers DropCopy with ``replicator.drop_own_copy`` in a thread.

A copy is an ordinary put. It has seen the deletes of the other shard that this shard has pulled.
The other shard refuses it if a later delete covers the variant. So a delete that is under way
cannot miss the copy.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from ragcache_cachestore.store import Store
from ragcache_core.cluster.replication import ReplicationThresholds, ServedBytes, decide_replication
from ragcache_core.cluster.sharding import RendezvousHash
from ragcache_core.errors import RagCacheError
from ragcache_core.identity.keys import VariantKey
from ragcache_core.store_api import AsOf, PutOutcome
from ragcache_kv.store_client.client import StoreClient
from ragcache_wire.peers.credentials import NO_CREDENTIALS, Credentials
from ragcache_wire.watched.members import Members

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 5.0
HALF_LIFE_S = 30.0
COPY_TIMEOUT_S = 10.0
CALL_TIMEOUT_S = 5.0


class Replicator:
    """Manages the copies that this shard has made.

    Args:
        clock: Returns monotonic seconds.
        credentials: With what the client proves that it belongs to the platform.
    """

    def __init__(
        self,
        store: Store,
        members: Members | None,
        own: str,
        thresholds: ReplicationThresholds | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        self._store = store
        self._members = members
        self._own = own
        self._thresholds = thresholds or ReplicationThresholds()
        self._credentials = credentials
        self._clock = clock
        self._served = ServedBytes(HALF_LIFE_S)
        self._addresses: tuple[str, ...] = ()
        self._rendezvous = RendezvousHash(())
        self._copies: dict[VariantKey, str] = {}
        # Guards the three above. A copy is made while it is held, because copies are rare.
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replicator", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        if self._members is not None:
            self._thread.start()

    def close(self) -> None:
        """Stop. Returns when no variant is being copied."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def drop_own_copy(self, key: VariantKey) -> bool:
        """Drop the copy of a variant that this shard does not own. Return whether it had one."""
        addresses = () if self._members is None else self._members.current()
        if self._own not in addresses:
            return False
        # Without the lock, or two shards that drop copies of each other would deadlock.
        owned = RendezvousHash(addresses).owners([key.chunk])[0] == self._own
        return not owned and self._store.deletes.discard(key)

    def check(self) -> None:
        """Decide once which copies to make and drop, and do it."""
        for key, num_bytes in self._store.reads.take_served().items():
            self._served.add(key, num_bytes, self._clock())
        load = self._served.measure_load(self._clock())
        with self._lock:
            self._update_members()
            if self._own not in self._addresses or len(self._addresses) < 2:
                return
            changes = decide_replication(load, frozenset(self._copies), self._thresholds)
            for key in changes.drop:
                self._try(self._drop, key, self._copies[key])
            for key in changes.copy:
                owner, second = self._rendezvous.ranked([key.chunk], 2)[0]
                # A variant that this shard itself copied is not copied on.
                if owner == self._own and not self._stop.is_set():
                    self._try(self._copy, key, second)

    def _run(self) -> None:
        while not self._stop.wait(CHECK_INTERVAL_S):
            try:
                self.check()
            except Exception:
                log.exception("replicator: check failed")

    def _update_members(self) -> None:
        """Read the members again. The caller has the lock."""
        addresses = () if self._members is None else self._members.current()
        if addresses is not self._addresses:
            self._addresses, self._rendezvous = addresses, RendezvousHash(addresses)
            for key, shard in [*self._copies.items()]:
                if shard not in addresses:
                    self._forget(key)

    def _copy(self, key: VariantKey, shard: str) -> None:
        client = StoreClient(shard, credentials=self._credentials)
        try:
            client.connect()
            assert client.hello is not None
            # Read before the variant, so that the variant has survived these deletes.
            target = client.hello.store
            as_of = AsOf(target, self._store.deletes.pull_positions().get(target, 0))
            exported = self._store.variants.export(key)
            if exported is None:
                return
            variant, value = exported
            outcome = client.put(replace(variant, as_of=as_of), value, COPY_TIMEOUT_S)
        finally:
            client.close()
        if outcome not in {PutOutcome.STORED, PutOutcome.ALREADY_STORED}:
            log.info("replicator: shard refused a copy shard=%s outcome=%s", shard, outcome.value)
            return
        self._copies[key] = shard
        self._store.variants.set_copies(key, (shard,))
        log.info("replicator: made a copy num_bytes=%d shard=%s", variant.info.num_bytes, shard)

    def _drop(self, key: VariantKey, shard: str) -> None:
        # Forgotten even if the other shard does not answer. It evicts the copy some day.
        self._forget(key)
        client = StoreClient(shard, credentials=self._credentials)
        try:
            client.drop_copy(key, timeout_s=CALL_TIMEOUT_S)
        finally:
            client.close()

    def _forget(self, key: VariantKey) -> None:
        self._copies.pop(key, None)
        self._store.variants.set_copies(key, ())

    @staticmethod
    def _try(act: Callable[[VariantKey, str], None], key: VariantKey, shard: str) -> None:
        try:
            act(key, shard)
        except RagCacheError as error:
            log.warning("replicator: change failed shard=%s error=%s", shard, error)
