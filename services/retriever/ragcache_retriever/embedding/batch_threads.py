"""Threads of an embedder in this process: some for queries, the others for batches of documents."""

from __future__ import annotations

import asyncio
import math
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Generic, TypeVar

import numpy as np

from ragcache_core.errors import Unavailable
from ragcache_retriever.concurrency.cpu import lower_priority
from ragcache_retriever.concurrency.query_gate import QueryGate
from ragcache_retriever.embedding.embedder import Tokens, Vectors

MIN_LENGTH_SHARE = 0.8
"""A batch pads its texts to its longest. Texts shorter than this share of it wait for another."""
K = TypeVar("K", bound=Hashable)


class LengthBatcher(Generic[K]):
    """Batches texts of similar length, over all calls that wait.

    The calls take turns: each batch begins with the longest text of the next call. A call with many
    texts therefore delays a small one by at most one batch for each call that waits. Texts of any
    call complete the batch.

    Args:
        max_tokens: Most tokens of a batch, padding included. A longer text is a batch by itself.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        # The texts of each call as (length, index), shortest first. The first call is next.
        self._calls: dict[K, list[tuple[int, int]]] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, call: K, lengths: Sequence[int]) -> None:
        """Add the texts of a call, by their lengths in tokens."""
        if lengths:
            self._calls[call] = sorted((length, i) for i, length in enumerate(lengths))

    def drop(self, call: K) -> None:
        """Remove the texts of a call that still wait."""
        self._calls.pop(call, None)

    def take(self) -> list[tuple[K, int]]:
        """Remove the next batch and return it: calls, and the indexes of texts in them."""
        if not self._calls:
            return []
        first = next(iter(self._calls))
        texts = self._calls.pop(first)
        longest, index = texts.pop()
        if texts:
            self._calls[first] = texts  # now the last one
        batch = [(first, index)]
        while (len(batch) + 1) * longest <= self._max_tokens:
            found = self._take_similar(longest)
            if found is None:
                break
            batch.append(found)
        return batch

    def _take_similar(self, longest: int) -> tuple[K, int] | None:
        """Remove the longest text that is no longer than ``longest``, unless it is much shorter."""
        best_length = math.ceil(MIN_LENGTH_SHARE * longest) - 1
        best: tuple[K, int] | None = None
        for call, texts in self._calls.items():
            position = bisect_right(texts, longest, key=lambda text: text[0]) - 1
            if position >= 0 and texts[position][0] > best_length:
                best_length, best = texts[position][0], (call, position)
        if best is None:
            return None
        call, position = best
        _, index = self._calls[call].pop(position)
        if not self._calls[call]:
            del self._calls[call]
        return call, index


@dataclass(eq=False, slots=True)
class _Call:
    """Texts of one call. ``vectors`` has a row for each, and ``num_left`` of them are missing."""

    texts: Sequence[Tokens]
    vectors: Vectors
    num_left: int
    done: Future[Vectors] = field(default_factory=Future)


@dataclass(eq=False, slots=True)
class _Query:
    """A query that waits."""

    tokens: Tokens
    done: Future[Vectors] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How many batches are embedded at once, and how large they are.

    Attributes:
        num_batches: Batches of documents at once.
        num_query_batches: Batches of queries at once.
        max_tokens: Most tokens of a batch of documents, see LengthBatcher.
        max_query_tokens: Most tokens of a batch of queries. A longer query is a batch by itself.
    """

    num_batches: int
    num_query_batches: int
    max_tokens: int
    max_query_tokens: int


