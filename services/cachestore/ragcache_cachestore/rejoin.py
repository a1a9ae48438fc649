"""Learns from the other shards what was deleted while this one was away.

A delete is acknowledged when one shard has it for good; those that were dead or cut off hear of it
here. ``__main__`` runs, with members the shards of the store (None: it is the only one) and own its
name among them:

    rejoin = Rejoin(store, members, own)
    await asyncio.to_thread(rejoin.start)  # before it says ready; waits FIRST_PULL_S at most
    rejoin.close()                         # before the store is closed

From then on a thread asks every peer again now and then: a shard that was frozen or cut off without
ever restarting has missed deletes, too, and a peer that was away at the start has some to tell.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from ragcache_core.errors import RagCacheError
from ragcache_core.storing import Deletion
from ragcache_kv.store.client import StoreClient
from ragcache_wire.members import Members

log = logging.getLogger(__name__)

FIRST_PULL_S = 5.0
"""How long a start may wait for its peers, all of them at once; who is silent is asked later."""

PULL_EVERY_S = 10.0
OVERLAP_MS = 600_000
"""How much of what a peer told before it is asked again: it may have learned it late itself."""


class DeletingStore(Protocol):
    """What this needs of a store."""

    def delete(self, deletion: Deletion) -> int:
        """Apply a deletion, durably; nothing if its id was applied before."""


@dataclass(frozen=True, slots=True)
class _Told:
    """How many deletions a peer told of, and how many variants they removed here."""

    deletions: int
    removed: int


class Rejoin:
    """Pulls tombstones; safe to close from any thread.

    now_ms: Unix time in milliseconds.
    """

    def __init__(
        self,
        store: DeletingStore,
        members: Members | None,
        own: str,
        *,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        pull_every_s: float = PULL_EVERY_S,
    ) -> None:
        self._store = store
        self._members = members
        self._own = own
        self._now_ms = now_ms
        self._pull_every_s = pull_every_s
        self._heard_ms: dict[str, int] = {}
        self._silent: set[str] = set()
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(8, "rejoin")
        self._thread = threading.Thread(target=self._keep_pulling, name="rejoin", daemon=True)

    def start(self) -> None:
        """Ask every peer once, then go on in the background."""
        if self._members is None:
            return
        self._pull(FIRST_PULL_S)
        self._thread.start()

    def close(self) -> None:
        """Ask no more; returns when nothing is being applied."""
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._thread.is_alive():
            self._thread.join()

    def _keep_pulling(self) -> None:
        while not self._stop.wait(self._pull_every_s):
            try:
                self._pull(FIRST_PULL_S)
            except Exception:
                if not self._stop.is_set():
                    log.exception("peers could not be asked for their deletes")

    def _pull(self, timeout_s: float) -> None:
        assert self._members is not None
        addresses = [name for name in self._members.current() if name != self._own]
        for gone in self._heard_ms.keys() - set(addresses):
            del self._heard_ms[gone]
        self._silent &= set(addresses)
        new = set(addresses) - self._heard_ms.keys() | self._silent
        asked = [
            (address, self._pool.submit(self._pull_from, address, timeout_s))
            for address in addresses
        ]
        for address, answer in asked:
            try:
                told = answer.result()
            except RagCacheError as error:
                if address not in self._silent:
                    log.info("peer %s did not tell its deletes: %s", address, error)
                self._silent.add(address)
                continue
            self._silent.discard(address)
            if address in new or told.removed:
                log.info(
                    "peer %s told of %d deletes, which removed %d variants here",
                    address,
                    told.deletions,
                    told.removed,
                )

    def _pull_from(self, address: str, timeout_s: float) -> _Told:
        """Apply what a peer knows. Raises RagCacheError if it does not answer in time."""
        began_ms = self._now_ms()
        since_ms = max(0, self._heard_ms.get(address, 0) - OVERLAP_MS)
        client = StoreClient(address)
        try:
            deletions = client.tombstones(since_ms, timeout_s)
        finally:
            client.close()
        removed = 0
        for deletion in deletions:
            if self._stop.is_set():
                break
            removed += self._store.delete(deletion)
        else:
            self._heard_ms[address] = began_ms
        return _Told(len(deletions), removed)
