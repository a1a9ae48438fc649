"""What an engine has of a prompt that it computes ahead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, cast

import pytest

from ragcache_core.errors import Unavailable
from ragcache_core.identity.keys import KEY_BYTES
from ragcache_core.plan.prompt import assemble
from ragcache_core.planner.request_plan import (
    ChunkAction,
    ChunkDecision,
    PlanReason,
    RequestPlan,
)
from ragcache_core.planner.speculation import GuessCost
from ragcache_gateway.engines.client import Engine
from ragcache_gateway.engines.pool import EnginePool
from ragcache_gateway.prompts.builder import AnswerPrompt
from ragcache_gateway.prompts.prompt_text import PromptText
from ragcache_gateway.speculation.interim_stage import StagePrompt
from ragcache_gateway.speculation.prefill import PrefillState, SpeculativePrefill, SpeculativePrompt
from tests.kit.wait import until

HEAD, A, B = (bytes([n]) * KEY_BYTES for n in range(3))
# A prefill that takes so long that its end is never near in a test.
COST = GuessCost(uncached_tokens=600, prefill_s=1e6, again_s=0.0, step_s=1e6, pass_tokens=200)


def speculative() -> SpeculativePrompt:
    """Return a prompt of a cached head, two chunks and a tail."""
    prompt = assemble([7] * 100, [[1] * 200, [2] * 300], [9] * 100)
    computed = (ChunkAction.COMPUTE, PlanReason.NOT_STORED)
    decisions = (
        ChunkDecision(HEAD, 100, ChunkAction.CACHED, PlanReason.RESIDENT),
        ChunkDecision(A, 200, *computed),
        ChunkDecision(B, 300, *computed),
    )
    plan = RequestPlan((0, 1), "engine:one:1", decisions)
    return SpeculativePrompt(
        ("a", "b"), StagePrompt(AnswerPrompt(prompt, PromptText("", "", ()), 1), plan), COST
    )


class Pool:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.fails = False

    async def complete_on(
        self, engine: Engine, body: Any, stack: AsyncExitStack, work_s: float
    ) -> Pool:
        assert work_s == COST.prefill_s
        await self.go_on.wait()
        if self.fails:
            raise Unavailable("engine", "it died")
        return self

    async def deltas(self) -> AsyncIterator[str]:
        yield "one token"


class OneEngine:
    address = "one:1"


def start(pool: Pool) -> SpeculativePrefill:
    engine = cast("Engine", OneEngine())
    return SpeculativePrefill(speculative(), engine, {}, cast("EnginePool", pool), lambda _: None)


@pytest.mark.parametrize(
    ("end", "expected"),
    [(99, ()), (100, (HEAD,)), (299, (HEAD,)), (300, (HEAD, A)), (9999, (HEAD, A, B))],
)
def test_a_chunk_counts_when_all_its_tokens_are_computed(
    end: int, expected: tuple[bytes, ...]
) -> None:
    assert speculative().chunks_before(end) == expected


async def test_a_running_guess_has_what_was_cached_and_the_pass_that_runs() -> None:
    prefill = start(Pool())
    assert prefill.speculative.cached == 100
    prefilled = prefill.prefilled()
    assert prefilled.is_running
    assert prefilled.chunks == (HEAD, A)
    await prefill.cancel()
    ended = prefill.prefilled(is_confirmed=True)
    assert (ended.chunks, ended.is_running, ended.is_confirmed) == ((HEAD, A), False, True)


@pytest.mark.parametrize(
    ("fails", "state", "expected"),
    [(False, PrefillState.COMPUTED, (HEAD, A, B)), (True, PrefillState.FAILED, ())],
)
async def test_a_computed_guess_has_all_chunks_and_a_failed_one_has_none(
    fails: bool, state: PrefillState, expected: tuple[bytes, ...]
) -> None:
    pool = Pool()
    pool.fails = fails
    prefill = start(pool)
    pool.go_on.set()
    await until(lambda: prefill.state is not PrefillState.RUNNING)
    assert prefill.state is state
    assert (prefill.prefilled().chunks, prefill.prefilled().is_running) == (expected, False)