class BatchThreads:
    """Embeds queries at once, and documents in batches.

    A query thread that becomes free takes all queries that wait, as far as they fit into a batch.
    So queries share batches when there are many, and one alone waits for nothing.

    No batch begins while the gate counts a query, and a batch that is running waits where its
    model calls ``wait_for_queries``. The threads of batches have a low priority in the operating
    system, so that the other threads of this process get a core at once.

    Args:
        embed: Returns the embeddings of a batch. Several threads call it at once.
        dimension: Length of its vectors.
    """

    def __init__(
        self,
        embed: Callable[[Sequence[Tokens]], Vectors],
        gate: QueryGate,
        dimension: int,
        limits: BatchLimits,
    ) -> None:
        self._embed = embed
        self._dimension = dimension
        self._gate = gate
        self._max_query_tokens = limits.max_query_tokens
        self._lock = threading.Lock()  # guards the three below
        self._waiting: LengthBatcher[_Call] = LengthBatcher(limits.max_tokens)
        self._queries: deque[_Query] = deque()
        self._stopped = False
        self._changed = threading.Condition(self._lock)
        self._asked = threading.Condition(self._lock)
        self._query_threads = _started(self._answer, limits.num_query_batches, "embedder-query")
        self._batch_threads = _started(self._work, limits.num_batches, "embedder")

    async def embed_queries(self, queries: Sequence[Tokens]) -> Vectors:
        """Return the embeddings of the queries of one call, shape (len(queries), dimension).

        They wait as one batch after the other, so that another call waits for one of them alone.
        Cancelling the call removes the queries that still wait.

        Raises:
            Unavailable: The threads stop.
        """
        vectors = [np.empty((0, self._dimension), np.float32)]
        first = 0
        while first < len(queries):
            batch = self._fitting(queries[first:])
            vectors += await self._embed_together(batch)
            first += len(batch)
        return np.concatenate(vectors)

    def _fitting(self, queries: Sequence[Tokens]) -> Sequence[Tokens]:
        """Return the first queries, as many as fit into a batch, at least one."""
        sizes = accumulate(map(len, queries))
        return queries[: max(1, sum(size <= self._max_query_tokens for size in sizes))]

    async def _embed_together(self, batch: Sequence[Tokens]) -> list[Vectors]:
        waiting = [_Query(tokens) for tokens in batch]
        with self._lock:
            if self._stopped:
                raise _stopping()
            self._queries.extend(waiting)
            self._asked.notify()
        return await asyncio.gather(*(asyncio.wrap_future(query.done) for query in waiting))

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
        with self._lock:
            if self._stopped:
                raise _stopping()
            self._waiting.add(call, [len(tokens) for tokens in texts])
            self._changed.notify_all()
        try:
            return await asyncio.wrap_future(call.done)
        finally:
            with self._lock:
                self._waiting.drop(call)

    def wait_for_queries(self) -> None:
        """Pause if this is the thread of a batch, see QueryGate."""
        if threading.current_thread() in self._batch_threads:
            self._gate.wait()

    async def stop(self) -> None:
        """End the threads after the batches that are running. Calls that wait fail."""
        with self._lock:
            self._stopped = True
            self._changed.notify_all()
            self._asked.notify_all()
        for thread in (*self._query_threads, *self._batch_threads):
            await asyncio.to_thread(thread.join)
        while batch := self._waiting.take():
            self._fail(batch, _stopping())
        while self._queries:
            query = self._queries.popleft()
            if query.done.set_running_or_notify_cancel():
                query.done.set_exception(_stopping())

    # Queries

    def _answer(self) -> None:
        while batch := self._next_queries():
            try:
                vectors = self._embed([query.tokens for query in batch])
            except BaseException as error:
                for query in batch:
                    query.done.set_exception(error)
            else:
                for query, vector in zip(batch, vectors, strict=True):
                    query.done.set_result(vector[None])

    def _next_queries(self) -> list[_Query]:
        """Wait for queries and return a batch of them. It is empty once the threads stop."""
        with self._lock:
            while True:
                self._asked.wait_for(lambda: self._stopped or self._queries)
                if self._stopped:
                    return []
                if batch := self._take_queries():
                    return batch

    def _take_queries(self) -> list[_Query]:
        """Remove the queries that fit into a batch, and those that were cancelled."""
        batch: list[_Query] = []
        num_tokens = 0
        while self._queries:
            num_tokens += len(self._queries[0].tokens)
            if batch and num_tokens > self._max_query_tokens:
                break
            query = self._queries.popleft()
            if query.done.set_running_or_notify_cancel():
                batch.append(query)
            else:
                num_tokens -= len(query.tokens)
        return batch

    # Documents

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
            with self._lock:
                self._changed.wait_for(lambda: self._stopped or self._waiting)
            self._gate.wait()
            with self._lock:
                if self._stopped:
                    return []
                if batch := self._waiting.take():
                    return batch

    def _finish(self, batch: Sequence[tuple[_Call, int]], vectors: Vectors) -> None:
        finished = []
        with self._lock:
            for (call, i), vector in zip(batch, vectors, strict=True):
                call.vectors[i] = vector
                call.num_left -= 1
                if call.num_left == 0 and not call.done.done():
                    finished.append(call)
        for call in finished:
            call.done.set_result(call.vectors)

    def _fail(self, batch: Sequence[tuple[_Call, int]], error: BaseException) -> None:
        with self._lock:
            for call in {call for call, _ in batch}:
                self._waiting.drop(call)
                if not call.done.done():
                    call.done.set_exception(error)


def _started(function: Callable[[], None], count: int, name: str) -> list[threading.Thread]:
    threads = [
        threading.Thread(target=function, name=f"{name}-{i}", daemon=True) for i in range(count)
    ]
    for thread in threads:
        thread.start()
    return threads


def _stopping() -> Unavailable:
    return Unavailable("embedder", "it is stopping")
