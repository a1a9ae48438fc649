"""gRPC interceptors of the retriever: limits of concurrent calls, and metrics of calls."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from typing_extensions import override

from ragcache_core.access.caller import ANYONE
from ragcache_core.errors import InvalidInput, NotFound, Overloaded, TooLarge, Unavailable
from ragcache_core.scheduling.fair_share import Shares, may_enter
from ragcache_retriever.metrics import Metrics
from ragcache_wire.asking import asker
from ragcache_wire.server import CallInterceptor, StreamCall, UnaryCall
from ragcache_wire.v1 import retriever_pb2 as pb

RETRY_AFTER_S = 1.0
_UNNAMED = frozenset({"", ANYONE.name})
_NO_KEYS: Shares[str] = Shares()
_ONE_MORE: Shares[str] = Shares(weights={"": 1.0})
"""Keys have equal shares, and another one may come at any time."""


class LimitInterceptor(CallInterceptor):
    """Refuses searches and upserts that would have to queue. Embed and Rerank count as searches.

    A key has its share of the searches, as tenants have of a gateway's slots (``fair_share``). Of
    the bytes it gets at most as many as it leaves free.
    Source: dynamic thresholds (Choudhury and Hahne, IEEE/ACM Transactions on Networking 1998).

    Args:
        max_searches: Most searches at once.
        max_upsert_bytes: Most bytes of documents at once. One document runs alone if it is larger.
    """

    def __init__(self, max_searches: int, max_upsert_bytes: int) -> None:
        self._max_searches = max_searches
        self._max_upsert_bytes = max_upsert_bytes
        self._searches: Counter[str] = Counter()  # by key
        self._upsert_bytes: Counter[str] = Counter()

    @override
    def around_unary(self, method: str, call: UnaryCall) -> UnaryCall:
        counted: Callable[[Any], AbstractContextManager[None]]
        match method:
            case "Embed" | "Rerank":
                counted = self._search
            case "UpsertDocument" | "SubmitDocument":
                counted = self._upsert
            case _:
                return call

        async def limited(request: Any, context: Any) -> Any:
            with counted(request):
                return await call(request, context)

        return limited

    @override
    def around_stream(self, method: str, call: StreamCall) -> StreamCall:
        if method != "Search":
            return call

        async def limited(request: Any, context: Any) -> AsyncGenerator[Any, None]:
            with self._search(request):
                async with contextlib.aclosing(call(request, context)) as stages:
                    async for stage in stages:
                        yield stage

        return limited

    @contextlib.contextmanager
    def _search(self, _: Any) -> Iterator[None]:
        name = asker()
        shares = _NO_KEYS if name in _UNNAMED else _ONE_MORE
        if not may_enter(name, self._searches, shares, self._max_searches):
            problem = f"{self._searches.total()} searches are running"
            raise Overloaded("retriever", problem, RETRY_AFTER_S)
        self._searches[name] += 1
        try:
            yield
        finally:
            self._searches[name] -= 1
            self._searches += Counter()  # drops keys without one

    @contextlib.contextmanager
    def _upsert(
        self, request: pb.UpsertDocumentRequest | pb.SubmitDocumentRequest
    ) -> Iterator[None]:
        name, num_bytes = asker(), request.ByteSize()
        total = self._upsert_bytes.total()
        free = self._max_upsert_bytes - total
        own = self._upsert_bytes[name]
        if total and (num_bytes > free or (name not in _UNNAMED and own + num_bytes > free)):
            problem = f"it is preparing {total} bytes"
            raise Overloaded("retriever", problem, RETRY_AFTER_S)
        self._upsert_bytes[name] += num_bytes
        try:
            yield
        finally:
            self._upsert_bytes[name] -= num_bytes
            self._upsert_bytes += Counter()


class MetricsInterceptor(CallInterceptor):
    """Counts searches, upserts and deletes by their outcomes, refused ones included."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    @override
    def around_unary(self, method: str, call: UnaryCall) -> UnaryCall:
        count: Callable[[Any, Any, float], None]
        match method:
            case "UpsertDocument":
                outcomes, count = self._metrics.upserts, self._count_upsert
            case "DeleteDocument":
                outcomes, count = self._metrics.deletes, self._count_delete
            case _:
                return call

        async def measured(request: Any, context: Any) -> Any:
            began = time.perf_counter()
            try:
                reply = await call(request, context)
            except BaseException as error:
                outcomes.labels(_outcome_of(error)).inc()
                raise
            count(request, reply, time.perf_counter() - began)
            return reply

        return measured

    @override
    def around_stream(self, method: str, call: StreamCall) -> StreamCall:
        if method != "Search":
            return call

        async def measured(request: Any, context: Any) -> AsyncGenerator[Any, None]:
            began = time.perf_counter()
            num_stages = 0
            outcome = "cancelled"
            try:
                async with contextlib.aclosing(call(request, context)) as stages:
                    async for stage in stages:
                        num_stages += 1
                        if stage.final:
                            # The caller leaves after the final stage.
                            outcome = "answered"
                            self._count_answer(stage, num_stages, time.perf_counter() - began)
                        yield stage
            except BaseException as error:
                if outcome != "answered":
                    outcome = _outcome_of(error)
                raise
            finally:
                self._metrics.searches.labels(outcome).inc()

        return measured

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

    def _count_upsert(
        self, request: pb.UpsertDocumentRequest, reply: pb.UpsertDocumentReply, total_s: float
    ) -> None:
        self._metrics.upserts.labels("changed" if reply.changed else "unchanged").inc()
        if reply.changed:
            self._metrics.upsert_seconds.observe(total_s)
            self._metrics.ingested_chunks.inc(reply.document.num_chunks)
            self._metrics.ingested_bytes.inc(len(request.document.text.encode()))

    def _count_delete(self, _request: Any, _reply: Any, _total_s: float) -> None:
        self._metrics.deletes.labels("deleted").inc()


def _outcome_of(error: BaseException) -> str:
    """Return the label of the outcome of a call that raised an error."""
    match error:
        case Overloaded():
            return "refused"
        case InvalidInput() | TooLarge() | NotFound():
            return "invalid"
        case Unavailable():
            return "unavailable"
        case asyncio.CancelledError() | GeneratorExit():
            return "cancelled"
    return "failed"
