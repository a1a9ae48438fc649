"""A prompt that one engine has blended is decoded by another one, and no other request finds it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ragcache_core.plan.prompt import Prompt, assemble, plan_exact
from ragcache_core.plan.reuse_plan import Handoff
from ragcache_engine.protocol.messages import LoadJob, LoadOutcome, SaveJob
from ragcache_engine.scheduler.request import NewRequest
from tests.kit.scheduler import SPACE, TAIL, TEMPLATE, A, B, BlendHarness, C
from tests.kit.wait import wait_until

PROMPT = assemble(TEMPLATE, [C, A, B], TAIL)
LENGTH = len(PROMPT.token_ids)


@pytest.fixture
def warm() -> BlendHarness:
    """An engine whose store has the chunks in another order. It has both parts here."""
    engine = BlendHarness()
    engine.run_first("first", assemble(TEMPLATE, [A, B, C], TAIL))
    engine.finish("first")
    return engine


def succeed(engine: BlendHarness, job: LoadJob) -> None:
    outcome = LoadOutcome(job.request_id, job.end - job.first, 99, 0.1, None, "")
    engine.scheduler.on_outcomes([outcome])


def load(engine: BlendHarness, name: str) -> LoadJob:
    """Ask until the lookup is complete, as vLLM does, and return the load."""
    wait_until(lambda: engine.scheduler.loadable_tokens(name, 0) is not None)
    return engine.load(name)


def prefill(engine: BlendHarness, prompt: Prompt = PROMPT) -> list[SaveJob]:
    """Blend a prompt for another engine, and return what is saved of it."""
    engine.arrive("p", prompt, handoff=Handoff.PREFILL, request="r")
    job = engine.load("p")
    assert job.recompute is not None
    succeed(engine, job)
    saves = engine.compute("p", prompt, job.end)
    engine.finish("p")
    return saves


def test_all_of_a_blend_but_the_last_token_is_handed_off(warm: BlendHarness) -> None:
    pieces = [job for job in prefill(warm) if job.hands_off]
    assert [(job.span.start, job.span.end) for job in pieces] == [(0, LENGTH - 1)]
    assert not pieces[0].info.provenance.exact
    chunks = plan_exact(PROMPT, SPACE, "public", "r").segments
    assert set(pieces[0].origin.prefix_chunks) >= {one.chunk for one in chunks}, "for deletes"
    warm.arrive("d", PROMPT, handoff=Handoff.DECODE, request="r")
    job = load(warm, "d")
    assert (job.first, job.end) == (0, LENGTH - 1)
    assert [span.variant for span in job.spans] == [pieces[0].span.variant]
    assert job.recompute is not None
    assert (job.recompute.recompute_tokens, job.recompute.missing) == (0, ())
    succeed(warm, job)
    assert warm.compute("d", PROMPT, job.end) == []
    warm.finish("d")
    record = warm.records.get("r")
    assert record is not None
    assert record.loaded_tokens == LENGTH - 1
    assert [one.blended for one in record.segments] == [True] * 5


def test_the_other_engine_waits_for_a_blend(warm: BlendHarness) -> None:
    warm.arrive("d", PROMPT, handoff=Handoff.DECODE, request="r", handoff_wait_s=60.0)
    assert warm.scheduler.loadable_tokens("d", 0) is None
    prefill(warm)
    wait_until(lambda: warm.scheduler.loadable_tokens("d", 0) is not None)
    assert warm.scheduler.loadable_tokens("d", 0) == LENGTH - 1


def test_no_other_request_finds_a_blend(warm: BlendHarness) -> None:
    prefill(warm)
    warm.arrive("other", PROMPT, handoff=Handoff.DECODE, request="other", handoff_wait_s=60.0)
    assert warm.scheduler.loadable_tokens("other", 0) is None
    exact = replace(plan_exact(PROMPT, SPACE, "public", "r"), handoff=Handoff.DECODE)
    params = {"ragcache": exact.encode()}
    warm.scheduler.on_new_request(NewRequest("exact", PROMPT.token_ids, params))
    assert warm.scheduler.loadable_tokens("exact", 0) == 0


def test_a_prompt_that_may_blend_and_does_not_is_handed_off_exactly() -> None:
    engine = BlendHarness()
    engine.arrive("p", PROMPT, handoff=Handoff.PREFILL, request="r")
    assert engine.scheduler.loadable_tokens("p", 0) == 0
    saves = engine.compute("p", PROMPT)
    engine.finish("p")
    assert [job.info.provenance.exact for job in saves] == [True] * 5
    engine.arrive("d", PROMPT, handoff=Handoff.DECODE, request="r")
    job = load(engine, "d")
    assert (job.first, job.end, job.recompute) == (0, LENGTH - 1, None)
