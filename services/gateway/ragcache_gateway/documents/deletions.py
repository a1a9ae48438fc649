"""Delivers deletes to every shard of the cache store until each has acknowledged them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ragcache_core.errors import InvalidInput, RagCacheError
from ragcache_core.identity.keys import ChunkKey
from ragcache_core.store_api import ID_BYTES, Deletion
from ragcache_gateway.status.metrics import Metrics
from ragcache_kv.store_client.async_sharded import AsyncShardedStore
from ragcache_kv.store_client.client import SERVICE

log = logging.getLogger(__name__)

MAX_UNDELIVERED = 4096
"""Most deletes in the queue, which bounds their memory to about 8 MiB."""

RETRY_S = 2.0
"""Wait after a shard's first failure. It doubles with each failure that follows."""

MAX_RETRY_S = 30.0

ANSWER_WAIT_S = 1.0
"""How long a caller waits for the other shards after one has acknowledged."""

SHARD_RESET_AFTER_MS = 24 * 3600 * 1000
"""A shard that was away for longer starts empty, so that it needs no deletes from before."""


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000


@dataclass(slots=True, eq=False)
class _UndeliveredDelete:
    """A delete that a shard has not acknowledged.

    Args:
        undelivered: Shards that still have to acknowledge it.
        awaited: Those of them that may answer at once; the caller waits for them.
        delivered: Shards that need it no more.
        acknowledged: Whether a shard has acknowledged it.
        removed: How many variants the shards have removed.
        changed: Set when the caller should check again.
    """

    deletion: Deletion
    undelivered: set[str] = field(default_factory=set)
    awaited: set[str] = field(default_factory=set)
    delivered: set[str] = field(default_factory=set)
    acknowledged: bool = False
    removed: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def stop_awaiting(self, address: str) -> None:
        """End the caller's wait for this shard."""
        self.awaited.discard(address)
        self.changed.set()

    def mark_delivered(self, address: str) -> None:
        """Record that this shard needs the delete no more."""
        self.undelivered.discard(address)
        self.delivered.add(address)
        self.stop_awaiting(address)


class _ShardQueue:
    """Deletes for one shard, oldest first, and the task that sends them."""

    def __init__(self) -> None:
        self.waiting: deque[_UndeliveredDelete] = deque()
        self.added = asyncio.Event()
        self.failing = False
        self.task: asyncio.Task[None] | None = None


