"""The parts of the store state: tier space, leases, miss reasons, feed, counters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_cachestore.state.catalog import MissReasons
from ragcache_cachestore.state.leases import LeaseTable
from ragcache_cachestore.state.store_feed import StoreFeed
from ragcache_cachestore.state.store_stats import HISTOGRAM_BINS, score_histogram
from ragcache_cachestore.storage.tier_space import TierCopy, TierSpace
from ragcache_core.eviction import make_policy
from ragcache_core.identity.variant import Miss, Tier
from ragcache_core.storage.extents import PAGE_BYTES, ExtentAllocator
from ragcache_core.store_api import LEASE_S
from tests.kit.store import key
from tests.unit.cachestore.state.test_catalog import variant


def make_tier(pages: int) -> TierSpace:
    return TierSpace(ExtentAllocator(pages * PAGE_BYTES), make_policy("lru", leaves_only=False))


def test_pages_are_free_after_the_last_release() -> None:
    tier = make_tier(2)
    copy = tier.allocate(2 * PAGE_BYTES)
    assert copy is not None
    assert not copy.in_use
    copy.ref_count += 1
    assert copy.in_use
    assert not tier.release(copy)
    assert tier.allocate(1) is None
    assert tier.missing_pages(PAGE_BYTES + 1) == 2
    assert tier.release(copy)
    assert tier.allocate(1) is not None


def test_above_the_high_watermark_the_excess_reaches_down_to_the_low_one() -> None:
    tier = make_tier(100)
    tier.allocate(95 * PAGE_BYTES)
    assert tier.excess_pages() == 0
    tier.allocate(1)
    assert tier.excess_pages() == 6


def test_the_low_watermark_is_not_above_the_high_one() -> None:
    with pytest.raises(ValueError, match="low"):
        TierSpace(ExtentAllocator(0), make_policy("lru", leaves_only=False), high=0.5, low=0.6)


def test_leases_keep_a_reference_and_expire_in_order() -> None:
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


def test_the_number_of_miss_reasons_is_bounded() -> None:
    misses = MissReasons(capacity=4)
    misses.note(key(1, 5), Miss.EVICTED)
    assert misses.of_variant(key(1, 5)) is Miss.EVICTED
    assert misses.of_variant(key(1, 6)) is Miss.NEVER_STORED
    assert misses.of_chunk(key(1).chunk) is Miss.EVICTED
    misses.note(key(1, 5), Miss.CORRUPT)
    assert misses.of_variant(key(1, 5)) is Miss.CORRUPT
    for number in range(2, 10):
        misses.note(key(number), Miss.EVICTED)
    assert len(misses) == 4
    assert misses.of_variant(key(1, 5)) is Miss.NEVER_STORED


def test_a_feed_wakes_its_watchers_and_has_a_boot_of_its_own() -> None:
    feed, woken = StoreFeed(max_changes=3), []
    feed.watch(lambda: woken.append(feed.log.sequence))
    for number in range(1, 6):
        feed.publish(variant(number))
    assert woken == [1, 2, 3, 4, 5]
    assert [change.key for change in feed.log.after(2, 9) or []] == [key(3), key(4), key(5)]
    assert feed.log.boot != StoreFeed().log.boot


@given(st.lists(st.floats(0, 1e30)))
def test_every_score_is_in_one_bin(scores: list[float]) -> None:
    histogram = score_histogram(scores)
    assert len(histogram) == HISTOGRAM_BINS
    assert sum(histogram) == len(scores)


def test_bins_are_powers_of_ten_of_seconds_per_gib() -> None:
    assert score_histogram([1.5 / (1 << 30)]).index(1) == 6
    assert score_histogram([150.0 / (1 << 30)]).index(1) == 8
