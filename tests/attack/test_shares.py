"""A tenant with many connections that ignores ``Retry-After`` takes nothing from another one.

Counts and orders decide, and no times: what the fakes hold stays held until a test lets it go.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.attack.attacked_gateway import ENTRIES, QUESTION, AttackedGateway, attacked_gateway
from tests.kit.gateway import bearer
from tests.kit.wait import until

CHAT = "/v1/chat/completions"
SEARCH = "/v1/search"
BODIES = {CHAT: json.dumps(QUESTION).encode(), SEARCH: b'{"query": "x"}'}
CONNECTIONS = 60
SLOTS = 8
HEADROOM = 1
"""Slots that the flood leaves free, see ``fair_share``."""
SMALL = {"RAGCACHE_MAX_QUESTIONS": str(SLOTS), "RAGCACHE_MAX_DOCUMENT_REQUESTS": str(SLOTS)}


@asynccontextmanager
async def flood(gateway: AttackedGateway, path: str) -> AsyncIterator[Counter[int]]:
    """Send requests of the key ``red`` over many connections. Yields responses by status."""
    seen: Counter[int] = Counter()

    async def one_connection(client: httpx.AsyncClient) -> None:
        while True:
            answer = await client.post(path, content=BODIES[path])
            seen[answer.status_code] += 1
            assert answer.status_code == 200 or "Retry-After" in answer.headers

    headers = bearer("red") | {"Content-Type": "application/json"}
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{gateway.port}",
        headers=headers,
        trust_env=False,
        timeout=120,
        limits=httpx.Limits(max_connections=None),
    ) as client:
        tasks = [asyncio.create_task(one_connection(client)) for _ in range(CONNECTIONS)]
        try:
            yield seen
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def has_refused(seen: Counter[int], count: int) -> bool:
    return seen[429] >= count


@pytest.mark.parametrize("path", [CHAT, SEARCH])
async def test_a_flood_leaves_a_slot_to_another_tenant(
    tiny_model: Path, tmp_path: Path, path: str
) -> None:
    async with attacked_gateway(tiny_model, tmp_path, **SMALL) as gateway:
        fakes, go_on = gateway.fakes, asyncio.Event()
        if path == CHAT:
            fakes.engine.prefill = go_on
        else:
            fakes.retriever.hold = go_on

        def num_begun() -> int:
            return len(fakes.engine.requests if path == CHAT else fakes.retriever.searches)

        async with flood(gateway, path) as seen:
            await until(lambda: num_begun() == SLOTS - HEADROOM)
            await until(lambda: seen[429] >= 2 * CONNECTIONS)
            assert num_begun() == SLOTS - HEADROOM
            # Nothing of the flood ends before this one has begun.
            other = asyncio.create_task(gateway.post("blue", path, BODIES[path]))
            await until(lambda: num_begun() == SLOTS)
            assert seen[200] == 0
            go_on.set()
            answer = await other
        assert answer.status_code == 200, answer.text
        assert set(seen) <= {200, 429}


async def test_every_question_of_another_tenant_is_answered_beside_a_flood(
    tiny_model: Path, tmp_path: Path
) -> None:
    most = 2
    limited = "\n[[tenants]]\nname = {!r}\nmax_concurrent = " + str(most)
    entries = {name: text + limited.format(name) for name, text in ENTRIES.items()}
    async with attacked_gateway(tiny_model, tmp_path, entries, **SMALL) as gateway:
        async with flood(gateway, CHAT) as seen:
            for i in range(1, 11):
                await until(partial(has_refused, seen, i * CONNECTIONS // 4))
                answer = await gateway.post("blue", CHAT, BODIES[CHAT])
                # At the first attempt: a refusal would name a time to come again.
                assert answer.status_code == 200, answer.text
        assert set(seen) <= {200, 429}
        assert seen[200] > 0


async def test_a_tenant_has_no_more_in_the_engines_than_it_may(
    tiny_model: Path, tmp_path: Path
) -> None:
    most = 3
    entries = ENTRIES | {
        "red": ENTRIES["red"] + f'\n[[tenants]]\nname = "red"\nmax_concurrent = {most}'
    }
    async with attacked_gateway(tiny_model, tmp_path, entries, **SMALL) as gateway:
        engine, go_on = gateway.fakes.engine, asyncio.Event()
        engine.prefill = go_on
        async with flood(gateway, CHAT) as seen:
            await until(lambda: seen[429] >= 2 * CONNECTIONS)
            assert len(engine.requests) == most
            refused = await gateway.post("red", CHAT, BODIES[CHAT])
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "too_many_at_once"
            sent = [
                asyncio.create_task(gateway.post("blue", CHAT, BODIES[CHAT]))
                for _ in range(SLOTS - most - HEADROOM)
            ]
            await until(lambda: len(engine.requests) == SLOTS - HEADROOM)
            go_on.set()
            assert {answer.status_code for answer in await asyncio.gather(*sent)} == {200}
