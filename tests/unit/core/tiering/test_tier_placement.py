"""Where an engine keeps values: limits hold, nothing hot is below something cold, both policies."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.eviction.policy import EvictionCandidate
from ragcache_core.tiering.precision_assignment import Placement, RankPlacement
from ragcache_core.tiering.tier_placement import (
    MAX_COUNTED,
    MEMORIES,
    TIER_POLICIES,
    ScoreTierPolicy,
    ThresholdTierPolicy,
    TierPolicy,
    fill_tiers,
    make_tier_policy,
)

GPU, PINNED, DISK = Placement.GPU, Placement.PINNED, Placement.DISK
SPEED = {GPU: 2, PINNED: 1, DISK: 0}

LIMITS = st.fixed_dictionaries({}, optional={GPU: st.integers(0, 60), PINNED: st.integers(0, 60)})
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "use", "remove", "assign"]), st.integers(0, 12), st.integers(1, 25)
    ),
    max_size=60,
)


def candidate(num_bytes: int) -> EvictionCandidate[int]:
    return EvictionCandidate(num_bytes, num_tokens=num_bytes, cost_s=0.0)


@dataclass
class PolicyModel:
    """A policy and the calls that it received."""

    policy: TierPolicy[int]
    sizes: dict[int, int] = field(default_factory=dict)
    now: float = 0.0

    def step(self, name: str, key: int, num_bytes: int) -> dict[int, Placement] | None:
        self.now += 1.0
        match name:
            case "add":
                self.policy.add(key, candidate(num_bytes), self.now)
                self.sizes[key] = num_bytes
            case "use":
                self.policy.record_use(key, self.now)
            case "remove":
                self.policy.remove(key)
                self.sizes.pop(key, None)
            case "assign":
                placed = self.policy.assign_tiers(self.now)
                assert placed.keys() == self.sizes.keys()
                return placed
        return None

    def settle(self, placed: dict[int, Placement]) -> None:
        self.sizes = {k: v for k, v in self.sizes.items() if placed[k] is not DISK}

    def heat(self, key: int) -> float:
        if isinstance(self.policy, ScoreTierPolicy):
            return self.policy.priority(key, self.now)
        assert isinstance(self.policy, ThresholdTierPolicy)
        return self.policy.accesses(key, self.now)


def make(name: str, limits: dict[Placement, int]) -> TierPolicy[int]:
    if name == "thresholds":  # shares that say something of a dozen keys
        return ThresholdTierPolicy(limits, RankPlacement(30, 40, 30))
    return make_tier_policy(name, limits)


@pytest.mark.parametrize("name", TIER_POLICIES)
@given(limits=LIMITS, steps=STEPS)
def test_limits_hold_and_values_without_a_tier_are_forgotten(
    name: str, limits: dict[Placement, int], steps: list[tuple[str, int, int]]
) -> None:
    model = PolicyModel(make(name, limits))
    for step in [*steps, ("assign", 0, 0), ("assign", 0, 0)]:
        placed = model.step(*step)
        if placed is None:
            continue
        for memory in MEMORIES:
            inside = sum(model.sizes[k] for k, where in placed.items() if where is memory)
            assert inside <= limits.get(memory, 0)
        model.settle(placed)


@given(limits=LIMITS, steps=STEPS)
def test_score_never_puts_a_more_used_value_in_a_slower_tier(
    limits: dict[Placement, int], steps: list[tuple[str, int, int]]
) -> None:
    model = PolicyModel(make("score", limits))
    for step in [*steps, ("assign", 0, 0)]:
        heat = {key: model.heat(key) for key in model.sizes} if step[0] == "assign" else {}
        placed = model.step(*step)
        if placed is None:
            continue
        for hot, cold in ((a, b) for a in placed for b in placed if heat[a] > heat[b]):
            never_fits = model.sizes[hot] > limits.get(placed[cold], 0)
            assert SPEED[placed[hot]] >= SPEED[placed[cold]] or never_fits
        model.settle(placed)


@given(limits=LIMITS, steps=STEPS)
def test_thresholds_never_put_a_more_used_value_in_a_slower_tier(
    limits: dict[Placement, int], steps: list[tuple[str, int, int]]
) -> None:
    model = PolicyModel(make("thresholds", limits))
    for step in [*steps, ("assign", 0, 0)]:
        placed = model.step(*step)
        if placed is None:
            continue
        heat = {key: model.heat(key) for key in placed}
        for hot, cold in ((a, b) for a in placed for b in placed if heat[a] > heat[b]):
            never_fits = model.sizes[hot] > limits.get(placed[cold], 0)
            assert SPEED[placed[hot]] >= SPEED[placed[cold]] or never_fits
        model.settle(placed)


def test_a_use_promotes_a_value_and_demotes_the_least_used() -> None:
    policy = ScoreTierPolicy[int]({GPU: 10, PINNED: 20})
    for now, key in enumerate((1, 2, 3)):
        policy.add(key, candidate(10), now)
    assert policy.assign_tiers(3.0) == {3: GPU, 2: PINNED, 1: PINNED}
    policy.record_use(1, 4.0)
    policy.add(4, candidate(10), 5.0)
    assert policy.assign_tiers(6.0) == {1: GPU, 4: PINNED, 3: PINNED, 2: DISK}


def test_an_evicted_value_keeps_its_history() -> None:
    policy = ScoreTierPolicy[int]({PINNED: 10})
    for now in range(4):
        policy.add(1, candidate(10), now)
    policy.add(2, candidate(10), 4.0)
    assert policy.assign_tiers(4.0)[2] is DISK
    policy.remove(1)
    policy.add(3, candidate(10), 5.0)
    policy.add(2, candidate(10), 6.0)
    assert policy.assign_tiers(6.0) == {2: PINNED, 3: DISK}


def test_thresholds_are_shares_of_all_used_values_not_of_stored_ones() -> None:
    policy = ThresholdTierPolicy[int]({GPU: 1000, PINNED: 1000})  # 5 % and 5 %, as in the paper
    for key in range(100):
        for _ in range(100 - key):
            policy.record_use(key, 0.0)
    for key in (0, 4, 5, 9, 10, 50):
        policy.add(key, candidate(1), 0.0)
    placed = policy.assign_tiers(0.0)
    assert placed == {0: GPU, 4: GPU, 5: PINNED, 9: PINNED, 10: DISK, 50: DISK}


def test_without_a_device_pool_its_list_is_on_the_host() -> None:
    policy = ThresholdTierPolicy[int]({PINNED: 10}, RankPlacement(50, 0, 0))
    for now, key in enumerate((1, 2)):
        policy.add(key, candidate(10), now)
    assert sorted(policy.assign_tiers(2.0).values()) == [DISK, PINNED]


def test_counts_of_keys_are_bounded() -> None:
    policy = ThresholdTierPolicy[int]({PINNED: 10})
    policy.add(-1, candidate(10), 0.0)
    for key in range(MAX_COUNTED + 10):
        policy.record_use(key, 1.0 + key)
        assert len(policy._counts) <= MAX_COUNTED
    assert -1 in policy.assign_tiers(2.0 + MAX_COUNTED)


def test_a_value_larger_than_a_tier_blocks_no_other_value() -> None:
    order = [(1, 30, GPU), (2, 10, GPU), (3, 5, GPU), (4, 1, GPU)]
    assert fill_tiers(order, {GPU: 12, PINNED: 40}) == {1: PINNED, 2: GPU, 3: PINNED, 4: PINNED}


def test_an_unknown_policy_is_rejected() -> None:
    with pytest.raises(ValueError, match="score, thresholds"):
        make_tier_policy("lru", {})
