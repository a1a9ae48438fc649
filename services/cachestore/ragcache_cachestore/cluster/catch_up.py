"""Learns from the other shards what was deleted while this one was away.

A delete is acknowledged when one shard has it for good; those that were dead or cut off hear of it
here. ``__main__`` runs, with members the shards of the store (None: it is the only one) and own its
name among them:

    rejoin = CatchUp(store, members, own)
    await asyncio.to_thread(rejoin.start)  # before it serves values, while it tells its own deletes
    rejoin.close()                         # before the store is closed

``start`` asks until every peer has answered, so that shards that start together hear each other, or
until FIRST_PULL_S are over: a peer that is gone must not keep the others from serving. A store that
holds nothing has nothing to lose and asks once. From then on a thread asks every peer again now and
then: a shard that was frozen or cut off without ever restarting has missed deletes, too, and a peer
that was away at the start has some to tell.

A peer that was not heard for AWAY_MS may have forgotten what it would have told, since deletes
are remembered for a day: then everything held here is dropped. When it was heard is not kept over a
restart; a store that was itself away for so long starts empty.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from ragcache_cachestore.state.tombstones import AWAY_MS
from ragcache_core.errors import RagCacheError
from ragcache_core.identity.keys import VariantKey
from ragcache_core.store_api import Deletion, Event
from ragcache_kv.store_client.client import StoreClient
from ragcache_wire.watched.members import Members

log = logging.getLogger(__name__)

FIRST_PULL_S = 30.0
"""How long a start may wait for its peers, all of them at once; who is silent is asked later."""

ASK_AGAIN_S = 0.25
"""Between two tries of a peer at the start."""

IDLE_S = 5.0
"""How long a peer may leave us waiting for the next delete."""

PULL_EVERY_S = 10.0
PULL_EVERY_AT_FIRST_S = 1.0
AT_FIRST_S = 10.0
"""How long after the start peers are asked more often: some start at the same time."""

OVERLAP_MS = 600_000
"""How much of what a peer told before it is asked again: clocks differ."""

BATCH = 256
"""Deletions that are applied at once, with one wait for the disk."""


class DeletingStore(Protocol):
    """What this needs of a store."""

    def __len__(self) -> int:
        """Variants held."""

    def delete_many(self, batch: Sequence[Deletion]) -> int:
        """Apply deletions, durably; those whose id was applied before do nothing."""

    def snapshot(self) -> tuple[int, list[Event]]:
        """What is held, an event each."""

    def discard(self, key: VariantKey) -> bool:
        """Drop a variant as eviction does."""


class _CannotApply(Exception):
    """This store could not do what a peer told: no fault of the peer's."""


@dataclass(slots=True)
class _Told:
    """How many deletions a peer told of, and how many variants they removed here."""

    deletions: int = 0
    removed: int = 0


