"""When a prompt is loaded rather than computed, and how predictions are updated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ragcache_core.identity.variant import Tier
from ragcache_engine.protocol.messages import LoadOutcome, MeasuredPass, StepReport, TierChange
from ragcache_kv.values.layout import value_bytes
from tests.kit.scheduler import (
    BLOCKS,
    LENGTH,
    PROFILE,
    PROMPT,
    SPACE,
    SchedulerHarness,
)


def teach(engine: SchedulerHarness, tier: Tier, token_s: float) -> None:
    """Let the engine learn how long loading a token from a tier takes."""
    engine.scheduler.on_profile(PROFILE, joins_passes=True)
    for tokens in (100, 200, 300, 400, 500):
        engine.costs.observe_load({tier: value_bytes(SPACE, tokens)}, token_s * tokens)


def test_tokens_that_are_faster_to_compute_are_not_loaded(warm: SchedulerHarness) -> None:
    teach(warm, Tier.MEMORY, 1e-5)
    warm.arrive("quick")
    assert warm.scheduler.loadable_tokens("quick", 0) == PROMPT.chunk_ends[-1]
    for _ in range(50):
        teach(warm, Tier.MEMORY, 0.1)
    warm.arrive("slow")
    for _ in range(50):
        assert warm.scheduler.loadable_tokens("slow", 0) == 0
    assert warm.prefill("slow") == []
    warm.scheduler.on_finished("slow", ())
    assert warm.record("slow").reported_miss == "computing is faster"


def test_a_record_has_the_last_decision_before_the_first_token(warm: SchedulerHarness) -> None:
    """vLLM asks again with more cached tokens, and once more when it preempts a request."""
    teach(warm, Tier.MEMORY, 1e-5)
    teach(warm, Tier.DISK, 0.1)
    num_local = PROMPT.chunk_ends[0]
    key = next(iter(warm.store.stored))
    warm.store.stored[key] = replace(warm.store.stored[key], tier=Tier.DISK)
    warm.arrive("r")
    assert warm.scheduler.loadable_tokens("r", 0) == 0
    assert warm.scheduler.loadable_tokens("r", num_local) == PROMPT.chunk_ends[-1] - num_local
    warm.scheduler.on_allocated("r", BLOCKS, PROMPT.chunk_ends[-1] - num_local)
    tokens = PROMPT.chunk_ends[-1] - num_local
    warm.scheduler.on_outcomes([LoadOutcome("r", tokens, 9, 0.01, None, "")])
    warm.prefill("r", PROMPT.chunk_ends[-1])
    warm.scheduler.step([("r", LENGTH, 1)], lambda _: BLOCKS)
    assert warm.record("r").reported_miss == ""
    warm.scheduler.loadable_tokens("r", 0)
    assert warm.record("r").reported_miss == ""


def test_a_load_ends_before_a_chunk_whose_disk_is_slower_than_computing(
    warm: SchedulerHarness,
) -> None:
    last = list(warm.store.stored)[-1]
    warm.store.stored[last] = replace(warm.store.stored[last], tier=Tier.DISK)
    teach(warm, Tier.MEMORY, 1e-5)
    teach(warm, Tier.DISK, 0.1)
    warm.arrive("r")
    assert warm.scheduler.loadable_tokens("r", 0) == PROMPT.chunk_ends[-2]


def test_a_load_updates_the_prediction_of_its_tier(warm: SchedulerHarness) -> None:
    loaded = sum(held.info.num_bytes for held in warm.store.stored.values())
    for number in range(5):
        load(warm, f"load-{number}", 0.5, store=loaded)
    latency_s, bytes_per_s = warm.costs.tier_bandwidths()[Tier.MEMORY]
    assert latency_s + loaded / bytes_per_s == pytest.approx(0.5)
    assert Tier.DISK not in warm.costs.tier_bandwidths()


def load(engine: SchedulerHarness, request: str, seconds: float, **bytes_by_tier: int) -> None:
    engine.arrive(request)
    tokens = engine.scheduler.loadable_tokens(request, 0)
    assert tokens
    engine.scheduler.on_allocated(request, BLOCKS, tokens)
    engine.scheduler.on_outcomes(
        [LoadOutcome(request, tokens, 9, seconds, None, "", bytes_by_tier=bytes_by_tier)]
    )


def test_values_in_a_local_tier_do_not_update_the_stores_prediction(warm: SchedulerHarness) -> None:
    """With a store slower than computing, local values are loaded and update their own tier."""
    loaded = sum(held.info.num_bytes for held in warm.store.stored.values())
    teach(warm, Tier.MEMORY, 0.1)
    before = warm.costs.tier_bandwidths()
    changes = dict.fromkeys(warm.store.stored, TierChange("host", exact=True))
    warm.scheduler.on_reports([StepReport(tier_changes=changes)])
    for number in range(20):
        load(warm, f"here-{number}", 1e-3, host=loaded)
    assert warm.costs.tier_bandwidths()["host"][1] == pytest.approx(loaded / 1e-3)
    assert warm.costs.tier_bandwidths()[Tier.MEMORY] == before[Tier.MEMORY]
    warm.scheduler.on_reports([StepReport(tier_changes=dict.fromkeys(warm.store.stored))])
    warm.arrive("gone")
    assert warm.scheduler.loadable_tokens("gone", 0) == 0


def test_a_load_from_two_tiers_updates_both_predictions(warm: SchedulerHarness) -> None:
    first, *others = warm.store.stored
    warm.scheduler.on_reports([StepReport(tier_changes={first: TierChange("host", exact=True)})])
    here = value_bytes(SPACE, warm.store.stored[first].info.num_tokens)
    there = sum(warm.store.stored[key].info.num_bytes for key in others)
    for number in range(5):
        load(warm, f"both-{number}", 0.5, host=here, store=there)
    costs = warm.costs.tier_bandwidths()
    assert costs.keys() == {"host", Tier.MEMORY}
    assert here / costs["host"][1] + there / costs[Tier.MEMORY][1] == pytest.approx(0.5)


def test_passes_update_the_prediction_of_computing(engine: SchedulerHarness) -> None:
    """A pass with two requests: its work counts the context of each computed token."""
    engine.scheduler.on_profile(PROFILE, joins_passes=True)
    engine.arrive("a")
    jobs = engine.scheduler.step([("a", 0, 100), ("unplanned", 30, 60)], lambda _: BLOCKS)
    assert jobs.work == pytest.approx(0.16)
    assert jobs.prompt_tokens == jobs.num_tokens == 160
    decoding = engine.scheduler.step([("b", 30, 1), ("c", 50, 1), ("d", 0, 40)], lambda _: BLOCKS)
    assert (decoding.prompt_tokens, decoding.num_tokens) == (40, 42)
    for _ in range(300):
        engine.scheduler.on_reports([StepReport(passes=[MeasuredPass(jobs.work, 3 * jobs.work)])])
    assert engine.costs.predict_compute_s(0, 500) == pytest.approx(1.5, rel=0.05)
