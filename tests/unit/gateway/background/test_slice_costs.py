"""The length of slices follows from the engine's costs, and from the time of its requests."""

from __future__ import annotations

from typing import Any

import pytest

from ragcache_core.errors import Unavailable
from ragcache_gateway.background.slice_costs import (
    STEP_SHARE,
    UNKNOWN_STEP_TOKENS,
    SliceCosts,
)
from ragcache_gateway.engines.engine_load import profile_of
from ragcache_wire.v1 import engine_pb2


class FakeEngine:
    def __init__(self, costs: engine_pb2.Costs | None) -> None:
        self._costs = costs

    async def costs(self) -> engine_pb2.Costs:
        if self._costs is None:
            raise Unavailable("engine", "it is starting")
        return self._costs


def costs(fixed_s: float = 0.02, s_per_token: float = 0.0002) -> engine_pb2.Costs:
    reply = engine_pb2.Costs(correction=1.0)
    reply.prefill.cached.extend([0, 2048])
    reply.prefill.computed.extend([1, 1024])
    row = [fixed_s + s_per_token, fixed_s + 1024 * s_per_token]
    reply.prefill.seconds.extend(row + row)
    reply.prefill.pass_tokens = 2048
    return reply


async def refreshed(reply: engine_pb2.Costs | None) -> SliceCosts:
    found = SliceCosts()
    engine: Any = FakeEngine(reply)
    await found.refresh(engine, 1024)
    return found


async def test_without_a_profile_a_slice_is_half_a_step() -> None:
    assert (await refreshed(None)).num_tokens == UNKNOWN_STEP_TOKENS // STEP_SHARE
    only_step = engine_pb2.Costs()
    only_step.prefill.pass_tokens = 40
    found = await refreshed(only_step)
    assert found.num_tokens == 20
    assert found.predict_s(0, 100) == 0.0


async def test_a_slice_is_predicted_by_the_profile_and_the_time_of_a_request() -> None:
    found = await refreshed(costs())
    first_s = found.predict_s(0, 256)
    assert first_s > 0.02 + 256 * 0.0002
    for _ in range(100):
        found.observe(0, 256, 0.02 + 256 * 0.0002 + 0.05)
    assert found.predict_s(0, 256) == pytest.approx(0.02 + 256 * 0.0002 + 0.05, rel=0.01)


async def test_slow_requests_make_slices_longer() -> None:
    found = await refreshed(costs())
    before = found.num_tokens
    for _ in range(100):
        found.observe(0, 256, 0.02 + 256 * 0.0002 + 0.09)
    engine: Any = FakeEngine(costs())
    await found.refresh(engine, 1024)
    assert found.num_tokens > before


def test_a_profile_that_is_no_grid_is_ignored() -> None:
    assert profile_of(engine_pb2.PrefillProfile()) is None
    broken = costs().prefill
    broken.seconds.pop()
    assert profile_of(broken) is None
    whole = profile_of(costs().prefill)
    assert whole is not None
    assert whole.cached == (0, 2048)