class CatchUp:
    """Pulls tombstones; safe to close from any thread.

    progress: told how far the start has come. now_ms: Unix time in milliseconds. first_pull_s: see
    FIRST_PULL_S. idle_s: see IDLE_S.
    """

    def __init__(
        self,
        store: DeletingStore,
        members: Members | None,
        own: str,
        *,
        progress: Callable[[str], None] = lambda _: None,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        first_pull_s: float = FIRST_PULL_S,
        idle_s: float = IDLE_S,
        pull_every_s: float = PULL_EVERY_S,
    ) -> None:
        self._store = store
        self._members = members
        self._own = own
        self._progress = progress
        self._now_ms = now_ms
        self._first_pull_s = first_pull_s
        self._idle_s = idle_s
        self._pull_every_s = pull_every_s
        self._heard_ms: dict[str, int] = {}
        self._since_ms: dict[str, int] = {}
        self._silent: set[str] = set()
        self._refused = False
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(8, "rejoin")
        self._thread = threading.Thread(target=self._keep_pulling, name="rejoin", daemon=True)

    def start(self) -> None:
        """Ask every peer, then go on in the background.

        Returns when all have answered, or some are silent for too long. While this store cannot
        apply what it hears it does not return before close: it would serve what is deleted.
        """
        if self._members is None:
            return
        deadline = time.monotonic() + self._first_pull_s
        heard: set[str] = set()
        while not self._stop.is_set():
            peers = set(self._peers())
            self._progress(
                "asking the other shards what was deleted: "
                f"{len(heard & peers)} of {len(peers)} have answered"
            )
            answered, applied = self._pull(peers - heard)
            heard |= answered
            over = time.monotonic() >= deadline or not len(self._store)
            if applied and (over or peers <= heard):
                break
            if not applied:
                self._progress("what the other shards have deleted cannot be applied")
            self._stop.wait(ASK_AGAIN_S)
        if self._silent:
            log.warning("starting without word from %s", ", ".join(sorted(self._silent)))
        if not self._stop.is_set():
            self._thread.start()

    def close(self) -> None:
        """Ask no more; returns when nothing is being applied."""
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._thread.is_alive():
            self._thread.join()

    def _keep_pulling(self) -> None:
        began = time.monotonic()
        while True:
            first = time.monotonic() < began + AT_FIRST_S
            every_s = min(self._pull_every_s, PULL_EVERY_AT_FIRST_S if first else float("inf"))
            if self._stop.wait(every_s):
                return
            try:
                self._drop_if_deaf()
                self._pull(self._peers())
            except Exception:
                if not self._stop.is_set():
                    log.exception("peers could not be asked for their deletes")

    def _peers(self) -> list[str]:
        """The other shards; what was known of those that are none any more is forgotten."""
        assert self._members is not None
        peers = [name for name in self._members.current() if name != self._own]
        for gone in self._since_ms.keys() - set(peers):
            del self._since_ms[gone]
            self._heard_ms.pop(gone, None)
        self._silent &= set(peers)
        now_ms = self._now_ms()
        for peer in peers:
            self._heard_ms.setdefault(peer, now_ms)
        return peers

    def _drop_if_deaf(self) -> None:
        """Drop everything if a peer was silent for so long that it may forget what it knows."""
        now_ms = self._now_ms()
        deaf = [
            peer
            for peer in self._peers()
            if peer in self._silent and now_ms - self._heard_ms[peer] > AWAY_MS
        ]
        if not deaf:
            return
        log.error("everything is dropped: no word of deletes for a day from %s", ", ".join(deaf))
        for event in self._store.snapshot()[1]:
            if event.key is not None:
                self._store.discard(event.key)
        for peer in deaf:
            self._heard_ms[peer] = now_ms

    def _pull(self, peers: Iterable[str]) -> tuple[set[str], bool]:
        """Ask peers at once; those that answered, and whether all that they told was applied."""
        new = {peer for peer in peers if peer not in self._since_ms} | self._silent
        asked = [(peer, self._pool.submit(self._pull_from, peer)) for peer in peers]
        answered: set[str] = set()
        applied = True
        for peer, answer in asked:
            try:
                told = answer.result()
            except _CannotApply as error:
                if not self._refused:  # it is tried again and again, and needs no trace
                    log.error("peer %s: its deletes cannot be applied: %s", peer, error)  # noqa: TRY400
                applied = False
                continue
            except RagCacheError as error:
                if peer not in self._silent:
                    log.info("peer %s did not tell its deletes: %s", peer, error)
                self._silent.add(peer)
                continue
            answered.add(peer)
            self._silent.discard(peer)
            if peer in new or told.removed:
                log.info(
                    "peer %s told of %d deletes, which removed %d variants here",
                    peer,
                    told.deletions,
                    told.removed,
                )
        self._refused = not applied
        return answered, applied

    def _pull_from(self, peer: str) -> _Told:
        """Apply what a peer knows, as it comes.

        Raises RagCacheError if the peer falls silent, _CannotApply if this store fails.
        """
        began_ms = self._now_ms()
        since_ms = max(0, self._since_ms.get(peer, 0) - OVERLAP_MS)
        told = _Told()
        client = StoreClient(peer)
        try:
            deletions = client.tombstones(since_ms, self._idle_s)
            while batch := list(islice(deletions, BATCH)):
                if self._stop.is_set():
                    return told
                try:
                    told.removed += self._store.delete_many(batch)
                except RagCacheError as error:
                    raise _CannotApply(str(error)) from error
                told.deletions += len(batch)
        finally:
            client.close()
        self._since_ms[peer] = self._heard_ms[peer] = began_ms
        return told
