"""Overload: an engine stays busy, what it accepts keeps the limit, and the rest gets a 429.

The predicted times are minutes, and those that pass are seconds. So a slow machine decides nothing.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from ragcache_gateway.admission.slo import MIN_PREDICTIONS
from ragcache_gateway.engines import engine_load
from tests.kit.gateway import World, world
from tests.kit.wait import until

TOKEN_S = 1.0
LIMIT_S = 1000
CAPACITY, OFFERED, ROUNDS = 2, 3, 6
"""Questions that the engine answers in a round, and those that come: 1.5 times as many."""
NO_REUSE = {"reuse": "off"}
"""Every question costs the same."""


class Waiting:
    """The accepted questions, the first one first. Each waits until it is served."""

    def __init__(self, gateway: World) -> None:
        self._gateway = gateway
        self._accepted: list[tuple[asyncio.Event, asyncio.Task[httpx.Response]]] = []
        self.refused: list[httpx.Response] = []

    def __len__(self) -> int:
        return len(self._accepted)

    async def offer(self) -> bool:
        """Ask a question. Return whether the engine got it."""
        engine = self._gateway.engine
        engine.prefill = prefill = asyncio.Event()
        seen = len(engine.requests)
        asking = asyncio.create_task(self._gateway.ask(ragcache=NO_REUSE))
        await until(lambda: len(engine.requests) > seen or asking.done(), "an answer or a request")
        if len(engine.requests) > seen:
            self._accepted.append((prefill, asking))
            return True
        self.refused.append(asking.result())
        return False

    async def serve(self) -> httpx.Response:
        """Have the engine answer the question that waits for the longest time."""
        prefill, asking = self._accepted.pop(0)
        prefill.set()
        return await asking


async def test_an_overloaded_engine_is_never_idle_and_refuses_the_rest(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_load, "REFRESH_S", 0.05)
    async with world(tiny_model, slo_first_token_ms=1000 * LIMIT_S) as gateway:
        gateway.records.token_s, gateway.records.pass_tokens = TOKEN_S, 1000
        await until(lambda: gateway.records.costs_sent >= 2, "costs of the engine")
        for _ in range(MIN_PREDICTIONS):
            assert (await gateway.ask(ragcache=NO_REUSE)).status_code == 200
        waiting = Waiting(gateway)
        while await waiting.offer():
            assert len(waiting) < LIMIT_S, "the queue has no end"
        # The last one has so many before it that it is predicted to be at its limit.
        full = len(waiting)
        assert 1 < full <= LIMIT_S / (len(gateway.engine.requests[-1]["prompt"]) * TOKEN_S)
        for _ in range(ROUNDS):
            answers = [await waiting.serve() for _ in range(CAPACITY)]
            assert [one.status_code for one in answers] == [200] * CAPACITY
            accepted = [await waiting.offer() for _ in range(OFFERED)]
            assert sum(accepted) == CAPACITY, "all that the engine can answer, and no more"
            assert len(waiting) == full
        while len(waiting):
            assert (await waiting.serve()).status_code == 200
        assert len(waiting.refused) == 1 + ROUNDS * (OFFERED - CAPACITY)
        for refused in waiting.refused:
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "first_token_over_limit"
            assert 1 <= int(refused.headers["Retry-After"]) <= 60
