"""The gRPC service with metrics of its searches and writes."""

# ruff: noqa: N802  methods are named as in the proto

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from ragcache_retriever.metrics import Metrics, outcome_of
from ragcache_wire.v1 import retriever_pb2 as pb

Context = grpc.aio.ServicerContext[Any, Any]


class MeasuredService:
    """Wraps the service of one retriever. Calls that are not named here go to it unchanged."""

    def __init__(self, inner: Any, metrics: Metrics) -> None:
        self._inner = inner
        self._metrics = metrics

    def __getattr__(self, name: str) -> Any:
        """Return a method of the wrapped service."""
        return getattr(self._inner, name)

    async def Search(
        self, request: pb.SearchRequest, context: Context
    ) -> AsyncIterator[pb.SearchStage]:
        """Yield the stages of a search, and count them."""
        began = time.perf_counter()
        num_stages = 0
        outcome = "cancelled"
        try:
            async with contextlib.aclosing(self._inner.Search(request, context)) as stages:
                async for stage in stages:
                    num_stages += 1
                    if stage.final:
                        # The caller leaves after the final stage.
                        outcome = "answered"
                        self._count_answer(stage, num_stages, time.perf_counter() - began)
                    yield stage
        except BaseException as error:
            if outcome != "answered":
                outcome = outcome_of(error)
            raise
        finally:
            self._metrics.searches.labels(outcome).inc()

    async def UpsertDocument(
        self, request: pb.UpsertDocumentRequest, context: Context
    ) -> pb.UpsertDocumentReply:
        """Insert or replace a document, and count it."""
        began = time.perf_counter()
        metrics = self._metrics
        try:
            reply: pb.UpsertDocumentReply = await self._inner.UpsertDocument(request, context)
        except BaseException as error:
            metrics.upserts.labels(outcome_of(error)).inc()
            raise
        metrics.upserts.labels("changed" if reply.changed else "unchanged").inc()
        if reply.changed:
            metrics.upsert_seconds.observe(time.perf_counter() - began)
            metrics.ingested_chunks.inc(reply.document.num_chunks)
            metrics.ingested_bytes.inc(len(request.document.text.encode()))
        return reply

    async def DeleteDocument(
        self, request: pb.DeleteDocumentRequest, context: Context
    ) -> pb.DeleteDocumentReply:
        """Delete a document, and count it."""
        try:
            reply: pb.DeleteDocumentReply = await self._inner.DeleteDocument(request, context)
        except BaseException as error:
            self._metrics.deletes.labels(outcome_of(error)).inc()
            raise
        self._metrics.deletes.labels("deleted").inc()
        return reply

    def _count_answer(self, final: pb.SearchStage, num_stages: int, total_s: float) -> None:
        seconds, stages = self._metrics.search_seconds, self._metrics.search_stages
        seconds.labels("embed").observe(final.embed_us / 1e6)
        seconds.labels("search").observe(final.search_us / 1e6)
        seconds.labels("total").observe(total_s)
        stages.labels("final").inc()
        if num_stages > 1:
            stages.labels("first").inc()
            stages.labels("between").inc(num_stages - 2)
        self._metrics.search_hits.inc(len(final.hits))
