"""One shard of the cache store: its client, and whether it answers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_kv.store_client.client import LOOKUP_TIMEOUT_S, SERVICE, StoreClient
from ragcache_wire.status import NoAnswer

log = logging.getLogger("ragcache.store")

RETRY_S = 1.0
"""Time between two attempts to reach a lost shard."""


class Shard:
    """A shard, and what the client knows of it.

    Attributes:
        address: "host:port".
        client: Its client.
        num_users: Calls that need its channel open.
        outstanding_bytes: Size of the values that were requested from it and have not arrived.
        is_removed: Whether it is no member any more.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.client = StoreClient(address)
        self.num_users = 0
        self.outstanding_bytes = 0
        self.is_removed = False
        self._lock = threading.Lock()
        self._lost = False
        self._checking = False
        self._closed = threading.Event()

    @property
    def is_available(self) -> bool:
        """Whether calls may use it. A lost shard gets no calls, so that none waits for it."""
        return not self._lost

    def note_failure(self, error: RagCacheError, timeout_s: float) -> None:
        """Record a failed call.

        After a call without an answer the shard is lost, and probed in the background until it
        answers. If the call had less than RETRY_S, the shard is only probed.

        Args:
            error: The error of the call.
            timeout_s: The time that the call had.
        """
        if not isinstance(error, NoAnswer):
            log.warning("shard %s: call failed error=%s", self.address, error)
        elif timeout_s >= RETRY_S:
            self._mark_lost(error)
        else:
            self._check()

    def close(self) -> None:
        """Close its channel."""
        self._closed.set()
        self.client.close()

    def _mark_lost(self, error: RagCacheError) -> None:
        with self._lock:
            if self._lost or self._closed.is_set():
                return
            self._lost = True
        log.warning("shard %s: lost, its chunks are misses error=%s", self.address, error)
        name = f"probe of {self.address}"
        threading.Thread(target=self._probe_until_it_answers, name=name, daemon=True).start()

    def _check(self) -> None:
        with self._lock:
            if self._lost or self._checking or self._closed.is_set():
                return
            self._checking = True
        name = f"check of {self.address}"
        threading.Thread(target=self._probe_once, name=name, daemon=True).start()

    def _probe_once(self) -> None:
        try:
            self.client.lookup((), LOOKUP_TIMEOUT_S)
        except NoAnswer as error:
            self._mark_lost(error)
        except Exception as error:  # any other error is an answer
            log.warning("shard %s: probe failed error=%s", self.address, error)
        finally:
            self._checking = False

    def _probe_until_it_answers(self) -> None:
        while not self._closed.wait(RETRY_S):
            try:
                self.client.lookup((), LOOKUP_TIMEOUT_S)
            except RagCacheError:
                continue
            except Exception:  # keep probing: no other thread does
                log.exception("shard %s: probe failed", self.address)
                continue
            self._lost = False
            log.info("shard %s: available again", self.address)
            return


def lost_error(shards: Iterable[Shard]) -> Unavailable:
    """Return the error of a call whose shards are all lost."""
    names = sorted({shard.address for shard in shards})
    return Unavailable(SERVICE, f"shard {', '.join(names)} is lost", RETRY_S)
