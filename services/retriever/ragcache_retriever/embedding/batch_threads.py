"""Threads of an embedder in this process: one for queries, the others for batches of documents."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from ragcache_core.errors import Unavailable
from ragcache_retriever.concurrency.cpu import lower_priority
from ragcache_retriever.concurrency.query_gate import QueryGate
from ragcache_retriever.concurrency.threads import finish, run
from ragcache_retriever.embedding.embedder import Vectors
from ragcache_retriever.embedding.length_batcher import LengthBatcher

Tokens = Sequence[int]


@dataclass(eq=False, slots=True)
class _Call:
    """Texts of one call. ``vectors`` has a row for each, and ``num_left`` of them are missing."""

    texts: Sequence[Tokens]
    vectors: Vectors
    num_left: int
    done: Future[Vectors] = field(default_factory=Future)


class BatchThreads:
    """Embeds queries at once, and documents in batches.

    No batch begins while the gate counts a query, and a batch that is running waits where its
    model calls ``wait_for_queries``. The threads of batches have a low priority in the operating
    system, so that the other threads of this process get a core at once.

    Args:
        embed: Returns the embeddings of a batch. Several threads call it at once.
        dimension: Length of its vectors.
        num_threads: Batches that are embedded at once.
        max_batch_tokens: See LengthBatcher.
    """

    def __init__(
        self,
        embed: Callable[[Sequence[Tokens]], Vectors],
        gate: QueryGate,
        *,
        dimension: int,
        num_threads: int,
        max_batch_tokens: int,
    ) -> None:
        self._embed = embed
        self._dimension = dimension
        self._gate = gate
        self._changed = threading.Condition()  # guards the two below
        self._waiting: LengthBatcher[_Call] = LengthBatcher(max_batch_tokens)
        self._stopped = False
        self._query_thread = ThreadPoolExecutor(1, "embedder-query")
        self._batch_threads = [
            threading.Thread(target=self._work, name=f"embedder-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._batch_threads:
            thread.start()

    async def embed_query(self, tokens: Tokens) -> Vectors:
        """Return the embedding of a query, shape (1, dimension)."""
        return await run(self._query_thread, self._embed, [tokens])

    async def embed_documents(self, texts: Sequence[Tokens]) -> Vectors:
        """Return the embeddings of texts, shape (len(texts), dimension).

        Cancelling the call removes the texts that still wait.

        Raises:
            Unavailable: The threads stop.
        """
        call = _Call(texts, np.empty((len(texts), self._dimension), np.float32), len(texts))
        if not texts:
            return call.vectors
        call.done.set_running_or_notify_cancel()  # from here on, it can be set but not cancelled
        with self._changed:
            if self._stopped:
                raise _stopping()
            self._waiting.add(call, [len(tokens) for tokens in texts])
            self._changed.notify_all()
        try:
            return await asyncio.wrap_future(call.done)
        finally:
            with self._changed:
                self._waiting.drop(call)

    def wait_for_queries(self) -> None:
        """Pause if this is the thread of a batch, see QueryGate."""
        if threading.current_thread() in self._batch_threads:
            self._gate.wait()

    async def stop(self) -> None:
        """End the threads after the batches that are running. Calls that wait fail."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        await finish(self._query_thread)
        for thread in self._batch_threads:
            await asyncio.to_thread(thread.join)
        while batch := self._waiting.take():
            self._fail(batch, _stopping())

    def _work(self) -> None:
        lower_priority()
        while batch := self._next_batch():
            try:
                vectors = self._embed([call.texts[i] for call, i in batch])
            except BaseException as error:
                self._fail(batch, error)
            else:
                self._finish(batch, vectors)

    def _next_batch(self) -> list[tuple[_Call, int]]:
        """Wait for a batch and return it. It is empty once the threads stop."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._waiting)
            self._gate.wait()
            with self._changed:
                if self._stopped:
                    return []
                if batch := self._waiting.take():
                    return batch

    def _finish(self, batch: Sequence[tuple[_Call, int]], vectors: Vectors) -> None:
        finished = []
        with self._changed:
            for (call, i), vector in zip(batch, vectors, strict=True):
                call.vectors[i] = vector
                call.num_left -= 1
                if call.num_left == 0 and not call.done.done():
                    finished.append(call)
        for call in finished:
            call.done.set_result(call.vectors)

    def _fail(self, batch: Sequence[tuple[_Call, int]], error: BaseException) -> None:
        with self._changed:
            for call in {call for call, _ in batch}:
                self._waiting.drop(call)
                if not call.done.done():
                    call.done.set_exception(error)


def _stopping() -> Unavailable:
    return Unavailable("embedder", "it is stopping")
