"""A client raises the error that a real server in the same process raised."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ragcache_core.errors import (
    InvalidInput,
    NotFound,
    Overloaded,
    RagCacheError,
    TooLarge,
    Unauthenticated,
    Unavailable,
)
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Origin, Provenance, VariantInfo
from ragcache_core.store_api import NewVariant
from ragcache_kv.store_client.client import StoreClient
from ragcache_kv.values.outgoing_value import ReadyValue
from ragcache_wire.clients.engine_client import EngineClient
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.server import GrpcServer
from ragcache_wire.status import (
    DETAIL_KEY,
    MAX_TEXT_BYTES,
    RETRY_AFTER_S,
    NoAnswer,
    from_rpc_error,
)
from ragcache_wire.v1 import (
    cachestore_pb2,
    cachestore_pb2_grpc,
    engine_pb2,
    engine_pb2_grpc,
    node_feed_pb2,
    retriever_pb2,
    retriever_pb2_grpc,
)

LIMIT_S = 60.0
"""Deadline of calls that are answered, however slow the machine is."""

ERRORS = [
    InvalidInput("top_k", "is 0", "send 1 to 1000"),
    InvalidInput("süß\n", "is “quoted”", "send ascii, or not"),
    TooLarge("document.text", "has 9 MiB", "send at most 8 MiB"),
    NotFound("document", "a/b", "list documents to see their ids"),
    Unauthenticated("token", "is missing", "send one"),
    Unavailable("engine", "is starting"),
    Unavailable("cachestore", "its disk is full", retry_after_s=60.5),
    Overloaded("retriever", "256 searches are running", retry_after_s=2.5),
]


class FailingEngine(engine_pb2_grpc.EngineServicer):
    """Raises the given error; without one it never answers."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    async def GetCosts(self, request: Any, context: Any) -> engine_pb2.Costs:  # noqa: N802
        raise NotImplementedError

    def Watch(self, request: Any, context: Any) -> AsyncIterator[node_feed_pb2.NodeChanges]:  # noqa: N802
        raise NotImplementedError

    async def GetRequestRecord(self, request: Any, context: Any) -> engine_pb2.RequestRecord:  # noqa: N802
        if self._error is not None:
            raise self._error
        await asyncio.Event().wait()
        return engine_pb2.RequestRecord()


class FailingSearch(retriever_pb2_grpc.RetrieverServicer):
    """Raises after one stage."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def Search(self, request: Any, context: Any) -> AsyncIterator[retriever_pb2.SearchStage]:  # noqa: N802
        yield retriever_pb2.SearchStage(progress=0.5)
        raise self._error


class FailingStore(cachestore_pb2_grpc.CacheStoreServicer):
    """Raises once it has read all of a put."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def Hello(self, request: Any, context: Any) -> cachestore_pb2.HelloReply:  # noqa: N802
        return cachestore_pb2.HelloReply()

    async def Put(self, request_iterator: Any, context: Any) -> cachestore_pb2.PutReply:  # noqa: N802
        async for _ in request_iterator:
            pass
        raise self._error


@contextlib.asynccontextmanager
async def serving(servicer: object, register: Any, listen: str = "127.0.0.1:0") -> Any:
    server = GrpcServer(listen, ["test"], lambda s: register(servicer, s))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def engine(error: Exception | None) -> AsyncIterator[EngineClient]:
    """A client of an engine that raises an error, or never answers."""
    register = engine_pb2_grpc.add_EngineServicer_to_server
    async with serving(FailingEngine(error), register) as server:
        client = EngineClient(f"127.0.0.1:{server.port}")
        yield client
        await client.close()


