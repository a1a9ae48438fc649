"""A gateway precomputes in a real vLLM server with a real cache store, behind other requests."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.processes import CacheStore, Engine
from ragcache_core.identity.keys import PUBLIC_DOMAIN, chunk_key
from ragcache_core.scheduling.priority import BACKGROUND_BAND, QueuePosition
from ragcache_core.store_api import Deletion, LookupKey, StoredVariant
from ragcache_gateway.background import precompute
from ragcache_kv.model.folder import load_model_folder
from ragcache_kv.store_client.client import StoreClient
from ragcache_wire.v1 import retriever_pb2
from ragcache_wire.watched.members import FixedMembers
from tests.integration.engine.conftest import STEP_TOKENS
from tests.kit.gateway import (
    CONFIG,
    FakeRetriever,
    World,
    chunk,
    serving,
    serving_retriever,
)
from tests.kit.wait import until

pytestmark = pytest.mark.timeout(600)

NUM_PREFILLS = 40
MAX_LENGTH = 4096
LONG = " ".join(f"item {number} of the long list" for number in range(120))


@dataclass
class Site:
    """The services that the gateway uses."""

    store: CacheStore
    engine: Engine
    client: httpx.AsyncClient

    async def counted(self, *names: str) -> list[int]:
        """Return vLLM's counters as of its last step."""
        lines = (await self.client.get("/metrics")).text.splitlines()
        return [
            sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if line.startswith(name + "{"))
            for name in names
        ]


@pytest.fixture
async def site(running: tuple[CacheStore, Engine]) -> AsyncGenerator[Site, None]:
    store, engine = running
    settings: dict[str, Any] = {"timeout": 120, "trust_env": False}
    async with httpx.AsyncClient(base_url=engine.url, **settings) as client:
        yield Site(store, engine, client)


