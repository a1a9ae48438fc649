"""Admissions: everything, the second offer, or a higher score than the victim."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.eviction import EvictionCandidate, make_policy, ranked
from ragcache_core.eviction.admission import (
    ADMISSION_NAMES,
    ScoreAdmission,
    default_admission,
    make_admission,
)
from ragcache_core.eviction.ranked import GhostEntries
from ragcache_core.eviction.score import ScorePolicy

CANDIDATE: EvictionCandidate[str] = EvictionCandidate(num_bytes=1, num_tokens=1, cost_s=1.0)


def score() -> ScorePolicy[str]:
    return ScorePolicy(leaves_only=False)


def test_always_admits() -> None:
    assert make_admission("always", score()).admits("a", CANDIDATE, 0.0, 1e9)


def test_second_touch_admits_the_second_offer() -> None:
    admission = make_admission("second-touch", score())
    assert not admission.admits("a", CANDIDATE, 0.0, None)
    assert not admission.admits("b", CANDIDATE, 1.0, None)
    assert admission.admits("a", CANDIDATE, 2.0, None)
    assert admission.admits("a", CANDIDATE, 3.0, None)


def test_second_touch_forgets_the_oldest_offer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranked, "MIN_GHOSTS", 2)
    admission = make_admission("second-touch", score())
    for key in "abc":
        assert not admission.admits(key, CANDIDATE, 0.0, None)
    assert not admission.admits("a", CANDIDATE, 1.0, None)
    assert admission.admits("c", CANDIDATE, 1.0, None)


def test_score_admits_anything_while_there_is_room() -> None:
    assert make_admission("score", score()).admits("a", CANDIDATE, 0.0, None)


def test_score_rejects_entries_below_the_victim() -> None:
    policy = score()
    policy.add("popular", CANDIDATE, 0.0)
    policy.touch("popular", 1.0)
    policy.touch("popular", 1.0)
    admission = ScoreAdmission(policy)
    assert not admission.admits("new", CANDIDATE, 2.0, policy.priority("popular", 2.0))
    assert not admission.admits("new", CANDIDATE, 3.0, policy.priority("popular", 3.0))
    # Refusals are remembered: the third use in a row beats three older ones.
    assert admission.admits("new", CANDIDATE, 4.0, policy.priority("popular", 4.0))


def test_score_admits_costly_entries_at_once() -> None:
    policy = score()
    policy.add("cheap", CANDIDATE, 0.0)
    policy.touch("cheap", 0.0)
    costly: EvictionCandidate[str] = EvictionCandidate(num_bytes=1, num_tokens=1, cost_s=100.0)
    assert ScoreAdmission(policy).admits("costly", costly, 0.0, policy.priority("cheap", 0.0))


@given(uses=st.integers(0, 5), cost_s=st.floats(0.0, 10.0), gap_s=st.floats(0.0, 1e5))
def test_the_prospective_priority_is_the_priority_after_an_add(
    uses: int, cost_s: float, gap_s: float
) -> None:
    policy = score()
    candidate: EvictionCandidate[str] = EvictionCandidate(3, 2, cost_s)
    for number in range(uses):
        policy.count_rejected("a", candidate, number * gap_s)
    now = uses * gap_s
    appraised = policy.prospective_priority("a", candidate, now)
    half_life_s = policy.half_life_s
    policy.add("a", candidate, now)
    if policy.half_life_s == half_life_s:  # else all ranks were recomputed with another one
        assert policy.priority("a", now) == pytest.approx(appraised, abs=1e-6)


def test_names_are_checked() -> None:
    assert {default_admission(leaves_only=flag) for flag in (True, False)} <= set(ADMISSION_NAMES)
    with pytest.raises(ValueError, match="no admission 'never'"):
        make_admission("never", score())
    with pytest.raises(ValueError, match="needs policy 'score'"):
        make_admission("score", make_policy("lru", leaves_only=False))


@given(st.lists(st.integers(0, 30), max_size=200), st.integers(0, 3))
def test_ghosts_are_bounded_and_forget_the_oldest(keys: list[int], num_stored: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranked, "MIN_GHOSTS", 4)
        ghosts: GhostEntries[int, int] = GhostEntries()
        for number, key in enumerate(keys):
            ghosts.put(key, number, num_stored)
        newest = list(dict.fromkeys(reversed(keys)))[: max(4, 2 * num_stored)]
        assert len(ghosts) == len(newest)
        assert all(ghosts.get(key) is not None for key in newest)
