"""The gRPC service with limits: it refuses searches and upserts that would have to queue."""

# ruff: noqa: N802  methods are named as in the proto

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from ragcache_retriever.concurrency.request_limits import RequestLimits
from ragcache_wire.v1 import retriever_pb2 as pb

Context = grpc.aio.ServicerContext[Any, Any]


class LimitedService:
    """Wraps the service of one retriever. Calls that are not named here go to it unchanged."""

    def __init__(self, inner: Any, limits: RequestLimits) -> None:
        self._inner = inner
        self._limits = limits

    def __getattr__(self, name: str) -> Any:
        """Return a method of the wrapped service."""
        return getattr(self._inner, name)

    async def Search(
        self, request: pb.SearchRequest, context: Context
    ) -> AsyncIterator[pb.SearchStage]:
        """Yield the stages of a search. Raises Overloaded above the limit."""
        with self._limits.search():
            async with contextlib.aclosing(self._inner.Search(request, context)) as stages:
                async for stage in stages:
                    yield stage

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedReply:
        """Return the embeddings of texts. It counts as a search. Raises Overloaded."""
        with self._limits.search():
            reply: pb.EmbedReply = await self._inner.Embed(request, context)
        return reply

    async def Rerank(self, request: pb.RerankRequest, context: Context) -> pb.RerankReply:
        """Score texts. It counts as a search. Raises Overloaded."""
        with self._limits.search():
            reply: pb.RerankReply = await self._inner.Rerank(request, context)
        return reply

    async def UpsertDocument(
        self, request: pb.UpsertDocumentRequest, context: Context
    ) -> pb.UpsertDocumentReply:
        """Insert or replace a document. Raises Overloaded above the limit."""
        with self._limits.upsert(request.ByteSize()):
            reply: pb.UpsertDocumentReply = await self._inner.UpsertDocument(request, context)
        return reply
