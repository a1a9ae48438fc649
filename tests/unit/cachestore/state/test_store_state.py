"""The small state: a tier's shelf, leases, pins, misses, events, counters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_cachestore.state.event_feed import EventFeed
from ragcache_cachestore.state.leases import LeaseTable
from ragcache_cachestore.state.miss_reasons import MissReasons
from ragcache_cachestore.state.pins import Pins
from ragcache_cachestore.storage.tier_space import TierCopy, TierSpace
from ragcache_cachestore.telemetry.counters import HISTOGRAM_BINS, score_histogram
from ragcache_core.eviction import make_policy
from ragcache_core.identity.variant import Miss, Tier
from ragcache_core.store_api import LEASE_S, EventKind
from ragcache_core.storage.extents import PAGE_BYTES, ExtentAllocator
from tests.helpers.cachestore_parts import info, key
from tests.unit.cachestore.state.test_catalog import variant


def shelf(pages: int) -> TierSpace:
    return TierSpace(ExtentAllocator(pages * PAGE_BYTES), make_policy("lru", leaves_only=False))


def test_pages_are_free_when_the_last_lets_go() -> None:
    tier = shelf(2)
    copy = tier.place(2 * PAGE_BYTES)
    assert copy is not None
    assert not copy.in_use
    copy.ref_count += 1
    assert copy.in_use
    assert not tier.release(copy)
    assert tier.place(1) is None
    assert tier.lacking_pages(PAGE_BYTES + 1) == 2
    assert tier.release(copy)
    assert tier.place(1) is not None


def test_past_the_high_mark_all_down_to_the_low_one_is_too_much() -> None:
    tier = shelf(100)
    tier.place(95 * PAGE_BYTES)
    assert tier.excess_pages() == 0
    tier.place(1)
    assert tier.excess_pages() == 6


def test_watermarks_have_an_order() -> None:
    with pytest.raises(ValueError, match="low"):
        TierSpace(ExtentAllocator(0), make_policy("lru", leaves_only=False), high=0.5, low=0.6)


def test_leases_hold_what_they_are_of_and_end_in_order() -> None:
    leases, copy = LeaseTable(), TierCopy((), 10)
    first = leases.grant(variant(1), Tier.MEMORY, copy, 0.0)
    second = leases.grant(variant(1), Tier.DISK, copy, 1.0)
    assert copy.ref_count == 3
    assert first.id != second.id
    assert (first.on_disk, second.on_disk) == (False, True)
    assert leases.expire(LEASE_S - 0.1) == []
    assert leases.expire(LEASE_S) == [first]
    assert leases.end(second.id) is second
    assert leases.end(second.id) is None
    assert len(leases) == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["pin", "unpin", "expire"]),
            st.integers(0, 4),
            st.integers(1, 60),
        )
    )
)
def test_pins_stay_within_their_bound(steps: list[tuple[str, int, int]]) -> None:
    pins, now = Pins(100), 0.0
    pinned: dict[int, tuple[float, int]] = {}
    for step, number, amount in steps:
        if step == "pin":
            others = sum(size for n, (_, size) in pinned.items() if n != number)
            assert pins.pin(key(number), amount, now + amount) is (others + amount <= 100)
            if others + amount <= 100:
                pinned[number] = (now + amount, amount)
        elif step == "unpin":
            assert pins.unpin(key(number)) is (pinned.pop(number, None) is not None)
        else:
            now += amount
            pins.expire(now)
            pinned = {n: pin for n, pin in pinned.items() if pin[0] > now}
        assert pins.used_bytes == sum(size for _, size in pinned.values()) <= 100
        assert {n for n in range(5) if key(n) in pins} == pinned.keys()


def test_misses_are_remembered_up_to_a_bound() -> None:
    misses = MissReasons(capacity=4)
    misses.note(key(1, 5), Miss.EVICTED)
    assert misses.miss_reason(key(1, 5)) is Miss.EVICTED
    assert misses.miss_reason(key(1, 6)) is Miss.NEVER_STORED
    assert misses.chunk_miss_reason(key(1).chunk) is Miss.EVICTED
    misses.note(key(1, 5), Miss.CORRUPT)
    assert misses.miss_reason(key(1, 5)) is Miss.CORRUPT
    for number in range(2, 10):
        misses.note(key(number), Miss.EVICTED)
    assert len(misses) == 4
    assert misses.miss_reason(key(1, 5)) is Miss.NEVER_STORED


def test_a_feed_remembers_the_last_events() -> None:
    feed, woken = EventFeed(remembered=3), []
    feed.watch(lambda: woken.append(feed.sequence))
    for number in range(1, 6):
        feed.publish(EventKind.STORED, key(number), Tier.MEMORY, info(10))
    assert woken == [1, 2, 3, 4, 5]
    assert [event.key for event in feed.after(2) or []] == [key(3), key(4), key(5)]
    assert feed.after(1) is None
    assert feed.after(5) == []
    assert feed.after(6) is None
    assert feed.boot != EventFeed().boot


@given(st.lists(st.floats(0, 1e30)))
def test_every_score_is_in_one_bin(scores: list[float]) -> None:
    histogram = score_histogram(scores)
    assert len(histogram) == HISTOGRAM_BINS
    assert sum(histogram) == len(scores)


def test_bins_are_powers_of_ten_of_seconds_per_gib() -> None:
    assert score_histogram([1.5 / (1 << 30)]).index(1) == 6
    assert score_histogram([150.0 / (1 << 30)]).index(1) == 8
