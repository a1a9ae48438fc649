"""Deletes for the cache store, told to every shard until it acknowledges them."""

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
from ragcache_kv.store_client.client import PART
from ragcache_kv.store_client.sharded import AsyncShardedStore

log = logging.getLogger(__name__)

MAX_WAITING = 4096
"""Deletes that are kept at most, which bounds their memory to about 8 MiB."""

RETRY_S = 2.0
"""Pause after a shard's first silence; it doubles with each that follows, up to MOST_RETRY_S."""

MOST_RETRY_S = 30.0

PATIENCE_S = 1.0
"""How long a caller waits for the other shards when one has acknowledged."""

FORGOTTEN_AFTER_MS = 24 * 3600 * 1000
"""A shard that was away for longer starts empty, so that it need not be told."""


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000


@dataclass(slots=True, eq=False)
class _Pending:
    """A delete that somebody has not acknowledged.

    owed: shards that are still to be told. hoped: those of them that may answer at once, for whom
    the caller waits. told: those that need not be told any more.
    """

    deletion: Deletion
    owed: set[str] = field(default_factory=set)
    hoped: set[str] = field(default_factory=set)
    told: set[str] = field(default_factory=set)
    acknowledged: bool = False
    removed: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def hope_no_more(self, address: str) -> None:
        """The caller need not wait for this shard."""
        self.hoped.discard(address)
        self.changed.set()

    def settle(self, address: str) -> None:
        """This shard need not be told any more."""
        self.owed.discard(address)
        self.told.add(address)
        self.hope_no_more(address)


class _Line:
    """Deletes that one shard is to be told, oldest first, and the task that tells it."""

    def __init__(self) -> None:
        self.waiting: deque[_Pending] = deque()
        self.came = asyncio.Event()
        self.silent = False
        self.task: asyncio.Task[None] | None = None


