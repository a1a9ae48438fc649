"""The client of the gateways, over real HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import pytest
from aiohttp import web

from ragcache_operator.builders.keys import ComponentKeys
from ragcache_operator.kube.api import Api
from ragcache_operator.reconcile.children import Children
from ragcache_operator.reconcile.state import ReconcileState
from ragcache_operator.reconcile.status_reporter import StatusReporter
from ragcache_operator.status.conditions import ObjectEvent
from ragcache_operator.status.gateway_client import (
    SELF_TEST_COLLECTION,
    GatewayAccess,
    GatewayClient,
    ShardReset,
    StoreUsage,
)
from ragcache_operator.status.retriever_state import RemakeState, RetrieverState

ANSWER = {"ragcache": {"citations": [{}]}, "usage": {"completion_tokens": 3}}


RESET = ShardReset("store-1:50051", time.time_ns() // 1_000_000 - 60_000, "Corruption: bad block")
OLD_RESET = ShardReset("store-2:50051", 1_700_000_000_000, "Corruption: CURRENT file")


def shard_state(reset: ShardReset) -> dict[str, Any]:
    """Return the part of /v1/cache about one shard."""
    return {
        "address": reset.shard,
        "up": True,
        "reset_at_ms": reset.at_ms,
        "reset_reason": reset.reason,
    }


class Gateway:
    """A fake gateway. ``requests`` holds (method, path, body) of each call."""

    def __init__(self) -> None:
        self.collections: list[dict[str, Any]] = []
        self.answer: Any = ANSWER
        self.status = 200
        self.requests: list[tuple[str, str, Any]] = []
        self.keys: set[str | None] = set()
        self.url = ""
        healthy = {"address": "store-0:50051", "up": True, "reset_at_ms": 0, "reset_reason": ""}
        self.cache = {
            "hit_rate": 0.5,
            "disk_bytes": 7,
            "shards": [healthy, shard_state(RESET), shard_state(OLD_RESET)],
        }

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.requests.append((request.method, request.path, body))
        self.keys.add(request.headers.get("Authorization"))
        match request.path:
            case "/v1/collections":
                return web.json_response({"data": self.collections})
            case "/v1/chat/completions" | "/ragcache/processor":
                return web.json_response(self.answer, status=self.status)
            case "/v1/cache":
                return web.json_response(self.cache)
            case "/v1/quality":
                return web.json_response({"verdict": "failed"})
            case "/readyz":
                return web.json_response({"progress": "indexing 1 of 2"}, status=503)
            case "/endless/v1/cache" | "/endless/readyz":
                reply = web.StreamResponse()
                await reply.prepare(request)
                while True:
                    await reply.write(b" " * 65536)
        return web.json_response({})


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    gateway = Gateway()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", gateway.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    gateway.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield gateway
    await runner.cleanup()


@pytest.fixture
async def gateways() -> AsyncIterator[GatewayClient]:
    gateways = GatewayClient()
    yield gateways
    await gateways.close()


async def test_an_answer_with_citations_passes(gateway: Gateway, gateways: GatewayClient) -> None:
    gateway.collections = [{"name": "small", "documents": 1}, {"name": "large", "documents": 9}]
    result = await gateways.self_test(GatewayAccess(gateway.url), ["tinyrag"])
    assert result.passed, result.message
    method, path, body = gateway.requests[-1]
    assert (method, path, body["model"]) == ("POST", "/v1/chat/completions", "tinyrag")
    assert body["ragcache"]["collection"] == "large"


async def test_each_model_is_asked_and_one_that_does_not_answer_is_named(
    gateway: Gateway, gateways: GatewayClient
) -> None:
    models = ["small", "large"]
    assert (await gateways.self_test(GatewayAccess(gateway.url), models)).passed
    asked = [body["model"] for _, path, body in gateway.requests if path.endswith("completions")]
    assert asked == models
    gateway.status, gateway.answer = 503, {"error": {"message": "there is no engine"}}
    result = await gateways.self_test(GatewayAccess(gateway.url), models)
    assert not result.passed
    assert result.message.startswith("model small: ")
    assert await gateways.blend_verdict(GatewayAccess(gateway.url), models) == "failed"


async def test_every_call_has_the_key_of_the_operator(
    gateway: Gateway, gateways: GatewayClient
) -> None:
    assert (await gateways.self_test(GatewayAccess(gateway.url, "rck-1"), ["tinyrag"])).passed
    assert await gateways.store_usage(GatewayAccess(gateway.url, "rck-1")) is not None
    assert (
        await gateways.blend_verdict(GatewayAccess(gateway.url, "rck-1"), ["tinyrag"]) is not None
    )
    assert gateway.keys == {"Bearer rck-1"}
    gateway.keys.clear()
    assert (await gateways.self_test(GatewayAccess(gateway.url), ["tinyrag"])).passed
    assert gateway.keys == {None}


async def test_without_documents_it_adds_a_test_document(
    gateway: Gateway, gateways: GatewayClient
) -> None:
    gateway.collections = [{"name": "empty", "documents": 0}]
    assert (await gateways.self_test(GatewayAccess(gateway.url), ["m"])).passed
    calls = [(method, path) for method, path, _ in gateway.requests]
    assert ("PUT", f"/v1/collections/{SELF_TEST_COLLECTION}") in calls
    assert ("POST", "/v1/documents") in calls
    gateway.collections = [{"name": SELF_TEST_COLLECTION, "documents": 1}]
    gateway.requests.clear()
    assert (await gateways.self_test(GatewayAccess(gateway.url), ["m"])).passed
    assert [path for _, path, _ in gateway.requests] == ["/v1/collections", "/v1/chat/completions"]


@pytest.mark.parametrize(
    ("status", "answer", "words"),
    [
        (503, {"error": {"message": "the engine is not ready"}}, "HTTP 503: the engine is not"),
        (500, "oops", "HTTP 500"),
        (200, {**ANSWER, "ragcache": {"citations": []}}, "has no citations"),
        (200, {**ANSWER, "usage": {"completion_tokens": 0}}, "has no tokens"),
        (200, {}, "sent an invalid answer"),
        (200, [1], "sent an invalid answer"),
    ],
)
async def test_other_answers_fail_with_a_reason(
    gateway: Gateway, gateways: GatewayClient, status: int, answer: Any, words: str
) -> None:
    gateway.status, gateway.answer = status, answer
    result = await gateways.self_test(GatewayAccess(gateway.url), ["m"])
    assert not result.passed
    assert words in result.message


async def test_an_unreachable_gateway_fails(gateways: GatewayClient) -> None:
    for url in ("http://127.0.0.1:1", "http://no-such-host.invalid:80", "http://[::1"):
        result = await gateways.self_test(GatewayAccess(url), ["m"])
        assert not result.passed
        assert "does not answer" in result.message


async def test_usage_and_progress_are_read(gateway: Gateway, gateways: GatewayClient) -> None:
    assert await gateways.store_usage(GatewayAccess(gateway.url)) == StoreUsage(
        0.5, 7, (RESET, OLD_RESET)
    )
    assert await gateways.store_usage(GatewayAccess("http://127.0.0.1:1")) is None
    address = gateway.url.removeprefix("http://")
    assert await gateways.startup_progress(address) == "indexing 1 of 2"
    assert await gateways.startup_progress("127.0.0.1:1") is None


async def test_a_shard_that_started_empty_is_reported_once(
    gateway: Gateway, gateways: GatewayClient
) -> None:
    reporter = StatusReporter(
        cast(Api, None), cast(Children, None), gateways, ComponentKeys(bytes(32))
    )
    state, posted = ReconcileState(), list[ObjectEvent]()
    for _ in range(2):
        state.next_usage_s = 0.0
        await reporter._refresh_usage(GatewayAccess(gateway.url), ["m"], state, posted.append)
    (event,) = posted  # the old one was reported before this operator started
    assert (event.kind, event.reason) == ("Warning", "CacheDataDamaged")
    assert "store-1:50051 has started empty" in event.message
    assert "Corruption: bad block" in event.message
    again = replace(RESET, at_ms=RESET.at_ms + 1000)
    gateway.cache["shards"] = [shard_state(again)]
    state.next_usage_s = 0.0
    await reporter._refresh_usage(GatewayAccess(gateway.url), ["m"], state, posted.append)
    assert len(posted) == 2


async def test_an_endless_body_is_aborted(gateway: Gateway, gateways: GatewayClient) -> None:
    async with asyncio.timeout(60):
        assert await gateways.store_usage(GatewayAccess(f"{gateway.url}/endless")) is None
        assert (
            await gateways.startup_progress(f"{gateway.url.removeprefix('http://')}/endless")
            is None
        )


async def test_the_verdict_on_blends_is_read(gateway: Gateway, gateways: GatewayClient) -> None:
    assert await gateways.blend_verdict(GatewayAccess(gateway.url), ["m"]) == "failed"
    assert await gateways.blend_verdict(GatewayAccess("http://127.0.0.1:1"), ["m"]) is None


@pytest.mark.parametrize(
    ("answer", "status", "slow"),
    [
        ({"number_type": "bfloat16", "is_slow": True}, 200, "bfloat16"),
        ({"number_type": "float32", "is_slow": False}, 200, ""),
        ({"error": "not found"}, 404, None),
        ([], 200, None),
    ],
)
async def test_an_engine_tells_which_number_type_is_slow(
    gateway: Gateway, gateways: GatewayClient, answer: Any, status: int, slow: str | None
) -> None:
    gateway.answer, gateway.status = answer, status
    assert await gateways.slow_number_type(gateway.url) == slow


async def test_an_engine_that_does_not_answer_tells_nothing(gateways: GatewayClient) -> None:
    assert await gateways.slow_number_type("http://127.0.0.1:9") is None


async def test_the_state_of_the_retriever_is_read_from_the_collections(
    gateway: Gateway, gateways: GatewayClient
) -> None:
    remake = {"documents_done": 1, "documents": 4, "reason": "embedder"}
    gateway.collections = [
        {"name": "a", "documents": 4, "remake": remake},
        {"name": "b", "documents": 1, "remake": None},
    ]
    state = await gateways.retriever_state(GatewayAccess(gateway.url))
    assert state == RetrieverState((RemakeState("a", 1, 4, "embedder"),), is_settled=False)
    gateway.collections = []
    assert await gateways.retriever_state(GatewayAccess(gateway.url)) == RetrieverState()
    gateway.collections = [{"remake": 1}]
    for url in (gateway.url, "http://127.0.0.1:1"):
        state = await gateways.retriever_state(GatewayAccess(url))
        assert state == RetrieverState(is_settled=False)
