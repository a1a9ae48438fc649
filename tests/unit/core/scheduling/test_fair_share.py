"""Fair shares: every tenant finds its slots, and few of them idle."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_core.scheduling.fair_share import HEADROOM_SHARE, Shares, may_enter, share_of

TENANTS = "abcd"
WEIGHTS = st.dictionaries(st.sampled_from(TENANTS), st.integers(1, 4).map(float), min_size=2)
HELD = st.dictionaries(st.sampled_from(TENANTS), st.integers(0, 20))


@given(HELD, WEIGHTS, st.integers(1, 100), st.sampled_from(TENANTS))
def test_a_pool_never_has_more_than_its_capacity(
    held: dict[str, int], weights: dict[str, float], capacity: int, tenant: str
) -> None:
    if may_enter(tenant, held, Shares(weights), capacity):
        assert sum(held.values()) + 1 <= capacity


@given(HELD, WEIGHTS, st.integers(1, 100), st.sampled_from(TENANTS))
def test_slots_are_refused_only_to_tenants_above_their_share(
    held: dict[str, int], weights: dict[str, float], capacity: int, tenant: str
) -> None:
    free = capacity - sum(held.values())
    if free <= 0 or may_enter(tenant, held, Shares(weights), capacity):
        return
    assert held.get(tenant, 0) + 1 > share_of(tenant, held, weights, capacity)
    assert free <= max(1, HEADROOM_SHARE * capacity)


@given(st.integers(1, 100), st.sampled_from([{}, {"a": 3.0}]))
def test_the_only_tenant_has_the_whole_pool(capacity: int, weights: dict[str, float]) -> None:
    held = 0
    while may_enter("a", {"a": held}, Shares(weights), capacity):
        held += 1
    assert held == capacity


@given(WEIGHTS, st.integers(8, 200))
def test_a_tenant_that_comes_finds_a_slot(weights: dict[str, float], capacity: int) -> None:
    flooding, coming = sorted(weights)[:2]
    held = {flooding: 0}
    while may_enter(flooding, held, Shares(weights), capacity):
        held[flooding] += 1
    assert held[flooding] >= capacity * (1 - HEADROOM_SHARE)
    assert may_enter(coming, held, Shares(weights), capacity)


@given(WEIGHTS, st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_slots_of_tenants_that_all_want_more_are_their_shares(
    weights: dict[str, float], seed: int
) -> None:
    """The first one came long before the others, and is the first to ask for each free slot."""
    random, capacity = Random(seed), 100
    tenants = sorted(weights)
    held = dict.fromkeys(tenants, 0)

    def fill(asking: list[str]) -> None:
        for tenant in asking:
            while may_enter(tenant, held, Shares(weights), capacity):
                held[tenant] += 1

    fill(tenants[:1])
    for _ in range(1000):
        [ended] = random.choices(tenants, [held[one] for one in tenants])
        held[ended] -= 1
        fill(tenants)
    total = sum(weights.values())
    for tenant in tenants:
        share = capacity * weights[tenant] / total
        assert held[tenant] == pytest.approx(share, rel=0.1, abs=1.0)


@given(
    st.dictionaries(st.sampled_from(TENANTS), st.sampled_from([0.1, 0.2]), min_size=1),
    st.integers(1, 60),
    st.lists(st.tuples(st.sampled_from(TENANTS), st.booleans()), max_size=200),
)
def test_a_tenant_below_its_reserved_slots_always_finds_one(
    reserved: dict[str, float], capacity: int, steps: list[tuple[str, bool]]
) -> None:
    shares = Shares({}, reserved)
    held = dict.fromkeys(TENANTS, 0)
    for tenant, begins in steps:
        if not begins:
            held[tenant] = max(0, held[tenant] - 1)
        elif may_enter(tenant, held, shares, capacity):
            held[tenant] += 1
        assert sum(held.values()) <= capacity
        for one in reserved:
            if held[one] < shares.reserved_slots(one, capacity):
                assert may_enter(one, held, shares, capacity)
