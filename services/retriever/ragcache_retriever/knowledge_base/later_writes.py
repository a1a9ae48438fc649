"""Accepts documents, and writes them later.

A document is accepted when it is in the database (``store.operations``), so that neither a restart
of the retriever nor that of a gateway loses it. A few are worked on at once. The keys whose
documents wait take turns, and none of them takes all workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from ragcache_core.errors import (
    InvalidInput,
    NotFound,
    Overloaded,
    RagCacheError,
    Unavailable,
)
from ragcache_retriever.concurrency.background import FAILURE_PAUSE_S, BackgroundTask
from ragcache_retriever.knowledge_base.collections import CollectionSet
from ragcache_retriever.knowledge_base.ingestion import Ingestion, OperationEnded
from ragcache_retriever.store.operations import (
    ClaimedOperation,
    Operation,
    OperationState,
    OperationTarget,
    pack,
    unpack,
)
from ragcache_retriever.store.records import Document
from ragcache_wire.asking import asker, asking
from ragcache_wire.status import to_status

log = logging.getLogger(__name__)

NUM_WORKERS: Final = 3
MOST_OF_ONE: Final = NUM_WORKERS - 1
"""Documents of one key that are worked on at once."""
MAX_PENDING_BYTES: Final = 1 << 30
"""Of all documents that wait. An owner has at most as many as it leaves free."""
CLAIM_MS: Final = 60_000
"""Time after which another retriever takes over what a killed one was working on."""
RENEW_S: Final = 20.0
POLL_S: Final = 10.0
"""Time between two polls for work of retrievers that have ended, and for what failed for a time."""


class LaterWrites:
    """The operations of one knowledge base."""

    def __init__(self, collections: CollectionSet, ingestion: Ingestion) -> None:
        self._collections = collections
        self._store = collections.store
        self._threads = collections.threads
        self._ingestion = ingestion
        self._has_work = asyncio.Event()
        self._claiming = asyncio.Lock()
        self._in_work: Counter[str] = Counter()  # by key
        self._served: dict[str, int] = {}  # number of the last turn of a key
        self._turns = itertools.count(1)
        self._workers = [BackgroundTask(f"later-writes-{i}", self._run) for i in range(NUM_WORKERS)]

    async def start(self) -> None:
        """Begin with what is pending."""
        if not self._store.database.is_shared:
            await self._threads.write(self._release_all)
        for worker in self._workers:
            worker.start()

    async def stop(self) -> None:
        """End after the transactions that are running. The rest stays pending."""
        for worker in self._workers:
            await worker.stop()

    async def submit(self, owner: str, collection: str, document: Document) -> Operation:
        """Accept a document, durably. It is work of the key that asks (``ragcache_wire.asking``).

        The operation for the same content is returned as it is, unless it has failed or was
        cancelled, or the document has changed since. Then it begins again.

        Args:
            owner: Tenant that may see the operation; empty: callers without a tenant.

        Raises:
            NotFound: There is no such collection.
            Overloaded: Too many documents wait.
        """
        self._collections.get(collection)
        content_hash = await self._threads.read(document.content_hash)
        target = OperationTarget(owner, asker(), collection, document.id, content_hash)
        packed = await self._threads.read(pack, document)
        operation = await self._threads.write(self._put, target, packed)
        self._has_work.set()
        return operation

    async def find(self, operation_id: str, owner: str) -> Operation:
        """Return an operation of an owner. Raises NotFound."""
        self._collections.check_loaded()
        found = await self._threads.read(self._store.operations.find, operation_id, owner)
        if found is None:
            raise NotFound("operation", operation_id, "send the document again")
        return found

    def _release_all(self) -> None:
        """Take over what this process was working on before it ended."""
        with self._store.database.transaction():
            self._store.operations.release_all()
            self._store.database.commit()

    def _put(self, target: OperationTarget, packed: bytes) -> Operation:
        table, now_ms = self._store.operations, self._threads.now_ms()
        known = table.find(target.operation_id, target.owner)
        if known is not None and self._holds(known, target):
            return known
        with self._store.database.transaction():
            waiting = table.pending_bytes()
            total = sum(waiting.values())
            free = MAX_PENDING_BYTES - total
            if waiting.get(target.owner, 0) + len(packed) > free:
                problem = f"{total} bytes of documents wait to be written"
                raise Overloaded("retriever", problem, POLL_S)
            operation = table.put(target, packed, now_ms)
            self._store.database.commit()
        return operation

    def _holds(self, operation: Operation, target: OperationTarget) -> bool:
        """Whether an operation says how the document is, or will be."""
        if operation.state is OperationState.PENDING:
            return True
        if operation.state is not OperationState.DONE:
            return False
        present = self._store.reads.find(target.collection, target.document_id)
        return present is not None and present.content_hash == target.content_hash

    # Work

    async def _run(self) -> None:
        while True:
            try:
                self._has_work.clear()
                claimed = await self._claim()
            except Exception as error:
                # A defect must not end the worker for the life of the process.
                log.warning(
                    "later writes: not claimed error=%s",
                    error,
                    exc_info=not isinstance(error, RagCacheError),
                )
                await asyncio.sleep(FAILURE_PAUSE_S)
                continue
            if claimed is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self._has_work.wait()
                continue
            try:
                await self._work_on(claimed)
            finally:
                self._in_work[claimed.asker] -= 1
                self._in_work += Counter()  # drops the keys that have nothing in work
                self._has_work.set()  # of a key that had as many as it may

    async def _claim(self) -> ClaimedOperation | None:
        """Claim the first operation of the key that waits for its turn longest."""
        async with self._claiming:
            claimed = await self._threads.write(self._claim_next)
            if claimed is not None:
                self._in_work[claimed.asker] += 1
                self._served[claimed.asker] = next(self._turns)
            return claimed

    def _claim_next(self) -> ClaimedOperation | None:
        table, now_ms = self._store.operations, self._threads.now_ms()
        with self._store.database.transaction():
            first = table.first(now_ms)
            self._served = {one: turn for one, turn in self._served.items() if one in first}
            may = [one for one in first if self._in_work[one] < MOST_OF_ONE]
            for one in sorted(may, key=lambda one: (self._served.get(one, 0), first[one])):
                claimed = table.claim(first[one], one, now_ms, now_ms + CLAIM_MS)
                if claimed is not None:
                    self._store.database.commit()
                    return claimed
        return None

    async def _work_on(self, claimed: ClaimedOperation) -> None:
        """Write a document, and renew the claim meanwhile."""
        work = asyncio.create_task(self._write(claimed))
        try:
            while not (await asyncio.wait((work,), timeout=RENEW_S))[0]:
                with contextlib.suppress(RagCacheError):  # the next attempt may succeed
                    if not await self._renew(claimed.row, CLAIM_MS):
                        return  # a later change has cancelled it
            await work
        except OperationEnded:
            return
        except RagCacheError as error:
            log.warning("later writes: put off operation=%d error=%s", claimed.row, error)
            pause_s = error.retry_after_s if isinstance(error, Unavailable) else 0.0
            with contextlib.suppress(RagCacheError):  # else the claim ends by itself
                await self._renew(claimed.row, round(1000 * max(pause_s, FAILURE_PAUSE_S)))
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _write(self, claimed: ClaimedOperation) -> None:
        try:
            document = await self._threads.read(unpack, claimed.packed)
            with asking(claimed.asker):
                result = await self._ingestion.upsert(
                    claimed.collection, document, operation=claimed.row
                )
        except (InvalidInput, NotFound) as error:
            _, message, fields = to_status(error)
            told: dict[str, Any] = {"error": {"message": message, **fields}}
            await self._finish(claimed.row, OperationState.FAILED, told)
        except (RagCacheError, OperationEnded):
            raise
        except Exception:
            log.exception("later writes: failed operation=%d", claimed.row)
            message = "an internal error; the log of the retriever has more"
            told = {"error": {"message": message, "type": "internal"}}
            await self._finish(claimed.row, OperationState.FAILED, told)
        else:
            if not result.changed:
                told = {"changed": False, "chunks": result.stored.num_chunks}
                await self._finish(claimed.row, OperationState.DONE, told)

    async def _renew(self, row: int, for_ms: int) -> bool:
        """Renew the claim of an operation. False: it is no longer pending."""

        def renew() -> bool:
            with self._store.database.transaction():
                until_ms = self._threads.now_ms() + for_ms
                is_pending = self._store.operations.renew(row, until_ms)
                self._store.database.commit()
            return is_pending

        return await self._threads.write(renew)

    async def _finish(self, row: int, state: OperationState, result: Mapping[str, Any]) -> None:
        def finish() -> None:
            with self._store.database.transaction(frees_space=True):
                self._store.operations.finish(row, state, result, self._threads.now_ms())
                self._store.database.commit()

        await self._threads.write(finish)
