"""Metrics of searches and writes, with services that answer and that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ragcache_core.errors import InvalidInput, NotFound, Overloaded, Unavailable
from ragcache_retriever.measured_service import MeasuredService
from ragcache_retriever.metrics import Metrics
from ragcache_wire.v1 import retriever_pb2 as pb

FAILURES = (
    (Overloaded("retriever", "busy", 1.0), "refused"),
    (InvalidInput("query", "is empty", "write one"), "invalid"),
    (NotFound("document", "a", "list them"), "invalid"),
    (Unavailable("embedder", "gone"), "unavailable"),
    (asyncio.CancelledError(), "cancelled"),
    (RuntimeError("unforeseen"), "failed"),
)
failing = pytest.mark.parametrize(("error", "outcome"), FAILURES, ids=[o for _, o in FAILURES])


class ScriptedService:
    """Answers with what it is given, or raises."""

    def __init__(self, error: BaseException | None = None, *, changed: bool = True) -> None:
        self._error = error
        self._changed = changed

    async def Search(self, request: Any, context: Any) -> AsyncIterator[pb.SearchStage]:  # noqa: N802
        yield pb.SearchStage(hits=[pb.Hit()])
        if self._error is not None:
            raise self._error
        yield pb.SearchStage(hits=[pb.Hit()])
        yield pb.SearchStage(
            hits=[pb.Hit(), pb.Hit()], final=True, embed_us=2_000_000, search_us=500_000
        )

    async def UpsertDocument(self, request: Any, context: Any) -> pb.UpsertDocumentReply:  # noqa: N802
        if self._error is not None:
            raise self._error
        return pb.UpsertDocumentReply(changed=self._changed, document=pb.Document(num_chunks=3))

    async def DeleteDocument(self, request: Any, context: Any) -> pb.DeleteDocumentReply:  # noqa: N802
        if self._error is not None:
            raise self._error
        return pb.DeleteDocumentReply()


class Measured:
    """A measured service and what it has recorded."""

    def __init__(self, inner: ScriptedService) -> None:
        self.metrics = Metrics()
        self.service = MeasuredService(inner, self.metrics)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.collectors.get_sample_value(f"ragcache_retriever_{name}", labels)

    async def search(self) -> None:
        async for _ in self.service.Search(pb.SearchRequest(), None):  # type: ignore[arg-type]
            pass


async def test_a_search_is_counted_with_its_stages_and_times() -> None:
    measured = Measured(ScriptedService())
    await measured.search()
    assert measured.value("searches_total", outcome="answered") == 1
    assert measured.value("search_duration_seconds_sum", part="embed") == 2
    assert measured.value("search_duration_seconds_sum", part="search") == 0.5
    assert measured.value("search_duration_seconds_count", part="total") == 1
    assert measured.value("search_hits_total") == 2
    stages = [
        measured.value("search_stages_total", stage=stage)
        for stage in ("first", "between", "final")
    ]
    assert stages == [1, 1, 1]


@failing
async def test_a_failed_call_is_counted_by_its_reason(error: BaseException, outcome: str) -> None:
    measured = Measured(ScriptedService(error))
    context: Any = None
    with pytest.raises(type(error)):
        await measured.search()
    with pytest.raises(type(error)):
        await measured.service.UpsertDocument(pb.UpsertDocumentRequest(), context)
    with pytest.raises(type(error)):
        await measured.service.DeleteDocument(pb.DeleteDocumentRequest(), context)
    for name in ("searches_total", "upserts_total", "deletes_total"):
        assert measured.value(name, outcome=outcome) == 1


async def test_a_caller_that_leaves_early_has_cancelled() -> None:
    measured = Measured(ScriptedService())
    context: Any = None
    stages = measured.service.Search(pb.SearchRequest(), context)
    await anext(stages)
    await stages.aclose()  # type: ignore[attr-defined]
    assert measured.value("searches_total", outcome="cancelled") == 1
    assert measured.value("searches_total", outcome="answered") == 0


async def test_only_documents_that_changed_count_as_ingested() -> None:
    request = pb.UpsertDocumentRequest(document=pb.Document(text="four"))
    context: Any = None
    changed, same = Measured(ScriptedService()), Measured(ScriptedService(changed=False))
    await changed.service.UpsertDocument(request, context)
    await same.service.UpsertDocument(request, context)
    assert changed.value("ingested_chunks_total") == 3
    assert changed.value("ingested_size_bytes_total") == 4
    assert changed.value("upsert_duration_seconds_count") == 1
    assert same.value("upserts_total", outcome="unchanged") == 1
    assert same.value("ingested_chunks_total") == 0
