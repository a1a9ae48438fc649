"""A tenant that floods a gateway leaves the others their share of it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import pytest_asyncio

from ragcache_core.scheduling.refusal_pace import BURST, REFUSALS_PER_S
from ragcache_gateway.pipeline import steps
from tests.kit.gateway import CONFIG, FakeEngine, World, bearer, write_keys
from tests.kit.wait import until

SLOTS = 16
HEADROOM = 2
ENTRIES = {
    "red": 'scopes = ["ask"]\ntenant = "red"',
    "blue": 'scopes = ["ask"]\ntenant = "blue"',
}
TENANTS = '[[tenants]]\nname = "blue"\nweight = 3\n'
HELD = 'requests_in_flight{pool="question"}'
QUESTION = {"messages": [{"role": "user", "content": "Where?"}], "ragcache": {"retrieve": False}}


@pytest_asyncio.fixture
async def gateway(tmp_path: Path, tiny_model: Path) -> AsyncIterator[World]:
    file = write_keys(tmp_path / "keys.toml", ENTRIES)
    file.write_text(file.read_text() + TENANTS)
    settings = CONFIG.replace(api_keys_file=file, max_questions=SLOTS)
    async with AsyncExitStack() as stack:
        yield await World(settings).start(stack, tiny_model)


async def ask(gateway: World, name: str) -> httpx.Response:
    return await gateway.client.post("/v1/chat/completions", json=QUESTION, headers=bearer(name))


async def test_a_flood_takes_no_slot_of_a_tenant_below_its_share(gateway: World) -> None:
    gateway.engine.prefill = asyncio.Event()
    red, blue = [], []
    for held in range(SLOTS - HEADROOM):
        red.append(asyncio.create_task(ask(gateway, "red")))
        await gateway.until_metric(HELD, held + 1)
    for _ in range(3):
        refused = await ask(gateway, "red")
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
    for held in range(SLOTS - HEADROOM, SLOTS):
        blue.append(asyncio.create_task(ask(gateway, "blue")))
        await gateway.until_metric(HELD, held + 1)
    full = await ask(gateway, "blue")
    assert full.status_code == 429
    assert "14 of them by tenant 'red'" in (await ask(gateway, "red")).json()["error"]["message"]
    gateway.engine.prefill.set()
    statuses = [one.status_code for one in await asyncio.gather(*red, *blue)]
    assert statuses == [200] * SLOTS


async def test_freed_slots_go_to_the_tenant_below_its_share(gateway: World) -> None:
    """All of both want more, so blue gets three slots for each one of red."""
    holds: dict[str, list[asyncio.Task[httpx.Response]]] = {"red": [], "blue": []}
    gateway.engine.prefill = asyncio.Event()
    held = 0

    async def fill() -> None:
        """Let both ask until each is refused; red asks first and more often."""
        nonlocal held
        for name in ("red", "red", "blue", "red"):
            while True:
                task = asyncio.create_task(ask(gateway, name))
                await asyncio.wait(
                    [task, taken := asyncio.create_task(has_taken(held + 1))],
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if task.done():
                    assert task.result().status_code == 429
                    taken.cancel()
                    break
                holds[name].append(task)
                held += 1

    async def has_taken(count: int) -> None:
        await gateway.until_metric(HELD, count)

    await fill()
    while len(holds["red"]) > SLOTS // 4:
        holds["red"].pop().cancel()
        held -= 1
        await gateway.until_metric(HELD, held)
        await fill()
    assert {name: len(tasks) for name, tasks in holds.items()} == {"red": 4, "blue": 12}
    gateway.engine.prefill.set()
    for tasks in holds.values():
        assert {one.status_code for one in await asyncio.gather(*tasks)} == {200}


@pytest.mark.parametrize("limited", ["key", "tenant"])
async def test_a_request_over_max_concurrent_is_refused_before_its_body(
    tmp_path: Path, tiny_model: Path, limited: str
) -> None:
    """Others are answered; a flood of refusals is slowed down, and a place is given back."""
    limit = "max_concurrent = 2"
    entries = {
        name: f"{one}\n{limit}" if limited == "key" else one for name, one in ENTRIES.items()
    }
    file = write_keys(tmp_path / "keys.toml", entries)
    if limited == "tenant":
        file.write_text(f'{file.read_text()}[[tenants]]\nname = "red"\n{limit}\n')
    async with AsyncExitStack() as stack:
        settings = CONFIG.replace(api_keys_file=file, max_questions=SLOTS)
        gateway = await World(settings).start(stack, tiny_model)
        gateway.engine.prefill = asyncio.Event()
        held = []
        for count in (1, 2):
            held.append(asyncio.create_task(ask(gateway, "red")))
            await gateway.until_metric(HELD, count)
        headers = bearer("red") | {"content-type": "application/json"}
        refused = await gateway.client.post(
            "/v1/chat/completions", content=b"no JSON", headers=headers
        )
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "too_many_at_once"
        assert f"the {limited} 'red'" in refused.json()["error"]["message"]
        assert int(refused.headers["Retry-After"]) >= 1
        began_s = asyncio.get_running_loop().time()
        flood = await asyncio.gather(*(ask(gateway, "red") for _ in range(2 * BURST)))
        assert {one.status_code for one in flood} == {429}
        assert asyncio.get_running_loop().time() - began_s >= 0.9 * BURST / REFUSALS_PER_S - 0.2
        other = asyncio.create_task(ask(gateway, "blue"))
        await gateway.until_metric(HELD, 3)
        gateway.engine.prefill.set()
        assert {one.status_code for one in await asyncio.gather(*held, other)} == {200}
        assert (await ask(gateway, "red")).status_code == 200


@dataclass
class PriorityEngine:
    """Admits one request at a time to a fake engine, the lowest priority first, as vLLM does."""

    engine: FakeEngine
    waiting: list[tuple[int, int, asyncio.Event]] = field(default_factory=list)
    tenants: list[str] = field(default_factory=list)  # of the admitted requests, in order
    numbers: Iterator[int] = field(default_factory=itertools.count)
    admits: asyncio.Event = field(default_factory=asyncio.Event)
    is_busy: bool = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/v1/chat/completions":
            return await self.engine(scope, receive, send)
        content, more = b"", True
        while more:
            message = await receive()
            content += message.get("body", b"")
            more = message.get("more_body", False)
        body = json.loads(content)
        turn = asyncio.Event()
        heapq.heappush(self.waiting, (body["priority"], next(self.numbers), turn))
        self._admit()
        await turn.wait()
        self.tenants.append(body["cache_salt"].removeprefix("tenant:"))
        parts = iter([{"type": "http.request", "body": content, "more_body": False}])

        async def replay() -> Any:
            return next(parts, None) or await receive()

        try:
            await self.engine(scope, replay, send)
        finally:
            self.is_busy = False
            self._admit()

    def _admit(self) -> None:
        if self.admits.is_set() and self.waiting and not self.is_busy:
            self.is_busy = True
            heapq.heappop(self.waiting)[2].set()

    def has_waiting(self, count: int) -> bool:
        return len(self.waiting) == count


async def test_a_tenant_does_not_wait_behind_the_flood_of_another_one(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red has sent twelve questions before blue sends three, and blue weighs three times as much.

    Each is predicted to take so long that the time until all are sent does not matter.
    """
    monkeypatch.setattr(steps, "work_s", lambda _: 40.0)
    file = write_keys(tmp_path / "keys.toml", ENTRIES)
    file.write_text(file.read_text() + TENANTS)
    async with AsyncExitStack() as stack:
        world = World(CONFIG.replace(api_keys_file=file))
        served = PriorityEngine(world.engine)
        world.engine = cast("FakeEngine", served)
        gateway = await world.start(stack, tiny_model)
        asked = []
        for number, name in enumerate(["red"] * 12 + ["blue"] * 3, 1):
            asked.append(asyncio.create_task(ask(gateway, name)))
            await until(partial(served.has_waiting, number))
        served.admits.set()
        served._admit()
        assert {one.status_code for one in await asyncio.gather(*asked)} == {200}
        assert served.tenants.count("red") == 12
        assert served.tenants[:8].count("blue") == 3, served.tenants
