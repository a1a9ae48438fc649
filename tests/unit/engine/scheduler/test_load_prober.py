"""Declined loads are measured in idle time, and no request pays for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ragcache_core.cost.load_or_compute import TIMED_OUT_LOADS
from ragcache_core.identity.variant import Tier
from ragcache_core.plan.prompt import Prompt, assemble
from ragcache_engine.protocol.messages import LoadJob, LoadOutcome, ProbeOutcome, StepReport
from ragcache_engine.scheduler.load_prober import NULL_BLOCK
from ragcache_kv.values.layout import value_bytes
from tests.kit.scheduler import BLOCKS, PROFILE, SPACE, TAIL, TEMPLATE, A, B, BlendHarness, C


def make_prompt(*chunks: range) -> Prompt:
    return assemble(TEMPLATE, chunks, TAIL)


FIRST, OTHER = make_prompt(A, B, C), make_prompt(C, A, B)


@pytest.fixture
def engine() -> BlendHarness:
    """Return an engine whose store has the chunks of a prompt in memory, which is slow."""
    engine = BlendHarness()
    engine.run_first("first", FIRST)
    engine.finish("first")
    engine.scheduler.step([], lambda _: BLOCKS)
    engine.scheduler.on_released(["first"])
    engine.scheduler.on_profile(PROFILE, joins_passes=True)
    engine.costs.observe_selection(100, 1e-4)
    for _ in range(50):
        teach(engine, Tier.MEMORY, 0.1)
    return engine


def teach(engine: BlendHarness, tier: Tier, token_s: float) -> None:
    for tokens in (100, 200, 300, 400, 500):
        engine.costs.observe_load({tier: value_bytes(SPACE, tokens)}, token_s * tokens)
        engine.costs.observe_selection(tokens, 1e-4)


def decline(engine: BlendHarness, name: str, prompt: Prompt) -> LoadJob | None:
    """Run a request that loads nothing. Return the probe that it leaves."""
    engine.arrive(name, prompt)
    assert engine.scheduler.loadable_tokens(name, 0) == 0
    engine.compute(name, prompt)
    is_kept = engine.finish(name)
    probe = engine.scheduler.step([], lambda _: BLOCKS).probe
    assert is_kept == (probe is not None)
    return probe


def probed(engine: BlendHarness, probe: LoadJob, seconds: float, **given: object) -> None:
    tokens = probe.end - probe.first
    outcome = LoadOutcome(probe.request_id, tokens, 9, seconds, None, "")
    sizes = {"store": value_bytes(SPACE, tokens)}
    outcome = replace(outcome, **{"bytes_by_tier": sizes, **given})  # type: ignore[arg-type]
    variants = tuple(span.variant for span in probe.spans)
    engine.scheduler.on_reports([StepReport(probes=[ProbeOutcome(outcome, variants)])])
    engine.scheduler.on_released([probe.request_id])


@pytest.mark.parametrize("prompt", [FIRST, OTHER], ids=["exact", "blend"])
def test_a_tier_that_was_slow_is_used_again_after_fast_probes(
    engine: BlendHarness, prompt: Prompt
) -> None:
    stored, number = dict(engine.store.stored), 0
    for number in range(500):
        engine.arrive(f"r{number}", prompt)
        loads = engine.scheduler.loadable_tokens(f"r{number}", 0)
        if loads:
            break
        engine.compute(f"r{number}", prompt)
        engine.finish(f"r{number}")
        probe = engine.scheduler.step([], lambda _: BLOCKS).probe
        assert probe is not None
        exact_prefix = [0] if prompt is FIRST else []  # a blend begins after it
        assert [span.start for span in probe.spans] == [*exact_prefix, *_starts(prompt)]
        assert set(probe.blocks) == {NULL_BLOCK}, "no request's block is overwritten"
        assert (probe.recompute is not None) == (prompt is OTHER)
        probed(engine, probe, 1e-4)
        engine.store.stored = dict(stored)
    assert 0 < number < 499


def _starts(prompt: Prompt) -> list[int]:
    return [len(TEMPLATE), *prompt.chunk_ends[:-1]]


def test_a_bypassed_tier_is_probed_and_recovers(engine: BlendHarness) -> None:
    for _ in range(300):
        teach(engine, Tier.MEMORY, 1e-5)
    for _ in range(TIMED_OUT_LOADS):
        engine.costs.observe_timeout([Tier.MEMORY], 5.0)
    probe = decline(engine, "slow", FIRST)
    assert probe is not None
    probed(engine, probe, 2.0, reason="load timed out", timed_out=True)
    probe = decline(engine, "still slow", FIRST)
    assert probe is not None
    probed(engine, probe, 1e-3)
    engine.arrive("recovered", FIRST)
    assert engine.scheduler.loadable_tokens("recovered", 0)


def test_only_what_was_declined_is_probed(engine: BlendHarness) -> None:
    last = next(key for key, one in engine.store.stored.items() if one.info.base_position == 110)
    for key in engine.store.stored:
        if key != last:
            engine.store.stored[key] = replace(engine.store.stored[key], tier=Tier.DISK)
    teach(engine, Tier.DISK, 1e-6)
    engine.arrive("r", FIRST)
    tokens = engine.scheduler.loadable_tokens("r", 0)
    assert tokens == FIRST.chunk_ends[-2]
    engine.scheduler.on_allocated("r", BLOCKS, tokens)
    engine.scheduler.on_outcomes([LoadOutcome("r", tokens, 9, 1e-4, None, "")])
    engine.compute("r", FIRST, tokens)
    assert engine.finish("r")
    probe = engine.scheduler.step([], lambda _: BLOCKS).probe
    assert probe is not None
    assert [span.variant for span in probe.spans] == [last]


def test_a_load_that_could_never_be_faster_is_not_probed(engine: BlendHarness) -> None:
    engine.costs.observe_selection(100, 1e6)
    engine.arrive("r", OTHER, recompute_share=1.0)
    assert engine.scheduler.loadable_tokens("r", 0) == 0
    engine.compute("r", OTHER)
    engine.finish("r")
    probe = engine.scheduler.step([], lambda _: BLOCKS).probe
    assert probe is None or probe.recompute is None, "exact loads may be faster, blends may not"


def test_without_spare_blocks_nothing_is_kept(engine: BlendHarness) -> None:
    engine.pool.free.clear()
    assert decline(engine, "r", FIRST) is None


def test_an_engine_is_idle_while_it_has_no_request(engine: BlendHarness) -> None:
    assert engine.scheduler.step([], lambda _: BLOCKS).is_idle
    assert not engine.scheduler.step([("untracked", 0, 5)], lambda _: BLOCKS).is_idle
    engine.arrive("r", FIRST)
    assert not engine.scheduler.step([], lambda _: BLOCKS).is_idle, "it waits"


def test_a_part_of_a_load_updates_only_the_tiers_of_this_part(engine: BlendHarness) -> None:
    last = list(engine.store.stored)[-1]
    engine.store.stored[last] = replace(engine.store.stored[last], tier=Tier.DISK)
    for _ in range(50):
        teach(engine, Tier.DISK, 0.1)
    probe = decline(engine, "r", FIRST)
    assert probe is not None
    before = engine.costs.tier_bandwidths()[Tier.DISK]
    num_tokens = probe.spans[-1].start
    sizes = {"store": value_bytes(SPACE, num_tokens)}
    outcome = LoadOutcome("r", num_tokens, 9, 1e-4, None, "", bytes_by_tier=sizes)
    variants = tuple(span.variant for span in probe.spans[:-1])
    engine.scheduler.on_reports([StepReport(probes=[ProbeOutcome(outcome, variants)])])
    assert engine.costs.tier_bandwidths()[Tier.DISK] == before
    assert engine.costs.tier_bandwidths()[Tier.MEMORY] != before