@pytest.fixture(autouse=True)
def no_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute a document at once, without a wait for others."""
    monkeypatch.setattr(precompute, "LINGER_S", 0.0)


@pytest.fixture
async def gateway(site: Site, tiny_model: Path) -> AsyncGenerator[World, None]:
    async with AsyncExitStack() as stack:
        retriever = FakeRetriever()  # other calls are not served
        address = await stack.enter_async_context(serving_retriever(retriever))
        config = CONFIG.replace(
            model=str(tiny_model),
            model_name="model",
            max_model_len=MAX_LENGTH,
            retriever=address,
            cachestore=FixedMembers((site.store.address,)),
            engines=(site.engine.address,),
            reuse="blend",
            precompute=True,
        )
        world = World(config, retriever=retriever)
        port = await stack.enter_async_context(serving(world.app()))
        world.client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60)
        )
        yield world


async def write(gateway: World, name: str, text: str) -> None:
    reply = await gateway.client.post("/v1/documents", json={"id": name, "text": text})
    assert reply.status_code == 200


async def outcomes(gateway: World) -> Counter[str]:
    text = (await gateway.client.get("/metrics")).text
    found: Counter[str] = Counter()
    for line in text.splitlines():
        if line.startswith("ragcache_gateway_precomputed_chunks_total{"):
            labels, value = line.rsplit(" ", 1)
            found[labels.split('"')[1]] += int(float(value))
    return +found  # without outcomes that have not occurred


async def wait_until_computed(gateway: World) -> None:
    async def is_over() -> bool:
        return bool(await outcomes(gateway))

    await until(is_over)
    assert await outcomes(gateway) == {"computed": 1}


def held(site: Site, gateway: World, text: str) -> tuple[StoredVariant, ...]:
    space = load_model_folder(gateway.config.model).space("bfloat16")
    key = chunk_key(space, PUBLIC_DOMAIN, gateway.prompts().encode_chunk(text))
    client = StoreClient(site.store.address)
    try:
        return client.lookup([LookupKey(key)], 60).variants[0].stored
    finally:
        client.close()


async def wait_until_stored(site: Site, gateway: World, text: str) -> StoredVariant:
    """Wait: values are saved after the answer."""

    async def is_held() -> bool:
        return bool(held(site, gateway, text))

    await until(is_held)
    [one] = held(site, gateway, text)
    return one


async def test_a_chunk_computed_in_pieces_equals_one_that_a_question_computes(
    site: Site, gateway: World
) -> None:
    text = LONG + " as one."
    await write(gateway, "whole.md", text)
    await wait_until_computed(gateway)
    one = await wait_until_stored(site, gateway, text)
    num_tokens = len(gateway.prompts().encode_chunk(text))
    assert num_tokens > 4 * STEP_TOKENS
    assert (one.info.num_tokens, one.info.serves_exact) == (num_tokens, True)

    gateway.retriever.hits = [retriever_pb2.Hit(chunk=chunk("whole.md", 0, text), score=0.9)]
    body: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
    found = (await gateway.ask(**body, ragcache={"reuse": "exact"})).json()
    computed = (await gateway.ask(**body, ragcache={"reuse": "off"})).json()
    cache = found["ragcache"]["cache"]
    assert cache["local_tokens"] + cache["loaded_tokens"] > num_tokens
    assert found["choices"][0]["message"] == computed["choices"][0]["message"]
    assert await outcomes(gateway) == {"computed": 1}


async def test_a_context_that_was_blended_twice_is_exact_afterwards(
    site: Site, gateway: World
) -> None:
    texts = [f"{LONG[:800]} ({side})" for side in ("left", "right", "middle")]
    for index, text in enumerate(texts):
        await write(gateway, f"{index}.md", text)
        await wait_until_stored(site, gateway, text)
    gateway.retriever.hits = [
        retriever_pb2.Hit(chunk=chunk(f"{index}.md", 0, text), score=0.9 - index / 10)
        for index, text in enumerate(texts)
    ]
    body: dict[str, Any] = {"max_tokens": 8, "temperature": 0}

    async def ask(number: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": f"Which items, number {number}?"}]
        found: dict[str, Any] = (await gateway.ask(**body, messages=messages)).json()
        return found

    async def is_exact_now() -> bool:
        if (await outcomes(gateway))["computed"] != len(texts) + 1:
            return False
        # Chunks are counted before they are saved. Then the last one has two positions: it was
        # written after the first one, and in the context it comes after both.
        # A blend may have saved an approximate variant there before.
        last = [one.info for one in held(site, gateway, texts[-1]) if one.info.serves_exact]
        return len({info.base_position for info in last}) > 1

    first, second = await ask(1), await ask(2)
    for answer in (first, second):
        assert answer["ragcache"]["cache"]["recomputed_tokens"] > 0
    await until(is_exact_now)
    third = await ask(3)
    cache = third["ragcache"]["cache"]
    assert cache["recomputed_tokens"] == cache["blended_tokens"] == 0
    assert cache["local_tokens"] + cache["loaded_tokens"] > 0.9 * cache["prompt_tokens"]


async def test_a_stored_chunk_is_not_computed_again(site: Site, gateway: World) -> None:
    await write(gateway, "a.md", "A chunk that two documents have.")
    await wait_until_computed(gateway)
    await wait_until_stored(site, gateway, "A chunk that two documents have.")
    [before] = await site.counted("vllm:request_success_total")
    await write(gateway, "b.md", "A chunk that two documents have.")

    async def is_over() -> bool:
        return "stored" in await outcomes(gateway)

    await until(is_over)
    assert await outcomes(gateway) == {"computed": 1, "stored": 1}
    assert await site.counted("vllm:request_success_total") == [before]


async def test_another_gateways_question_is_answered_before_a_running_prefill(
    site: Site, gateway: World
) -> None:
    [before] = await site.counted("vllm:request_success_total")
    text = LONG + " twice. " + LONG[:2000]
    await write(gateway, "long.md", text)

    async def is_under_way() -> bool:
        [ended] = await site.counted("vllm:request_success_total")
        return ended > before

    await until(is_under_way)
    # A question of another gateway.
    question = {"model": "model", "prompt": list(range(20, 320)), "max_tokens": 2}
    assert (await site.client.post("/v1/completions", json=question)).status_code == 200
    assert await outcomes(gateway) == {}
    assert held(site, gateway, text) == ()
    await wait_until_computed(gateway)


async def test_a_chunk_that_questions_miss_twice_is_precomputed(site: Site, gateway: World) -> None:
    texts = [LONG[:1200] + " one", "a chunk between them " * 10, LONG[-1200:] + " two"]
    for name, text in (("one.md", texts[0]), ("two.md", texts[2])):
        await write(gateway, name, text)
        await wait_until_stored(site, gateway, text)
    gateway.retriever.hits = [
        retriever_pb2.Hit(chunk=chunk(f"{index}.md", 0, text), score=0.9 - index / 10)
        for index, text in enumerate(texts)
    ]
    sizes = [len(gateway.prompts().encode_chunk(text)) for text in texts]

    async def ask(question: str) -> None:
        use = (await gateway.ask(question, max_tokens=2)).json()["ragcache"]["cache"]
        assert use["local_tokens"] + use["loaded_tokens"] > sum(sizes)
        assert use["recomputed_tokens"] >= sizes[1]

    await ask("What is one?")
    assert not (await wait_until_stored(site, gateway, texts[1])).info.serves_exact
    assert await asked_for(gateway) == 0
    forget(site, gateway, texts[1])
    await ask("What is two?")

    async def is_asked_for() -> bool:
        return await asked_for(gateway) == 2  # and the context that was recomputed with it

    await until(is_asked_for)


async def asked_for(gateway: World) -> int:
    """Return how many precomputations ended that questions had asked for."""
    lines = (await gateway.client.get("/metrics")).text.splitlines()
    counts = [
        int(float(line.rsplit(" ", 1)[1]))
        for line in lines
        if line.startswith("ragcache_gateway_precomputed_chunks_total{")
        if 'source="asked"' in line
    ]
    return sum(counts)


def forget(site: Site, gateway: World, text: str) -> None:
    """Delete a chunk from the store."""
    space = load_model_folder(gateway.config.model).space("bfloat16")
    key = chunk_key(space, PUBLIC_DOMAIN, gateway.prompts().encode_chunk(text))
    client = StoreClient(site.store.address)
    try:
        client.delete(Deletion(uuid.uuid4().bytes, (key,), made_at_ms=time.time_ns() // 1_000_000))
    finally:
        client.close()


async def test_a_question_overtakes_waiting_prefills(site: Site) -> None:
    ended = []

    async def ask(name: str, seed: int, num_tokens: int, position: QueuePosition) -> None:
        prompt = [(seed * index) % 350 for index in range(num_tokens)]
        priority = position.priority(time.time_ns() // 1_000_000)
        body = {"model": "model", "prompt": prompt, "max_tokens": 1, "priority": priority}
        reply = await site.client.post("/v1/completions", json=body)
        assert reply.status_code == 200
        ended.append(name)

    async with asyncio.TaskGroup() as group:
        # Six steps each, two at a time, so most of them wait.
        for seed in range(11, 11 + NUM_PREFILLS):
            background = QueuePosition(BACKGROUND_BAND)
            group.create_task(ask("prefill", seed, 6 * STEP_TOKENS, background))
        while await num_waiting(site) < NUM_PREFILLS // 2:
            assert len(ended) < NUM_PREFILLS, "the prefills never waited"
            await asyncio.sleep(0.01)
        group.create_task(ask("question", 7, STEP_TOKENS, QueuePosition(0)))
    assert len(ended) == NUM_PREFILLS + 1
    overtaken = NUM_PREFILLS - ended.index("question")
    assert overtaken > 4, "in the order of arrival, at most one prefill ends after the question"


async def num_waiting(site: Site) -> float:
    """Return how many requests wait in the engine."""
    page = (await site.client.get("/metrics")).text
    lines = [one for one in page.splitlines() if one.startswith("vllm:num_requests_waiting{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