class Deletions:
    """Makes deletes and sees them through, in the order in which they were made.

    A caller is answered when every shard has acknowledged, or one of them and PATIENCE_S are over,
    or none can. Who was silent is told in the background, under the same id, until it acknowledges
    or is no member any more. Should the gateway end before one shard has acknowledged, what a
    delete names stays stored until it is evicted; no prompt names it again, because the retriever
    has forgotten its text. Shards tell each other, too, of what one has acknowledged.
    """

    def __init__(
        self,
        store: AsyncShardedStore,
        metrics: Metrics,
        *,
        most: int = MAX_WAITING,
        retry_s: float = RETRY_S,
        patience_s: float = PATIENCE_S,
        now_ms: Callable[[], int] = _unix_ms,
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._most = most
        self._retry_s = retry_s
        self._patience_s = patience_s
        self._now_ms = now_ms
        self._pending: dict[bytes, _Pending] = {}
        self._lines: dict[str, _Line] = {}
        self._came = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Follow the members of the store, from now on."""
        self._task = asyncio.create_task(self._follow(), name="deletions")

    async def close(self) -> None:
        """Try no more."""
        tasks = [line.task for line in self._lines.values() if line.task is not None]
        tasks += [self._task] if self._task is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.owed:
            log.warning(
                "%d deletes were not acknowledged by every shard, %d of them by none",
                self.owed,
                self.waiting,
            )

    @property
    def waiting(self) -> int:
        """How many deletes no shard has acknowledged."""
        return sum([not pending.acknowledged for pending in self._pending.values()])

    @property
    def owed(self) -> int:
        """How many deletes a shard has not acknowledged."""
        return len(self._pending)

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
        pending = _Pending(deletion)
        self._make_room()
        self._pending[deletion.id] = pending
        self._tell(pending)
        await self._first_answers(pending)
        self._note(pending)
        self._came.set()
        if not pending.acknowledged:
            log.warning("a delete waits until a shard acknowledges it")
            return None
        return pending.removed

    async def _first_answers(self, pending: _Pending) -> None:
        """Return when every shard that may answer at once has, or one and patience is over."""
        loop = asyncio.get_running_loop()
        patient_until = loop.time() + self._patience_s
        while pending.hoped:
            left_s = patient_until - loop.time()
            if pending.acknowledged and left_s <= 0:
                return
            pending.changed.clear()
            try:
                async with asyncio.timeout(left_s if pending.acknowledged else None):
                    await pending.changed.wait()
            except TimeoutError:
                return

    def _tell(self, pending: _Pending) -> None:
        """Have every shard told that has not been."""
        for address in self._store.addresses():
            if address in pending.owed or address in pending.told:
                continue
            line = self._lines.get(address)
            if line is None:
                line = self._lines[address] = _Line()
                line.task = asyncio.create_task(self._serve(address, line), name=address)
            pending.owed.add(address)
            if not line.silent:
                pending.hoped.add(address)
            line.waiting.append(pending)
            line.came.set()

    async def _serve(self, address: str, line: _Line) -> None:
        """Tell one shard, and leave it alone for a while whenever it is silent."""
        pause_s = 0.0
        while True:
            if not line.waiting:
                line.came.clear()
                await line.came.wait()
            pending = line.waiting[0]
            try:
                await self._try(address, pending)
            except Exception as error:
                self._metrics.upstream_failures.labels(PART).inc()
                if not line.silent:
                    log.warning(
                        "shard %s has not acknowledged a delete: %s",
                        address,
                        error,
                        exc_info=None if isinstance(error, RagCacheError) else error,
                    )
                line.silent = True
                for one in line.waiting:  # it is asked again before they are
                    one.hope_no_more(address)
                pause_s = min(max(2 * pause_s, self._retry_s), MOST_RETRY_S)
                await asyncio.sleep(pause_s)
                continue
            line.silent, pause_s = False, 0.0
            if line.waiting and line.waiting[0] is pending:  # else it was given up meanwhile
                line.waiting.popleft()
            self._note(pending)

    async def _try(self, address: str, pending: _Pending) -> None:
        now_ms = self._now_ms()
        if pending.acknowledged:
            if now_ms - pending.deletion.made_at_ms > FORGOTTEN_AFTER_MS:
                pending.settle(address)
                return
        else:
            # It counts from when a shard first hears of it.
            pending.deletion = replace(pending.deletion, made_at_ms=now_ms)
        try:
            removed = await self._store.delete_on(address, pending.deletion)
        except InvalidInput as error:
            log.error("shard %s refuses a delete: %s", address, error)  # noqa: TRY400
        else:
            pending.acknowledged = True
            pending.removed += removed
        pending.settle(address)

    def _note(self, pending: _Pending) -> None:
        """Forget a delete that nobody is owed any more."""
        if not pending.owed and pending.told:
            known = self._pending.pop(pending.deletion.id, None)
            if known is not None and not pending.acknowledged:
                self._lose(pending, "the store refuses it")
        self._metrics.deletes_waiting.set(self.waiting)

    def _make_room(self) -> None:
        while len(self._pending) >= self._most:
            # Of one that a shard has acknowledged the others hear from that one.
            heard = (pending for pending in self._pending.values() if pending.acknowledged)
            oldest = next(heard, None) or next(iter(self._pending.values()))
            del self._pending[oldest.deletion.id]
            for address in tuple(oldest.owed):
                self._lines[address].waiting.remove(oldest)
                oldest.settle(address)
            if not oldest.acknowledged:
                self._lose(oldest, "too many wait")

    def _lose(self, pending: _Pending, reason: str) -> None:
        self._metrics.deletes_lost.inc()
        log.error(
            "a delete of %d chunks and %d documents is given up (%s): the store evicts them "
            "when nobody asks for them",
            len(pending.deletion.chunks),
            len(pending.deletion.documents),
            reason,
        )

    async def _follow(self) -> None:
        """Forget shards that left, and tell new ones what nobody has acknowledged."""
        while True:
            await self._came.wait()
            await asyncio.sleep(self._retry_s)
            addresses = self._store.addresses()
            for address in self._lines.keys() - set(addresses):
                line = self._lines.pop(address)
                if line.task is not None:
                    line.task.cancel()
                for pending in line.waiting:
                    pending.owed.discard(address)
                    pending.hope_no_more(address)
                    if pending.acknowledged:
                        self._note(pending)
            for pending in tuple(self._pending.values()):
                if not pending.acknowledged:
                    self._tell(pending)
            if not self._pending:
                self._came.clear()
