"""A gateway that is killed between a change and its deletes leaves no KV of the removed text.

The retriever (SQLite), the cache store (RocksDB) and the gateway are real. The retriever holds its
reply back, so that the gateway is killed after the commit and before the first delete.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from harness.processes import free_port
from ragcache_core.identity.keys import (
    PUBLIC_DOMAIN,
    VariantKey,
    chunk_key_of_digest,
    token_digest,
)
from ragcache_core.identity.variant import Origin
from ragcache_core.plan.reuse_plan import document_name
from ragcache_gateway.prompts.builder import PromptBuilder
from ragcache_gateway.prompts.passages import passage_text
from ragcache_gateway.prompts.tokenizer import load_tokenizer
from ragcache_kv.model.folder import load_model_folder
from ragcache_retriever.service import SERVICE_NAME, RetrieverService
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.server import GrpcServer
from ragcache_wire.v1 import retriever_pb2_grpc
from tests.integration.gateway.test_process import environment, start, until_it_answers
from tests.kit.retriever import make_knowledge_base, tokenizer_of
from tests.kit.store import ServedStore, get_value, put_value, serving
from tests.kit.wait import until

TEXT = "\n\n".join(
    f"Part {i} of this page says something of its own, number {i}." for i in range(9)
)


class HeldService(RetrieverService):
    """A retriever that holds the replies of changes back while ``holds`` is set."""

    holds = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.committed = asyncio.Event()

    async def _hold(self) -> None:
        if self.holds:
            self.committed.set()
            await asyncio.Event().wait()

    async def UpsertDocument(self, request: Any, context: Any) -> Any:  # noqa: N802
        reply = await super().UpsertDocument(request, context)
        await self._hold()
        return reply

    async def DeleteDocument(self, request: Any, context: Any) -> Any:  # noqa: N802
        reply = await super().DeleteDocument(request, context)
        await self._hold()
        return reply

    async def PutCollection(self, request: Any, context: Any) -> Any:  # noqa: N802
        reply = await super().PutCollection(request, context)
        await self._hold()
        return reply


@dataclass
class Platform:
    """A retriever and a store in this process, and a gateway of its own process."""

    model: Path
    retriever: HeldService
    retriever_address: str
    store: ServedStore
    port: int = field(default_factory=free_port)
    process: asyncio.subprocess.Process | None = None
    client: httpx.AsyncClient = field(init=False)

    async def start_gateway(self) -> None:
        env = environment(self.model, f"127.0.0.1:{self.port}") | {
            "RAGCACHE_RETRIEVER": self.retriever_address,
            "RAGCACHE_CACHESTORE": self.store.address,
        }
        self.process = await start(env)
        await until_it_answers(self.client)

    async def kill_gateway(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.communicate()

    async def put_document(self, text: str) -> dict[str, Any]:
        reply = await self.client.post("/v1/documents", json={"id": "d", "text": text})
        assert reply.status_code == 200, reply.text
        written: dict[str, Any] = reply.json()
        return written

    async def store_kv(self) -> list[VariantKey]:
        """Store KV of every chunk of the document, as an engine would."""
        client = RetrieverClient(self.retriever_address)
        try:
            stages = [one async for one in client.search("default", "part number", 1000)]
        finally:
            await client.close()
        texts = {hit.chunk.ordinal: passage_text(hit.chunk) for hit in stages[-1].hits}
        prompts = PromptBuilder(
            load_tokenizer(self.model), max_model_len=1024, default_max_tokens=16, cache_bytes=1024
        )
        space = load_model_folder(str(self.model)).space("auto")
        keys = []
        for ordinal in sorted(texts):
            digest = token_digest(prompts.encode_chunk(texts[ordinal]))
            key = VariantKey(chunk_key_of_digest(space, PUBLIC_DOMAIN, digest), bytes(16))
            origin = Origin(document=document_name("default", "d"), domain=PUBLIC_DOMAIN)
            put_value(self.store.client, key, b"kv" * 512, origin=origin)
            keys.append(key)
        assert len(keys) > 2
        assert self.stored(keys) == keys
        return keys

    def stored(self, keys: Sequence[VariantKey]) -> list[VariantKey]:
        get = get_value
        return [key for key in keys if get(self.store.client, key) is not None]

    async def kill_during(self, change: Any) -> None:
        """Kill the gateway after the retriever has committed a change of it."""
        self.retriever.holds = True
        request = asyncio.create_task(change)
        await asyncio.wait_for(self.retriever.committed.wait(), 60)
        await self.kill_gateway()
        with contextlib.suppress(httpx.TransportError):
            await request
        self.retriever.holds = False

    async def until_gone(self, keys: Sequence[VariantKey]) -> None:
        """Wait until no variant is stored."""
        await until(lambda: not self.stored(keys))


@pytest_asyncio.fixture
async def platform(tmp_path: Path, tiny_model: Path) -> AsyncIterator[Platform]:
    knowledge_base = make_knowledge_base(
        tmp_path / "documents", tokenizer_of(tiny_model), clock=time.time
    )
    service = HeldService(knowledge_base)
    server = GrpcServer(
        "127.0.0.1:0",
        [SERVICE_NAME],
        lambda server: retriever_pb2_grpc.add_RetrieverServicer_to_server(service, server),
    )
    await server.start()
    await knowledge_base.load()
    await server.set_ready()
    with serving(tmp_path / "kv") as store:
        platform = Platform(tiny_model, service, f"127.0.0.1:{server.port}", store)
        url = f"http://127.0.0.1:{platform.port}"
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
            platform.client = client
            try:
                await platform.start_gateway()
                yield platform
            finally:
                await platform.kill_gateway()
                await server.stop()
                await knowledge_base.close()


Change = Callable[[Platform], Awaitable[httpx.Response]]

DELETE: Change = lambda platform: platform.client.delete("/v1/documents/d")  # noqa: E731
UPDATE: Change = lambda platform: platform.client.post(  # noqa: E731
    "/v1/documents", json={"id": "d", "text": "Another text."}
)
NEW_CHUNKING: Change = lambda platform: platform.client.put(  # noqa: E731
    "/v1/collections/default", json={"chunking": {"size_tokens": 24, "overlap_tokens": 0}}
)


@pytest.mark.parametrize("change", [DELETE, UPDATE, NEW_CHUNKING])
async def test_a_change_that_the_gateway_does_not_survive_is_completed(
    platform: Platform, change: Change
) -> None:
    await platform.put_document(TEXT)
    keys = await platform.store_kv()
    await platform.kill_during(change(platform))
    assert platform.stored(keys) == keys
    await platform.start_gateway()
    await platform.until_gone(keys)
    if change is DELETE:
        # A tombstone refuses what an engine is still computing.
        [deletion] = platform.store.store.deletes.after(0).deletions
        assert deletion.documents == (document_name("default", "d"),)
        assert set(deletion.chunks) == {key.chunk for key in keys}


@pytest.mark.parametrize("change", [DELETE, UPDATE])
async def test_a_repeated_change_completes_the_first_one(
    platform: Platform, change: Change
) -> None:
    await platform.put_document(TEXT)
    keys = await platform.store_kv()
    await platform.kill_during(change(platform))
    await platform.start_gateway()
    reply = await change(platform)
    assert reply.status_code == 200
    assert platform.stored(keys) == []
    # The background task may have been first.
    assert reply.json()["removed_variants"] in (len(keys), 0)
    if change is DELETE:
        again = await change(platform)
        assert (again.status_code, again.json()["removed_variants"]) == (200, 0)
        never = await platform.client.delete("/v1/documents/never")
        assert never.status_code == 404
    else:
        assert reply.json()["changed"] is False


async def test_a_change_that_was_not_interrupted_leaves_an_empty_outbox(platform: Platform) -> None:
    await platform.put_document(TEXT)
    keys = await platform.store_kv()
    reply = await DELETE(platform)
    assert reply.json()["removed_variants"] == len(keys)
    assert platform.stored(keys) == []
    client = RetrieverClient(platform.retriever_address)

    async def is_empty() -> bool:
        return not (await client.claim_deletes(10)).unacknowledged

    try:
        await until(is_empty)
    finally:
        await client.close()
