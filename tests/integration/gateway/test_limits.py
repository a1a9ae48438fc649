"""Each kind of request has a pool of its own: questions that hang refuse nothing but questions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from ragcache_gateway.http.middleware.request_pools import QUESTION_PATHS, STATUS_PATHS
from ragcache_wire.clients import retriever_client
from tests.kit.gateway import CONFIG, FakeRetriever, World, until_status, world

DOCUMENT = {"id": "a.md", "text": "Billing runs in eu-north."}


@asynccontextmanager
async def hanging_questions(gateway: World, count: int, **more: Any) -> AsyncGenerator[None, None]:
    """Ask questions that the engine does not answer, until they hold their slots."""
    gateway.engine.hold_after = 0
    async with AsyncExitStack() as stack:
        for _ in range(count):
            asking = asyncio.create_task(gateway.ask(**more))
            stack.callback(asking.cancel)
        await gateway.until_metric('requests_in_flight{pool="question"}', count)
        yield
    gateway.engine.hold_after = None
    await gateway.until_metric('requests_in_flight{pool="question"}', 0)


async def everything_but_questions(gateway: World) -> dict[str, int]:
    """Return the status of a request for everything that needs no engine, but /v1/status."""
    client = gateway.client
    responses = [
        await client.post("/v1/documents", json=DOCUMENT),
        await client.post("/v1/search", json={"query": "Where?"}),
        await client.get("/v1/documents"),
        await client.put("/v1/collections/other", json={}),
        await client.delete("/v1/documents/a.md"),
        *[await client.get(path) for path in sorted(STATUS_PATHS - {"/v1/status"})],
    ]
    return {f"{r.request.method} {r.request.url.path}": r.status_code for r in responses}


async def test_questions_that_hang_refuse_only_questions(tiny_model: Path) -> None:
    async with world(tiny_model, max_questions=3) as gateway:
        assert (await gateway.ask()).status_code == 200
        async with hanging_questions(gateway, 3):
            refused = await gateway.ask()
            assert refused.status_code == 429
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert int(refused.headers["Retry-After"]) >= 1
            assert (await until_status(gateway.client, 200)).status_code == 200
            statuses = await everything_but_questions(gateway)
            assert set(statuses.values()) == {200}, statuses
        assert (await gateway.ask()).status_code == 200


async def test_bodies_of_questions_take_no_memory_from_documents(tiny_model: Path) -> None:
    large = {"user": "x" * 3500}
    async with (
        world(tiny_model, bodies_max_bytes=4096) as gateway,
        hanging_questions(gateway, 1, **large),
    ):
        assert (await gateway.ask(**large)).status_code == 429
        document = DOCUMENT | {"text": "Billing. " * 400}
        assert (await gateway.client.post("/v1/documents", json=document)).status_code == 200


async def test_documents_have_a_limit_of_their_own(tiny_model: Path) -> None:
    async with world(tiny_model, max_document_requests=1) as gateway:
        gateway.retriever.hold = asyncio.Event()
        searching = asyncio.create_task(gateway.client.post("/v1/search", json={"query": "Where?"}))
        await gateway.until_metric('requests_in_flight{pool="document"}', 1)
        assert (await gateway.client.post("/v1/documents", json=DOCUMENT)).status_code == 429
        assert (await gateway.client.get("/v1/cache")).status_code == 200
        gateway.retriever.hold.set()
        assert (await searching).status_code == 200
        assert (await gateway.ask()).status_code == 200


async def test_refused_clients_are_told_to_come_one_after_the_other(tiny_model: Path) -> None:
    async with world(tiny_model, max_questions=1) as gateway:
        gateway.engine.prefill = asyncio.Event()
        slow = asyncio.create_task(gateway.ask())
        await gateway.until_metric('requests_in_flight{pool="question"}', 1)
        await asyncio.sleep(2)  # the one service time that the gateway knows
        gateway.engine.prefill.set()
        assert (await slow).status_code == 200
        gateway.engine.prefill = None
        async with hanging_questions(gateway, 1):
            responses = [await gateway.ask() for _ in range(4)]
        waits_ms = [int(response.headers["Retry-After-Ms"]) for response in responses]
        promised_ms = [2000, 4000, 6000, 8000]
        assert all(wait >= promised for wait, promised in zip(waits_ms, promised_ms, strict=True))
        assert len(set(waits_ms)) == len(waits_ms)


async def test_texts_that_take_longer_than_the_deadline_are_413_with_a_bound(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed, read_chars = FakeRetriever.Embed, []

    async def slowly(retriever: FakeRetriever, request: Any, context: Any) -> Any:
        read_chars.append(sum(map(len, request.texts)))
        await asyncio.sleep(read_chars[-1] / 1e4)
        return await embed(retriever, request, context)

    monkeypatch.setattr(retriever_client, "EMBED_TIMEOUT_S", 3.0)
    monkeypatch.setattr(FakeRetriever, "Embed", slowly)
    async with world(tiny_model) as gateway:

        async def post(num_chars: int) -> httpx.Response:
            texts = ["x" * 10_000] * (num_chars // 10_000)
            return await gateway.client.post("/v1/embeddings", json={"input": texts})

        for num_chars in (200_000, 300_000):
            refused = await post(num_chars)
            assert refused.status_code == 413, refused.text
            error = refused.json()["error"]
            assert error["param"] == "input"
            assert "which take longer than 3 s; send at most" in error["message"]
        assert (await post(10_000)).status_code == 200
        assert read_chars == [200_000, 10_000]


@pytest.mark.parametrize("paths", [QUESTION_PATHS, STATUS_PATHS])
def test_the_pools_name_routes(tiny_model: Path, paths: frozenset[str]) -> None:
    gateway = World(CONFIG.replace(model=str(tiny_model)))
    app = gateway.app()
    routes = {route.path for route in app.routes if isinstance(route, APIRoute)}
    assert paths <= routes | {"/openapi.json"}
