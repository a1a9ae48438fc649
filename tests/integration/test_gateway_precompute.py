"""Chunks of written documents are computed before anybody asks, and never while somebody does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from ragcache_core.keys import chunk_key
from ragcache_core.plan import Action, ReusePlan, document_name
from ragcache_core.plan_seal import is_sealed
from ragcache_gateway import precompute
from ragcache_gateway.answer import DOMAIN
from ragcache_kv.model_folder import load_model_folder
from ragcache_wire.plan_keys import PlanKeys
from tests.gateway_fakes import World, world


@pytest.fixture
async def gateway(tiny_model: Path) -> AsyncGenerator[World, None]:
    async with world(tiny_model, precompute=True, reuse="blend") as running:
        yield running


async def put(gateway: World, name: str, text: str = "") -> None:
    body = {"id": name, "text": text or f"Text of {name}."}
    assert (await gateway.client.post("/v1/documents", json=body)).status_code == 200


async def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not happened():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def counted(gateway: World, name: str) -> dict[str, float]:
    text = (await gateway.client.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith(f"ragcache_gateway_{name}")]
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


async def test_each_chunk_is_computed_right_behind_the_template(gateway: World) -> None:
    before_ms = time.time_ns() // 1_000_000
    await put(gateway, "a.md")
    await put(gateway, "b.md")
    await until(lambda: len(gateway.engine.requests) == 2)
    space = load_model_folder(gateway.config.model).space("auto")
    for name, body in zip("ab", gateway.engine.requests, strict=True):
        plan = ReusePlan.from_json(body["kv_transfer_params"]["ragcache"])
        _, chunk = plan.segments
        ids = gateway.prompts().encode_chunk(f"Text of {name}.md.")
        assert chunk.chunk == chunk_key(space, DOMAIN, ids)
        assert body["prompt"][chunk.start : chunk.end] == ids
        assert (chunk.action, plan.domain) == (Action.BLEND, DOMAIN)
        # So that a delete finds it, and one that comes first is not undone.
        assert chunk.document == document_name("default", f"{name}.md")
        assert before_ms <= plan.planned_at_ms <= time.time_ns() // 1_000_000
        assert body["max_tokens"] == 1


async def test_its_plans_are_sealed_like_those_of_questions(
    tiny_model: Path, tmp_path: Path
) -> None:
    key, path = bytes([1] * 32), tmp_path / "keys"
    path.write_text(key.hex())
    keys = PlanKeys(path)
    async with world(tiny_model, precompute=True, plan_keys=keys) as gateway:
        await put(gateway, "a.md")
        await until(lambda: len(gateway.engine.requests) == 1)
        [body] = gateway.engine.requests
    params = body["kv_transfer_params"]
    assert is_sealed(params["ragcache"], body["prompt"], params["ragcache_seal"], [key])


async def test_it_is_the_prefix_that_questions_have(gateway: World) -> None:
    await put(gateway, "a.md")
    await until(lambda: len(gateway.engine.requests) == 1)
    await gateway.ask()
    plans = [body["kv_transfer_params"]["ragcache"] for body in gateway.engine.requests]
    assert plans[0]["segments"][0] == plans[1]["segments"][0]


async def test_an_unchanged_document_is_not_computed_again(gateway: World) -> None:
    await put(gateway, "a.md")
    await put(gateway, "a.md")
    await put(gateway, "b.md")
    await until(lambda: len(gateway.engine.requests) == 2)
    await asyncio.sleep(0.1)
    assert len(gateway.engine.requests) == 2


async def test_it_waits_while_a_question_is_answered(gateway: World) -> None:
    gateway.engine.pause = asyncio.Event()
    asked = asyncio.create_task(gateway.ask())
    await gateway.engine.holding.wait()
    await put(gateway, "a.md")
    await asyncio.sleep(0.2)
    assert len(gateway.engine.requests) == 1
    waiting = await counted(gateway, "precompute_waiting_chunks")
    assert set(waiting.values()) == {1.0}
    gateway.engine.pause.set()
    assert (await asked).status_code == 200
    await until(lambda: len(gateway.engine.requests) == 2)


async def test_a_chunk_that_the_engine_refuses_holds_up_no_other(tiny_model: Path) -> None:
    # Its health is not looked at meanwhile: that, too, would be refused.
    async with world(tiny_model, precompute=True, engine_watch_s=60) as gateway:
        await until(lambda: gateway.engine.probes == 1)
        gateway.engine.refuse = (400, {"error": {"message": "too long"}})
        await put(gateway, "a.md")
        refused: dict[str, float] = {}
        deadline = time.monotonic() + 10
        while not any("refused" in name for name in refused):
            assert time.monotonic() < deadline
            refused = await counted(gateway, "precomputed_chunks_total")
        gateway.engine.refuse = None
        await put(gateway, "b.md")
        await until(lambda: len(gateway.engine.requests) == 1)


async def test_an_engine_that_is_away_is_waited_for(
    gateway: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precompute, "RETRY_S", 0.05)
    gateway.engine.refuse = (500, {"error": {"message": "it is starting"}})
    await put(gateway, "a.md")
    await asyncio.sleep(0.2)
    gateway.engine.refuse = None
    await until(lambda: len(gateway.engine.requests) == 1)


async def test_what_does_not_fit_is_left_to_its_first_visitor(
    gateway: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precompute, "MAX_WAITING_BYTES", 20)
    gateway.engine.pause = asyncio.Event()
    asked = asyncio.create_task(gateway.ask())
    await gateway.engine.holding.wait()
    for name in ("a.md", "b.md", "c.md"):
        await put(gateway, name)  # 13 bytes each
    gateway.engine.pause.set()
    await asked
    await until(lambda: len(gateway.engine.requests) == 2)
    await asyncio.sleep(0.1)
    assert len(gateway.engine.requests) == 2
    found = await counted(gateway, "precomputed_chunks_total")
    assert [value for name, value in found.items() if "dropped" in name] == [2.0]


async def test_nothing_is_computed_unless_that_is_asked_for(tiny_model: Path) -> None:
    async with world(tiny_model) as gateway:
        await put(gateway, "a.md")
        await asyncio.sleep(0.2)
        assert gateway.engine.requests == []
