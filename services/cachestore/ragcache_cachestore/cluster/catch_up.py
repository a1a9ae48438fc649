"""Pulls the deletes that other shards applied while this one was away.

A delete is acknowledged when one shard has written it to disk. Shards that were down or cut off
learn of it here. ``__main__`` runs::

    catch_up = CatchUp(store, members, own)  # members: None if this is the only shard
    await asyncio.to_thread(catch_up.start)  # before it serves values, while it reports its deletes
    catch_up.close()                         # before the store is closed

``start`` asks until every peer has answered, so that shards that start together exchange their
deletes. It stops waiting after ``PullTimes.first_s``, because a peer that is gone must not keep
the others from serving. A store without variants cannot serve a deleted one, so it asks once. From
then on a thread asks every peer at intervals. A shard that was frozen or cut off without a restart
has missed deletes too, and a peer that was away at the start may have some to report.

A peer numbers its deletes. This store keeps, over restarts, up to which number it has applied those
of each data folder, and asks for what came after. So the silence of a peer costs nothing: when the
peer answers again, it has the deletes that came after the number, or it reports that it has
forgotten some of them. Only then this store drops all its variants, because any may be covered.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ragcache_cachestore.store import Store
from ragcache_core.errors import RagCacheError
from ragcache_core.store_api import DeletionBatch
from ragcache_kv.store_client.client import StoreClient
from ragcache_wire.peers.credentials import NO_CREDENTIALS, Credentials
from ragcache_wire.watched.members import Members

log = logging.getLogger(__name__)

RETRY_INTERVAL_S = 0.25
"""Interval of the requests to a peer at the start."""

STARTUP_PULL_INTERVAL_S = 1.0
STARTUP_S = 10.0
"""How long after the start peers are asked more often, because some start at the same time."""


@dataclass(frozen=True, slots=True)
class PullTimes:
    """How long to wait for peers, and how often to ask them.

    Attributes:
        first_s: How long a start waits for its peers, asked in parallel. Silent ones are asked
            again later.
        idle_s: How long a peer may take to send the next delete.
        interval_s: Interval of the requests after the start.
    """

    first_s: float = 30.0
    idle_s: float = 5.0
    interval_s: float = 10.0


class _CannotApply(Exception):
    """This store failed to apply the deletes of a peer."""


@dataclass(slots=True)
class _PullResult:
    """The number of deletions of a peer, and of variants that they removed here."""

    deletions: int = 0
    removed: int = 0


class CatchUp:
    """Pulls tombstones. ``close`` is safe to call from any thread.

    Args:
        members: All shards; None if this is the only one.
        own: Address of this shard.
        progress: Called with the progress of the start.
        credentials: With what the client proves that it belongs to the platform.
    """

    def __init__(
        self,
        store: Store,
        members: Members | None,
        own: str,
        times: PullTimes | None = None,
        *,
        progress: Callable[[str], None] = lambda _: None,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        self._store = store
        self._credentials = credentials
        self._members = members
        self._own = own
        self._progress = progress
        self._times = times or PullTimes()
        self._clients: dict[str, StoreClient] = {}
        self._answered: set[str] = set()
        self._silent: set[str] = set()
        self._apply_failed = False
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(8, "catch-up")
        self._thread = threading.Thread(target=self._keep_pulling, name="catch-up", daemon=True)

    def start(self) -> None:
        """Ask every peer, then go on in the background.

        Returns when all have answered, or some are silent for too long. While this store cannot
        apply the deletes, it does not return before close. It would serve deleted variants.
        """
        if self._members is None:
            return
        deadline = time.monotonic() + self._times.first_s
        answered_once: set[str] = set()
        while not self._stop.is_set():
            peers = set(self._peers())
            self._progress(
                "pulling deletes from the other shards: "
                f"{len(answered_once & peers)} of {len(peers)} have answered"
            )
            answered, applied = self._pull(peers - answered_once)
            answered_once |= answered
            timed_out = time.monotonic() >= deadline or not len(self._store)
            if applied and (timed_out or peers <= answered_once):
                break
            if not applied:
                self._progress("this shard cannot apply the deletes of the other shards")
            self._stop.wait(RETRY_INTERVAL_S)
        if self._silent:
            log.warning(
                "catch-up: starting without the deletes of silent peers peers=%s",
                ",".join(sorted(self._silent)),
            )
        if not self._stop.is_set():
            self._thread.start()

    def close(self) -> None:
        """Stop asking. Returns when no delete is being applied."""
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._thread.is_alive():
            self._thread.join()
        for client in self._clients.values():
            client.close()

    def _keep_pulling(self) -> None:
        began = time.monotonic()
        while True:
            first = time.monotonic() < began + STARTUP_S
            interval_s = min(
                self._times.interval_s, STARTUP_PULL_INTERVAL_S if first else float("inf")
            )
            if self._stop.wait(interval_s):
                return
            try:
                self._pull(self._peers())
            except Exception:
                if not self._stop.is_set():
                    log.exception("catch-up: pull failed")

    def _peers(self) -> list[str]:
        """Return the other shards, and forget those that have left."""
        assert self._members is not None
        peers = [name for name in self._members.current() if name != self._own]
        for gone in self._clients.keys() - set(peers):
            self._clients.pop(gone).close()
        self._silent &= set(peers)
        self._answered &= set(peers)
        return peers

    def _pull(self, peers: Collection[str]) -> tuple[set[str], bool]:
        """Ask peers in parallel.

        Returns the peers that answered, and whether this store has applied every delete.
        """
        for peer in peers:
            if peer not in self._clients:
                self._clients[peer] = StoreClient(peer, credentials=self._credentials)
        asked = [(peer, self._pool.submit(self._pull_from, peer)) for peer in peers]
        answered: set[str] = set()
        applied = True
        for peer, answer in asked:
            try:
                pulled = answer.result()
            except _CannotApply as error:
                if not self._apply_failed:  # logged once, without a stack trace, for many tries
                    log.error("catch-up: cannot apply deletes peer=%s error=%s", peer, error)  # noqa: TRY400
                applied = False
                continue
            except RagCacheError as error:
                if peer not in self._silent:
                    log.info("catch-up: peer is silent peer=%s error=%s", peer, error)
                self._silent.add(peer)
                continue
            answered.add(peer)
            is_first = peer not in self._answered or peer in self._silent
            self._answered.add(peer)
            self._silent.discard(peer)
            if is_first or pulled.removed:
                log.info(
                    "catch-up: applied deletes peer=%s deletes=%d removed_variants=%d",
                    peer,
                    pulled.deletions,
                    pulled.removed,
                )
        self._apply_failed = not applied
        return answered, applied

    def _pull_from(self, peer: str) -> _PullResult:
        """Apply the deletes of one peer as they arrive.

        Raises:
            RagCacheError: The peer does not answer.
            _CannotApply: This store fails.
        """
        pulled = _PullResult()
        batches = self._clients[peer].tombstones(
            self._store.deletes.pull_positions(), self._times.idle_s
        )
        with contextlib.closing(batches):
            for batch in batches:
                if self._stop.is_set():
                    return pulled
                try:
                    pulled.removed += self._apply(peer, batch)
                except RagCacheError as error:
                    raise _CannotApply(str(error)) from error
                pulled.deletions += len(batch.deletions)
        return pulled

    def _apply(self, peer: str, batch: DeletionBatch) -> int:
        """Apply deletes of a peer. Return how many variants that removed."""
        num_removed = 0
        if batch.incomplete:
            num_removed = self._store.deletes.drop_all()
            log.error(
                "catch-up: dropped all variants, because the peer has forgotten deletes that this "
                "shard never pulled peer=%s removed_variants=%d",
                peer,
                num_removed,
            )
        num_removed += self._store.deletes.apply(batch.deletions)
        self._store.deletes.note_pulled(batch.store, batch.sequence)
        return num_removed
