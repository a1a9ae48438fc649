"""Drops variants that ``exact`` reuse cannot reach, because the variant before them is gone.

All variants of a chunk are on the shard that owns the chunk, so that ``blend`` finds them with one
question. The variant before another one in its prompt, its parent, is therefore often on another
shard. Within a shard a parent outlives its children. Across shards no call waits for another shard.
So a parent may be evicted before a child that another shard stores. Lookups treat such a child as a
miss, and it would occupy space until it is evicted.

A thread asks the owners of all parents, again and again, and drops the children of those that are
gone. A child of a dropped variant is found by the next scan. Scans follow each other at once while
they drop variants, within a share of the time.

A parent is gone if its owner has evicted it or a delete covers it. One that is missing for another
reason is put again by the next request, and its children are of use then. Its copy was corrupt, or
a shard that has joined, or has lost its volume, owns it now. Its children are kept meanwhile, for
MISSING_PARENT_S.

A shard remembers a bounded number of reasons, and none after a restart. Children of the evicted
parents whose reason it has forgotten are kept that long, too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from ragcache_cachestore.store import Store
from ragcache_core.cluster.sharding import RendezvousHash
from ragcache_core.errors import RagCacheError
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss
from ragcache_core.store_api import MAX_KEYS
from ragcache_kv.store_client.client import StoreClient
from ragcache_wire.peers.credentials import NO_CREDENTIALS, Credentials
from ragcache_wire.watched.members import Members

log = logging.getLogger(__name__)

IDLE_INTERVAL_S = 10.0
"""Time between scans that drop nothing."""

BUSY_INTERVAL_S = 1.0
"""Time between scans that drop variants."""

MAX_TIME_SHARE = 0.05
"""Share of the time that scans may take."""

MIN_AGE_S = 5.0
"""Age of a variant before its parent is looked for: puts of one prompt may overtake each other."""

MISSING_PARENT_S = 600.0
"""How long a variant is kept whose parent is missing, but not evicted or deleted."""

CALL_TIMEOUT_S = 5.0

_GONE = frozenset({Miss.EVICTED, Miss.DELETED})

AskShard = Callable[[str, Sequence[VariantKey]], Sequence[Miss | None]]
"""Returns why a shard does not store each key; None: it does, or will. Raises RagCacheError."""


def ask_shard(
    address: str, variants: Sequence[VariantKey], credentials: Credentials = NO_CREDENTIALS
) -> Sequence[Miss | None]:
    """Ask a shard over gRPC. Raises RagCacheError.

    Args:
        address: "host:port".
        variants: The variants.
        credentials: With what the client proves that it belongs to the platform.
    """
    client = StoreClient(address, credentials=credentials)
    try:
        return client.find_misses(variants, CALL_TIMEOUT_S)
    finally:
        client.close()


class OrphanCollector:
    """Drops the orphans of one shard.

    Args:
        store: The shard's store.
        members: All shards; None if this is the only one, which has no orphans.
        own: Address of this shard.
        ask: Asks another shard.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        members: Members | None,
        own: str,
        *,
        ask: AskShard = ask_shard,
        clock: Callable[[], float] = time.monotonic,
        min_age_s: float = MIN_AGE_S,
    ) -> None:
        self._store = store
        self._members = members
        self._own = own
        self._ask = ask
        self._clock = clock
        self._min_age_s = min_age_s
        self._missing_since: dict[VariantKey, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="orphan collector", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        if self._members is not None:
            self._thread.start()

    def close(self) -> None:
        """Stop. Returns when no scan is running."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def scan(self) -> int:
        """Look once for the parents of all variants. Return how many orphans were dropped.

        Children of parents whose owner does not answer are kept.
        """
        addresses = () if self._members is None else self._members.current()
        if self._own not in addresses or len(addresses) < 2:
            return 0
        owners = RendezvousHash(addresses)
        missing_since: dict[VariantKey, float] = {}
        num_dropped = 0
        children: defaultdict[VariantKey, list[VariantKey]] = defaultdict(list)
        for child, parent in self._store.variants.children(self._min_age_s):
            children[parent].append(child)
            if len(children) == MAX_KEYS:
                num_dropped += self._drop_orphans(owners, children, missing_since)
                children.clear()
            if self._stop.is_set():
                return num_dropped
        num_dropped += self._drop_orphans(owners, children, missing_since)
        self._missing_since = missing_since
        return num_dropped

    def _drop_orphans(
        self,
        owners: RendezvousHash,
        children: Mapping[VariantKey, Sequence[VariantKey]],
        missing_since: dict[VariantKey, float],
    ) -> int:
        """Drop the children whose parent is gone.

        Args:
            owners: The owner of each chunk.
            children: By their parent.
            missing_since: Gets the time since when each missing parent is missing.
        """
        if not children:
            return 0
        parents = list(children)
        by_owner: defaultdict[str, list[VariantKey]] = defaultdict(list)
        for parent, owner in zip(
            parents, owners.owners([one.chunk for one in parents]), strict=True
        ):
            by_owner[owner].append(parent)
        orphans: list[VariantKey] = []
        for owner, asked in by_owner.items():
            misses = self._misses(owner, asked)
            if misses is None:
                before = self._missing_since
                missing_since |= {parent: before[parent] for parent in asked if parent in before}
                continue
            for parent, miss in zip(asked, misses, strict=True):
                if miss is not None and self._is_gone(parent, miss, missing_since):
                    orphans += children[parent]
        return self._store.deletes.discard_orphans(orphans) if orphans else 0

    def _misses(self, owner: str, parents: Sequence[VariantKey]) -> Sequence[Miss | None] | None:
        """Ask the owner of parents. Return None if it does not answer."""
        if owner == self._own:
            return self._store.reads.find_misses(parents)
        try:
            return self._ask(owner, parents)
        except RagCacheError as error:
            log.info("orphan collector: shard does not answer shard=%s error=%s", owner, error)
            return None

    def _is_gone(
        self, parent: VariantKey, miss: Miss, missing_since: dict[VariantKey, float]
    ) -> bool:
        if miss in _GONE:
            return True
        now = self._clock()
        since = missing_since[parent] = self._missing_since.get(parent, now)
        return now - since >= MISSING_PARENT_S

    def _run(self) -> None:
        wait_s = IDLE_INTERVAL_S
        while not self._stop.wait(wait_s):
            began, num_dropped = time.monotonic(), 0
            try:
                num_dropped = self.scan()
            except Exception:
                log.exception("orphan collector: scan failed")
            if num_dropped:
                log.info("orphan collector: dropped variants count=%d", num_dropped)
            interval_s = BUSY_INTERVAL_S if num_dropped else IDLE_INTERVAL_S
            wait_s = max(interval_s, (time.monotonic() - began) / MAX_TIME_SHARE)
