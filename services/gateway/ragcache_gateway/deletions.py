"""Deletes for the cache store, tried again until a shard acknowledges them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from ragcache_core.errors import InvalidInput, RagCacheError
from ragcache_core.keys import ChunkKey
from ragcache_core.storing import ID_BYTES, Deletion
from ragcache_gateway.metrics import Metrics
from ragcache_kv.store.client import PART
from ragcache_kv.store.sharded import AsyncShardedStore

log = logging.getLogger(__name__)

MAX_WAITING = 4096
"""Deletes that wait at most, which bounds their memory to about 8 MiB."""

RETRY_S = 2.0


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000


class Deletions:
    """Makes deletes and sees them through.

    One that no shard acknowledges waits in memory and is tried again in the background. Should the
    gateway end before, what it names stays stored until it is evicted; no prompt names it again,
    because the retriever has forgotten its text. Shards that miss a delete which another one has
    acknowledged hear of it from that one.
    """

    def __init__(
        self,
        store: AsyncShardedStore,
        metrics: Metrics,
        *,
        most: int = MAX_WAITING,
        retry_s: float = RETRY_S,
        now_ms: Callable[[], int] = _unix_ms,
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._most = most
        self._retry_s = retry_s
        self._now_ms = now_ms
        self._waiting: deque[Deletion] = deque()
        self._came = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Try again what waits, from now on."""
        self._task = asyncio.create_task(self._keep_trying(), name="deletions")

    async def close(self) -> None:
        """Try no more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._waiting:
            log.warning("%d deletes were not acknowledged by any shard", len(self._waiting))

    @property
    def waiting(self) -> int:
        """How many deletes no shard has acknowledged."""
        return len(self._waiting)

    async def delete(
        self,
        *,
        chunks: Sequence[ChunkKey] = (),
        documents: Sequence[str] = (),
        domain: str = "",
    ) -> int | None:
        """Delete now; returns how many variants there were, None if it has to wait.

        domain: of documents; a domain without documents would delete all that is in it.
        """
        assert bool(documents) == bool(domain)
        deletion = Deletion(
            id=secrets.token_bytes(ID_BYTES),
            chunks=tuple(chunks),
            documents=tuple(documents),
            domain=domain,
        )
        try:
            return await self._try(deletion)
        except RagCacheError as error:
            self._metrics.upstream_failures.labels(PART).inc()
            log.warning("a delete waits until a shard acknowledges it: %s", error)
            self._wait(deletion)
            return None

    async def _try(self, deletion: Deletion) -> int:
        # Shards ask each other for recent deletes: it counts when one first hears of it.
        result = await self._store.delete(replace(deletion, made_at_ms=self._now_ms()))
        for shard, problem in result.silent.items():
            self._metrics.upstream_failures.labels(PART).inc()
            log.info("shard %s will hear of a delete from its peers: %s", shard, problem)
        return result.removed

    def _wait(self, deletion: Deletion) -> None:
        if len(self._waiting) >= self._most:
            self._give_up(self._waiting.popleft(), "too many wait")
        self._waiting.append(deletion)
        self._metrics.deletes_waiting.set(len(self._waiting))
        self._came.set()

    def _give_up(self, deletion: Deletion, reason: str) -> None:
        self._metrics.deletes_lost.inc()
        log.error(
            "a delete of %d chunks and %d documents is given up (%s): the store evicts them "
            "when nobody asks for them",
            len(deletion.chunks),
            len(deletion.documents),
            reason,
        )

    async def _keep_trying(self) -> None:
        while True:
            await self._came.wait()
            await asyncio.sleep(self._retry_s)
            await self._try_waiting()
            if not self._waiting:
                self._came.clear()

    async def _try_waiting(self) -> None:
        """Oldest first, up to the first that still has to wait."""
        while self._waiting:
            deletion = self._waiting[0]
            try:
                await self._try(deletion)
            except InvalidInput as error:
                self._give_up(deletion, str(error))
            except RagCacheError:
                return
            else:
                log.info("a delete that waited is acknowledged")
            # While this waited, the oldest may have been given up for a newer one.
            with contextlib.suppress(ValueError):
                self._waiting.remove(deletion)
            self._metrics.deletes_waiting.set(len(self._waiting))