def assert_same(raised: RagCacheError, error: RagCacheError) -> None:
    assert type(raised) is type(error)
    if isinstance(error, Unavailable):  # the part is the one that was called
        assert str(error) in str(raised)
        assert isinstance(raised, Unavailable)
        assert raised.retry_after_s == error.retry_after_s
    else:
        assert str(raised) == str(error)
        assert vars(raised) == vars(error)


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
async def test_an_error_of_a_call_is_raised_again(error: RagCacheError) -> None:
    async with engine(error) as client:
        with pytest.raises(RagCacheError) as raised:
            await client.request_record("r", LIMIT_S)
        assert_same(raised.value, error)


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
async def test_an_error_in_the_middle_of_a_stream_is_raised_again(error: RagCacheError) -> None:
    async with serving(
        FailingSearch(error),  # type: ignore[abstract]  # other calls are not served
        retriever_pb2_grpc.add_RetrieverServicer_to_server,
    ) as server:
        client = RetrieverClient(f"127.0.0.1:{server.port}")
        stages = client.search("c", "q", 1)
        assert (await anext(stages)).progress == 0.5
        with pytest.raises(RagCacheError) as raised:
            await anext(stages)
        assert_same(raised.value, error)
        await client.close()


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
async def test_an_error_of_an_upload_is_raised_again(error: RagCacheError) -> None:
    async with serving(
        FailingStore(error),  # type: ignore[abstract]  # other calls are not served
        cachestore_pb2_grpc.add_CacheStoreServicer_to_server,
    ) as server:
        client = StoreClient(f"127.0.0.1:{server.port}", ["grpc"])
        value = memoryview(b"abc")
        variant = NewVariant(
            VariantKey(bytes(16), bytes(16)),
            VariantInfo(1, 3, 0, Provenance(exact=True)),
            Origin(),
            None,
            (3,),
        )
        put = asyncio.to_thread(
            client.put, variant, ReadyValue.with_checksums(value, (3,)), LIMIT_S
        )
        with pytest.raises(RagCacheError) as raised:
            await put
        assert_same(raised.value, error)
        client.close()


@pytest.mark.parametrize("character", ["a", "%", "\x01", "é", "語", "🦊"])
async def test_an_error_that_repeats_a_long_text_stays_the_error(character: str) -> None:
    """gRPC ends calls with more metadata than it takes as if the service were overloaded."""
    error = InvalidInput(*(character * 6000 for _ in range(3)))
    async with engine(error) as client:
        with pytest.raises(RagCacheError) as raised:
            await client.request_record("r", LIMIT_S)
    assert type(raised.value) is InvalidInput
    for text in (raised.value.field, raised.value.problem, raised.value.fix):
        start = text.removesuffix("...")
        assert start != text
        assert set(start) == {character}
        assert len(json.dumps(text)) <= MAX_TEXT_BYTES
        assert len(start) > MAX_TEXT_BYTES / 20


