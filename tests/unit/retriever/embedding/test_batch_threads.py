"""Concurrent calls share batches; queries go first; errors reach the calls of their batch."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

import numpy as np
import pytest

from ragcache_core.errors import Unavailable
from ragcache_retriever.concurrency.query_gate import QueryGate
from ragcache_retriever.embedding.batch_threads import BatchLimits, BatchThreads
from ragcache_retriever.embedding.embedder import Tokens, Vectors
from tests.kit.wait import let_tasks_begin

Embed = Callable[[Sequence[Tokens]], Coroutine[None, None, Vectors]]
BLOCKED = 999
"""A text of this token waits in the fake model until ``go_on`` is set."""


LIMIT_S = 120.0


class Model:
    """Embeds a text as its sum. Records each batch."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.running = threading.Event()
        self.go_on = threading.Event()
        self.at_layer: Callable[[], None] = lambda: None

    def embed(self, batch: Sequence[Tokens]) -> Vectors:
        self.batches.append([sum(tokens) for tokens in batch])
        if [BLOCKED] in batch:
            self.running.set()
            self.go_on.wait(LIMIT_S)
        self.at_layer()
        if [-1] in batch:
            raise KeyError("text")
        return np.array([[sum(tokens)] for tokens in batch], np.float32)


@contextlib.asynccontextmanager
async def threads(
    model: Model,
    gate: QueryGate | None = None,
    *,
    max_batch_tokens: int = 4,
    num_query_threads: int = 1,
) -> AsyncIterator[BatchThreads]:
    made = BatchThreads(
        model.embed,
        gate or QueryGate(),
        1,
        BatchLimits(1, num_query_threads, max_batch_tokens, max_query_tokens=4),
    )
    try:
        yield made
    finally:
        model.go_on.set()
        await made.stop()


async def block(
    made: BatchThreads, model: Model, embed: Embed | None = None
) -> asyncio.Task[Vectors]:
    """Let the only thread of batches wait in the model, or that of queries."""
    blocking = asyncio.create_task((embed or made.embed_documents)([[BLOCKED]]))
    await asyncio.to_thread(model.running.wait, LIMIT_S)
    return blocking


async def test_concurrent_calls_share_a_batch_and_get_their_own_vectors() -> None:
    model = Model()
    async with threads(model) as made:
        blocking = await block(made, model)
        calls = [
            asyncio.create_task(made.embed_documents(texts))
            for texts in ([[1], [2, 2]], [[3]], [[5, 5]])
        ]
        await let_tasks_begin()
        model.go_on.set()
        vectors = await asyncio.gather(*calls)
        await blocking
    assert [vector.ravel().tolist() for vector in vectors] == [[1, 4], [3], [10]]
    assert model.batches == [[BLOCKED], [4, 10], [3, 1]]


async def test_a_query_waits_for_no_batch() -> None:
    model = Model()
    async with threads(model) as made:
        blocking = await block(made, model)
        assert (await made.embed_queries([[7]])).tolist() == [[7]]
        assert not blocking.done()


async def test_queries_that_wait_share_a_batch() -> None:
    model = Model()
    async with threads(model) as made:
        blocking = await block(made, model, made.embed_queries)
        waiting = [
            asyncio.create_task(made.embed_queries([tokens]))
            for tokens in ([1], [2, 2], [3], [4, 4], [5] * 9, [6])
        ]
        await let_tasks_begin()
        waiting[2].cancel()
        await let_tasks_begin()
        model.go_on.set()
        cancelled = waiting.pop(2)
        vectors = await asyncio.gather(*waiting)
        await blocking
    assert cancelled.cancelled()
    assert model.batches == [[BLOCKED], [1, 4], [8], [45], [6]]
    assert [vector.tolist() for vector in vectors] == [[[1]], [[4]], [[8]], [[45]], [[6]]]


async def test_the_queries_of_a_call_let_another_call_in_between_their_batches() -> None:
    model = Model()
    async with threads(model) as made:
        blocking = await block(made, model, made.embed_queries)
        many = asyncio.create_task(made.embed_queries([[1], [2, 2], [3], [5] * 9, [6]]))
        await let_tasks_begin()
        one = asyncio.create_task(made.embed_queries([[7]]))
        await let_tasks_begin()
        model.go_on.set()
        assert (await many).tolist() == [[1], [4], [3], [45], [6]]
        assert (await one).tolist() == [[7]]
        await blocking
    assert model.batches[:2] == [[BLOCKED], [1, 4, 3]]
    assert [number for batch in model.batches[2:] for number in batch] == [7, 45, 6]


async def test_an_error_fails_all_queries_of_its_call() -> None:
    model = Model()
    async with threads(model) as made:
        with pytest.raises(KeyError):
            await made.embed_queries([[1], [-1], [2], [3, 3, 3, 3]])
        for embed in (made.embed_queries, made.embed_documents):
            assert (await embed([])).shape == (0, 1)
        assert (await made.embed_queries([[7]])).tolist() == [[7]]
    assert model.batches == [[1, -1, 2], [7]]


async def test_a_query_takes_a_free_thread() -> None:
    model = Model()
    async with threads(model, num_query_threads=2) as made:
        blocking = await block(made, model, made.embed_queries)
        assert (await made.embed_queries([[7]])).tolist() == [[7]]
        assert not blocking.done()
        model.go_on.set()
        await blocking


@pytest.mark.parametrize("are_queries", [True, False])
async def test_a_stop_fails_what_waits(are_queries: bool) -> None:
    model = Model()
    async with threads(model) as made:
        embed = made.embed_queries if are_queries else made.embed_documents
        blocking = await block(made, model, embed)
        waiting = asyncio.create_task(embed([[1]]))
        await let_tasks_begin()
        stopping = asyncio.create_task(made.stop())
        await let_tasks_begin()
        model.go_on.set()
        await stopping
        assert (await blocking).tolist() == [[BLOCKED]]
        for refused in (waiting, embed([[2]])):
            with pytest.raises(Unavailable, match="stopping"):
                await refused


async def test_a_batch_waits_for_a_query_and_the_query_for_no_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ragcache_retriever.concurrency.query_gate.MAX_WAIT_S", 60.0)
    model, gate = Model(), QueryGate()
    async with threads(model, gate) as made:
        model.at_layer = made.wait_for_queries
        blocking = await block(made, model)
        with gate.query():
            model.go_on.set()
            assert (await made.embed_queries([[7]])).tolist() == [[7]]
            assert not blocking.done()
        assert (await blocking).tolist() == [[BLOCKED]]


async def test_an_error_fails_the_calls_of_its_batch_only() -> None:
    model = Model()
    async with threads(model) as made:
        blocking = await block(made, model)
        failing = asyncio.create_task(made.embed_documents([[-1], [1]]))
        other = asyncio.create_task(made.embed_documents([[1, 1, 1]]))
        await let_tasks_begin()
        model.go_on.set()
        with pytest.raises(KeyError):
            await failing
        assert (await other).tolist() == [[3]]
        await blocking


async def test_texts_of_a_cancelled_call_are_not_embedded() -> None:
    model = Model()
    async with threads(model) as made:
        blocking = await block(made, model)
        cancelled = asyncio.create_task(made.embed_documents([[1]]))
        await let_tasks_begin()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        model.go_on.set()
        await blocking
        assert (await made.embed_documents([[2]])).tolist() == [[2]]
    assert model.batches == [[BLOCKED], [2]]
