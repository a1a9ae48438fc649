"""Bodies are bounded where they are read, and every route with one does it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute

from ragcache_core.access.caller import Caller
from ragcache_core.access.json_bounds import MAX_NESTING, MAX_VALUES
from ragcache_core.errors import InvalidInput, TooLarge
from ragcache_gateway.admission.refusal import Refused
from ragcache_gateway.http import json_body
from ragcache_gateway.http.json_body import LARGE_BYTES, JsonRoute, LargeBodies, json_object
from ragcache_gateway.http.middleware.body_limit import BodyLimits
from tests.kit.gateway import CONFIG, World

LARGE = b" " * (LARGE_BYTES + 1)


@pytest.mark.parametrize(
    ("body", "kind", "problem"),
    [
        (b"[1]", InvalidInput, "is not a JSON object"),
        (b"{", InvalidInput, "is not valid JSON"),
        (b"\xff", InvalidInput, "is not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), InvalidInput, "is not UTF-8"),
        (b'{"a": %s}' % (b"9" * 5000), InvalidInput, "is not valid JSON"),
        (b'{"a":' * (MAX_NESTING + 1), InvalidInput, "is nested over"),
        (b'{"a": [%s]}' % b",".join([b"1"] * MAX_VALUES), TooLarge, "has over 5000 values"),
    ],
)
def test_what_is_no_usable_object_is_refused(body: bytes, kind: type, problem: str) -> None:
    with pytest.raises(kind, match=problem):
        json_object(body)


def test_a_byte_order_mark_is_accepted() -> None:
    assert json_object(b"\xef\xbb\xbf{}") == {}


def test_every_route_with_a_json_body_bounds_it(tiny_model: Path) -> None:
    app = World(CONFIG.replace(model=str(tiny_model))).app()
    routes = [one for one in app.routes if isinstance(one, APIRoute) and one.body_field]
    assert len(routes) >= 10
    assert all(isinstance(one, JsonRoute) for one in routes)


class Reading:
    """Reads bodies until it is told to stop."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0
        self.go_on = threading.Event()

    def __call__(self, body: bytes) -> int:
        self.now += 1
        self.most = max(self.most, self.now)
        assert self.go_on.wait(60)
        self.now -= 1
        return len(body)


async def test_one_large_body_of_a_key_is_read_at_a_time() -> None:
    bodies = LargeBodies(0)
    red, blue = Reading(), Reading()
    attack = [asyncio.create_task(bodies.read(Caller("red"), LARGE, red)) for _ in range(5)]
    await asyncio.sleep(0)
    assert await bodies.read(Caller("red"), b"{}", len) == 2
    blue.go_on.set()
    assert await bodies.read(Caller("blue"), LARGE, blue) == len(LARGE)
    red.go_on.set()
    assert await asyncio.gather(*attack) == [len(LARGE)] * 5
    assert red.most == 1


async def test_a_large_body_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_body, "TURN_TIMEOUT_S", 0.1)
    bodies, reading = LargeBodies(0), Reading()
    first = asyncio.create_task(bodies.read(Caller("red"), LARGE, reading))
    await asyncio.sleep(0)
    with pytest.raises(Refused, match="send one at a time"):
        await bodies.read(Caller("red"), LARGE, reading)
    reading.go_on.set()
    assert await first == len(LARGE)


def test_the_time_for_a_body_follows_from_its_size() -> None:
    limits = BodyLimits(max_bytes=8 << 20, question_max_bytes=1 << 18, timeout_s=60)
    assert limits.time_for(0) == 10
    assert limits.time_for(4 << 20) == 35
    assert limits.time_for(9 << 20) == 60
    short: Any = BodyLimits(max_bytes=100, question_max_bytes=100, timeout_s=0.1)
    assert short.time_for(0) == short.time_for(100) == 0.1