class DeletionDelivery:
    """Makes deletes and sends them to each shard, in the order in which they were made.

    A caller gets its answer when every shard has acknowledged, when one has and ANSWER_WAIT_S is
    over, or when none can answer. A background task sends the delete to the other shards, under the
    same id, until they acknowledge it or are members no more. Shards also tell each other of
    deletes that one of them has acknowledged.

    If the gateway stops before one shard has acknowledged, the named variants stay stored until
    the store evicts them. No prompt can name them, because the retriever has deleted their text.

    Args:
        max_undelivered: Most deletes in the queue.
        answer_wait_s: How long a caller waits for the other shards after one has acknowledged.
        now_ms: Returns the Unix time.
    """

    def __init__(
        self,
        store: AsyncShardedStore,
        metrics: Metrics,
        *,
        max_undelivered: int = MAX_UNDELIVERED,
        retry_s: float = RETRY_S,
        answer_wait_s: float = ANSWER_WAIT_S,
        now_ms: Callable[[], int] = _unix_ms,
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._max_undelivered = max_undelivered
        self._retry_s = retry_s
        self._answer_wait_s = answer_wait_s
        self._now_ms = now_ms
        self._undelivered: dict[bytes, _UndeliveredDelete] = {}
        self._queues: dict[str, _ShardQueue] = {}
        self._added = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Follow the members of the store from now on."""
        self._task = asyncio.create_task(self._follow_members(), name="deletions")

    async def close(self) -> None:
        """Stop every task; what is not delivered is lost."""
        tasks = [queue.task for queue in self._queues.values() if queue.task is not None]
        tasks += [self._task] if self._task is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.num_undelivered:
            log.warning(
                "deletes: stopped before every shard had acknowledged undelivered=%d "
                "unacknowledged=%d",
                self.num_undelivered,
                self.num_unacknowledged,
            )

    @property
    def num_unacknowledged(self) -> int:
        """How many deletes no shard has acknowledged."""
        return sum([not delete.acknowledged for delete in self._undelivered.values()])

    @property
    def num_undelivered(self) -> int:
        """How many deletes at least one shard has not acknowledged."""
        return len(self._undelivered)

    async def delete(
        self,
        *,
        chunks: Sequence[ChunkKey] = (),
        documents: Sequence[str] = (),
        domain: str = "",
    ) -> int | None:
        """Delete now.

        Args:
            domain: Access domain of the documents. A domain without documents would delete
                everything in it.

        Returns:
            How many variants the store had; None if no shard has acknowledged yet.
        """
        assert bool(documents) == bool(domain)
        deletion = Deletion(
            id=secrets.token_bytes(ID_BYTES),
            chunks=tuple(chunks),
            documents=tuple(documents),
            domain=domain,
        )
        delete = _UndeliveredDelete(deletion)
        self._make_room()
        self._undelivered[deletion.id] = delete
        self._enqueue(delete)
        await self._wait_for_answers(delete)
        self._drop_if_delivered(delete)
        self._added.set()
        if not delete.acknowledged:
            log.warning("deletes: no shard has acknowledged yet chunks=%d", len(deletion.chunks))
            return None
        return delete.removed

    async def _wait_for_answers(self, delete: _UndeliveredDelete) -> None:
        """Wait until each awaited shard has answered, or one has and the wait is over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._answer_wait_s
        while delete.awaited:
            left_s = deadline - loop.time()
            if delete.acknowledged and left_s <= 0:
                return
            delete.changed.clear()
            try:
                async with asyncio.timeout(left_s if delete.acknowledged else None):
                    await delete.changed.wait()
            except TimeoutError:
                return

    def _enqueue(self, delete: _UndeliveredDelete) -> None:
        """Add the delete to the queue of each shard that does not have it."""
        for address in self._store.addresses():
            if address in delete.undelivered or address in delete.delivered:
                continue
            queue = self._queues.get(address)
            if queue is None:
                queue = self._queues[address] = _ShardQueue()
                queue.task = asyncio.create_task(self._deliver(address, queue), name=address)
            delete.undelivered.add(address)
            if not queue.failing:
                delete.awaited.add(address)
            queue.waiting.append(delete)
            queue.added.set()

    async def _deliver(self, address: str, queue: _ShardQueue) -> None:
        """Send deletes to one shard, with a wait after each failure."""
        wait_s = 0.0
        while True:
            if not queue.waiting:
                queue.added.clear()
                await queue.added.wait()
            delete = queue.waiting[0]
            try:
                await self._send(address, delete)
            except Exception as error:
                self._record_failure(address, queue, error)
                wait_s = min(max(2 * wait_s, self._retry_s), MAX_RETRY_S)
                await asyncio.sleep(wait_s)
                continue
            queue.failing, wait_s = False, 0.0
            if queue.waiting and queue.waiting[0] is delete:  # else _make_room has dropped it
                queue.waiting.popleft()
            self._drop_if_delivered(delete)

    def _record_failure(self, address: str, queue: _ShardQueue, error: Exception) -> None:
        self._metrics.upstream_failures.labels(SERVICE).inc()
        if not queue.failing:
            log.warning(
                "deletes: shard has not acknowledged shard=%s error=%s",
                address,
                error,
                exc_info=None if isinstance(error, RagCacheError) else error,
            )
        queue.failing = True
        for delete in queue.waiting:  # the first one is sent again before they are
            delete.stop_awaiting(address)

    async def _send(self, address: str, delete: _UndeliveredDelete) -> None:
        now_ms = self._now_ms()
        if delete.acknowledged:
            if now_ms - delete.deletion.made_at_ms > SHARD_RESET_AFTER_MS:
                delete.mark_delivered(address)
                return
        else:
            # The time of a delete is the one when it first reaches a shard.
            delete.deletion = replace(delete.deletion, made_at_ms=now_ms)
        try:
            removed = await self._store.delete_on(address, delete.deletion)
        except InvalidInput as error:
            log.error("deletes: shard refused shard=%s error=%s", address, error)  # noqa: TRY400
        else:
            delete.acknowledged = True
            delete.removed += removed
        delete.mark_delivered(address)

    def _drop_if_delivered(self, delete: _UndeliveredDelete) -> None:
        """Drop a delete once every shard has acknowledged it or left."""
        if not delete.undelivered and delete.delivered:
            known = self._undelivered.pop(delete.deletion.id, None)
            if known is not None and not delete.acknowledged:
                self._record_loss(delete, "the store refused it")
        self._metrics.deletes_waiting.set(self.num_unacknowledged)

    def _make_room(self) -> None:
        while len(self._undelivered) >= self._max_undelivered:
            # The other shards learn of an acknowledged delete from the shard that has it.
            acknowledged = (d for d in self._undelivered.values() if d.acknowledged)
            oldest = next(acknowledged, None) or next(iter(self._undelivered.values()))
            del self._undelivered[oldest.deletion.id]
            for address in tuple(oldest.undelivered):
                self._queues[address].waiting.remove(oldest)
                oldest.mark_delivered(address)
            if not oldest.acknowledged:
                self._record_loss(oldest, "the queue is full")

    def _record_loss(self, delete: _UndeliveredDelete, reason: str) -> None:
        self._metrics.deletes_lost.inc()
        log.error(
            "deletes: delete abandoned, the store evicts the variants instead chunks=%d "
            "documents=%d reason=%s",
            len(delete.deletion.chunks),
            len(delete.deletion.documents),
            reason,
        )

    async def _follow_members(self) -> None:
        """Forget shards that have left; send unacknowledged deletes to new ones."""
        while True:
            await self._added.wait()
            await asyncio.sleep(self._retry_s)
            addresses = self._store.addresses()
            for address in self._queues.keys() - set(addresses):
                self._remove_shard(address)
            for delete in tuple(self._undelivered.values()):
                if not delete.acknowledged:
                    self._enqueue(delete)
            if not self._undelivered:
                self._added.clear()

    def _remove_shard(self, address: str) -> None:
        queue = self._queues.pop(address)
        if queue.task is not None:
            queue.task.cancel()
        for delete in queue.waiting:
            delete.undelivered.discard(address)
            delete.stop_awaiting(address)
            if delete.acknowledged:
                self._drop_if_delivered(delete)
