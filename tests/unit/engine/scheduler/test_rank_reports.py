"""Reports of several ranks are merged once."""

from __future__ import annotations

from dataclasses import replace

from ragcache_core.identity.keys import VariantKey
from ragcache_engine.protocol.messages import (
    LoadOutcome,
    MeasuredPass,
    ProbeOutcome,
    StepReport,
    TierChange,
)
from ragcache_engine.scheduler.rank_reports import RankReports

KEY = VariantKey(bytes(16), bytes(16))
LOADED = LoadOutcome(
    "r", 120, 50, 0.1, None, "", values_by_tier={"store": 2}, bytes_by_tier={"store": 50}
)
HOST = TierChange("host", exact=True)


def test_a_load_ends_when_it_has_ended_on_all_ranks() -> None:
    reports = RankReports(2)
    slower = replace(LOADED, seconds=0.3, bytes_by_tier={"host": 50})
    assert reports.merge([StepReport([slower], rank=1)]).outcomes == []
    [merged] = reports.merge([StepReport([LOADED], rank=0)]).outcomes
    assert (merged.num_bytes, merged.seconds, merged.tokens) == (100, 0.3, 120)
    assert merged.bytes_by_tier == {"store": 50, "host": 50}
    assert merged.values_by_tier == {"store": 2}
    assert reports.merge([StepReport([LOADED], rank=0)]).outcomes == [], "a new load of it"


def test_a_load_fails_if_it_fails_on_one_rank() -> None:
    failed = replace(LOADED, tokens=32, reason="evicted", missing_variant=KEY)
    both = [StepReport([LOADED], rank=0), StepReport([failed], rank=1)]
    [merged] = RankReports(2).merge(both).outcomes
    assert (merged.reason, merged.tokens, merged.missing_variant) == ("evicted", 32, KEY)


def test_what_comes_first_in_the_prompt_is_missing_for_all() -> None:
    other = VariantKey(bytes(16), b"o" * 16)
    later = replace(LOADED, tokens=64, reason="evicted", missing_variant=KEY)
    sooner = replace(LOADED, tokens=32, reason="corrupt", missing_variant=other)
    both = [StepReport([later], rank=0), StepReport([sooner], rank=1)]
    [merged] = RankReports(2).merge(both).outcomes
    assert (merged.reason, merged.tokens, merged.missing_variant) == ("corrupt", 32, other)


def test_a_tier_has_what_all_ranks_have_in_it() -> None:
    reports = RankReports(2)
    assert reports.merge([StepReport(tier_changes={KEY: HOST}, rank=0)]).tier_changes == {}
    lossy = StepReport(tier_changes={KEY: replace(HOST, exact=False)}, rank=1)
    assert reports.merge([lossy]).tier_changes == {KEY: replace(HOST, exact=False)}
    gone = StepReport(tier_changes={KEY: None}, rank=0)
    assert reports.merge([gone]).tier_changes == {KEY: None}
    assert reports.merge([replace(gone, rank=1)]).tier_changes == {}, "it was not there for all"


def test_one_rank_measures_passes_and_probes() -> None:
    measured = StepReport(
        passes=[MeasuredPass(1.0, 0.2)], probes=[ProbeOutcome(LOADED, (KEY,))], rank=0
    )
    merged = RankReports(2).merge([replace(measured, rank=1), measured])
    assert merged.passes == measured.passes
    [probe] = merged.probes
    assert probe.outcome.bytes_by_tier == {"store": 100}, "of all ranks"


def test_a_single_rank_is_reported_at_once() -> None:
    report = StepReport([LOADED], tier_changes={KEY: HOST})
    merged = RankReports(1).merge([report])
    assert (merged.outcomes, merged.tier_changes) == ([LOADED], {KEY: HOST})