async def test_a_bug_of_the_server_is_not_reported_as_invalid_input(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with engine(ZeroDivisionError("oops")) as client:
        with caplog.at_level(logging.ERROR), pytest.raises(RagCacheError) as raised:
            await client.request_record("r", LIMIT_S)
        assert type(raised.value) is RagCacheError
        assert "ZeroDivisionError" in caplog.text


class Failed(grpc.RpcError):
    """A failed call of a service that reports its error in another way."""

    def __init__(self, detail: bytes) -> None:
        self._detail = detail

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "full"

    def trailing_metadata(self) -> tuple[Any, ...]:
        return (("x", b"y"), (DETAIL_KEY, self._detail))


@pytest.mark.parametrize(
    ("detail", "kind"),
    [
        (b'{"type": "unavailable"}', Unavailable),  # 0.3 did not say when to try again
        (b'{"type": "unavailable", "retry_after_s": "soon"}', Unavailable),
        (b'{"type": "unavailable", "retry_after_s": NaN}', Unavailable),
        (b'{"type": "unavailable", "retry_after_s": -3}', Unavailable),
        (b'{"type": "invalid"}', InvalidInput),
        (b'{"type": "too_large", "field": "f"}', TooLarge),
        (b'{"type": "not_found", "kind": "document"}', NotFound),
        (b'{"type": "of the future"}', NoAnswer),
        (b"[1]", NoAnswer),
        (b"{", NoAnswer),
    ],
)
def test_an_error_of_another_version_becomes_a_core_error(
    detail: bytes, kind: type[RagCacheError]
) -> None:
    error = from_rpc_error("cachestore", Failed(detail))
    assert type(error) is kind
    if isinstance(error, Unavailable):
        assert error.retry_after_s == RETRY_AFTER_S


async def test_no_answer_in_time_is_unavailable() -> None:
    async with engine(None) as client:
        with pytest.raises(Unavailable, match="deadline"):
            await client.request_record("r")


async def test_a_server_refuses_calls_above_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragcache_wire.server.MAX_CALLS", 1)
    async with engine(None) as client:
        # Both arrive before the first one ends, because it never answers.
        first, second = (asyncio.create_task(client.request_record("r", LIMIT_S)) for _ in range(2))
        [refused], [waiting] = await asyncio.wait(
            (first, second), return_when=asyncio.FIRST_COMPLETED
        )
        assert isinstance(refused.exception(), Overloaded)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_a_missing_server_is_unavailable() -> None:
    client = EngineClient("127.0.0.1:1")
    with pytest.raises(Unavailable, match="the engine is unavailable"):
        await client.request_record("r", LIMIT_S)
    await client.close()


async def test_a_call_that_is_not_served_is_a_failure() -> None:
    async with serving(FailingEngine(None), engine_pb2_grpc.add_EngineServicer_to_server) as server:
        client = RetrieverClient(f"127.0.0.1:{server.port}")
        with pytest.raises(RagCacheError, match="unimplemented") as raised:
            await client.get_collection("c")
        assert type(raised.value) is RagCacheError
        await client.close()


async def test_two_servers_do_not_share_a_port() -> None:
    register = engine_pb2_grpc.add_EngineServicer_to_server
    async with serving(FailingEngine(None), register) as server:
        with pytest.raises(RuntimeError):
            GrpcServer(
                f"127.0.0.1:{server.port}", ["test"], lambda s: register(FailingEngine(None), s)
            )


async def test_health_is_serving_only_when_ready() -> None:
    async with serving(FailingEngine(None), engine_pb2_grpc.add_EngineServicer_to_server) as server:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            seen = []
            for ready in (False, True):
                if ready:
                    await server.set_ready()
                for service in ("", "test"):
                    request = health_pb2.HealthCheckRequest(service=service)
                    seen.append((await stub.Check(request, timeout=LIMIT_S)).status)
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        serving_now = health_pb2.HealthCheckResponse.SERVING
        assert seen == [not_serving] * 2 + [serving_now] * 2


NO_MESSAGE_CASES = (
    (
        FailingEngine(None),
        engine_pb2_grpc.add_EngineServicer_to_server,
        "/ragcache.v1.Engine/GetRequestRecord",
    ),
    (
        FailingSearch(ERRORS[0]),  # type: ignore[abstract]  # other calls are not served
        retriever_pb2_grpc.add_RetrieverServicer_to_server,
        "/ragcache.v1.Retriever/Search",
    ),
    (
        FailingStore(ERRORS[0]),  # type: ignore[abstract]  # other calls are not served
        cachestore_pb2_grpc.add_CacheStoreServicer_to_server,
        "/ragcache.v1.CacheStore/Put",
    ),
)


@pytest.mark.parametrize(("servicer", "register", "method"), NO_MESSAGE_CASES)
async def test_messages_that_cannot_be_decoded_are_one_line_in_the_log(
    servicer: object, register: Any, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with (
        serving(servicer, register) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        for _ in range(20):
            call = channel.stream_stream(method, None, None)(iter([b"\xff\xff"]))
            with pytest.raises(grpc.aio.AioRpcError, match="is no request of") as raised:
                await anext(aiter(call))
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(caplog.messages) == 1, caplog.text
    assert method.rpartition("/")[2] in caplog.messages[0]
