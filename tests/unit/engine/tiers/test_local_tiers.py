"""A worker's own tiers return the values that were put, within their limits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

from ragcache_core.identity.keys import KVSpace, VariantKey
from ragcache_core.identity.variant import Provenance, VariantInfo
from ragcache_core.store_api import REUSE, VariantUse
from ragcache_core.tiering.precision_assignment import Placement
from ragcache_core.tiering.tier_placement import TIER_POLICIES
from ragcache_engine.kv_cache.chunk_pool import PAGE_TOKENS, ChunkPool, concatenate_pieces
from ragcache_engine.kv_cache.incoming_value import OfferedValue
from ragcache_engine.tiers.local_tiers import QUEUE_SHARE, LocalTiers, TierRead
from ragcache_kv.values.layout import value_bytes
from tests.kit.wait import wait_until

SPACE = KVSpace("model", num_layers=2, num_kv_heads=1, head_dim=4, dtype="bfloat16")
CPU = torch.device("cpu")
PAGE = value_bytes(SPACE, PAGE_TOKENS)
GPU, PINNED = Placement.GPU, Placement.PINNED
TIMEOUT_S = 60.0


def key(number: int) -> VariantKey:
    return VariantKey(number.to_bytes(16, "big"), bytes(16))


def value(number: int, num_tokens: int) -> torch.Tensor:
    """Return a value of its own numbers, so that a test notices another one."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(2, 2, num_tokens, 1, 4, generator=generator).bfloat16()


def offer(
    number: int, num_tokens: int = PAGE_TOKENS, *, exact: bool = True, base: int = 0, seed: int = 0
) -> OfferedValue:
    made = value(seed or number, num_tokens)
    info = VariantInfo(num_tokens, made.nbytes, base, Provenance(exact))
    return OfferedValue(key(number), info, made.nbytes, "tenant", lambda: made)


@dataclass
class TiersHarness:
    """Tiers with so many pages each. The device's memory is host memory here."""

    device_pages: int = 0
    host_pages: int = 0
    policy: str = "score"
    noted_reads: list[tuple[VariantKey, VariantUse]] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        limits = {GPU: self.device_pages, PINNED: self.host_pages}
        self.pools = {m: ChunkPool(SPACE, pages * PAGE, CPU) for m, pages in limits.items()}
        self.tiers = LocalTiers(self.pools, self.policy, self.noted_reads.extend, lambda: self.now)

    def put(self, *offers: OfferedValue) -> None:
        """Offer values one by one, because the bounded queue would drop some."""
        for one in offers:
            self.now += 1.0
            self.tiers.offer((one,))
            self.rebalance()

    def rebalance(self) -> None:
        self.tiers.start_rebalance()
        wait_until(lambda: not self.tiers._rebalancing)

    def read(self, number: int, num_tokens: int = PAGE_TOKENS, **other: object) -> TierRead | None:
        wanted = {"base_position": 0, "domain": "tenant", "exact": True} | other
        return self.tiers.read(key(number), num_tokens, **wanted)  # type: ignore[arg-type]

    def hold(self, number: int) -> TierRead | None:
        """Start a read that does not count as a use."""
        tier_read = self.read(number)
        self.tiers._reads.clear()
        return tier_read

    def where(self, number: int) -> str | None:
        tier_read = self.hold(number)
        return tier_read.tier if tier_read is not None else None


def whole(tier_read: TierRead | None, num_tokens: int = PAGE_TOKENS) -> torch.Tensor:
    assert tier_read is not None
    return concatenate_pieces(tier_read.pieces(0, num_tokens), CPU)


@pytest.fixture
def make_tiers() -> Iterator[Callable[..., TiersHarness]]:
    made: list[TiersHarness] = []

    def make(**settings: object) -> TiersHarness:
        made.append(TiersHarness(**settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.tiers.close()


@given(
    sizes=st.lists(st.integers(1, 70), min_size=1, max_size=12),
    freed=st.sets(st.integers(0, 11)),
    cut=st.tuples(st.integers(0, 70), st.integers(0, 70)),
)
def test_a_fragmented_pool_returns_values_unchanged(
    sizes: list[int], freed: set[int], cut: tuple[int, int]
) -> None:
    pool = ChunkPool(SPACE, 14 * PAGE + PAGE - 1, CPU)
    assert pool.capacity_bytes == 14 * PAGE
    allocations = {}
    for number, size in enumerate(sizes):
        fits = pool.used_bytes + pool.bytes_for(size) <= pool.capacity_bytes
        allocation = pool.allocate(size)
        assert (allocation is not None) == fits
        if allocation is not None:
            pool.fill(allocation, (value(number, size),))
            allocations[number] = allocation
    for number in freed & allocations.keys():
        pool.free(allocations.pop(number))
    size = (pool.capacity_bytes - pool.used_bytes) // PAGE * PAGE_TOKENS
    if size and (allocation := pool.allocate(size)) is not None:  # all pages that are left
        at = size // 3
        last = value(99, size)
        pool.fill(allocation, (last[:, :, :at], last[:, :, at:]))
        allocations[99] = allocation
        sizes = [*sizes, *[0] * (99 - len(sizes)), size]
    for number, allocation in allocations.items():
        expected = value(number, sizes[number])
        start, end = sorted(min(position, sizes[number]) for position in cut)
        views = pool.views(allocation, start, end)
        if start < end:
            assert torch.equal(concatenate_pieces(views, CPU), expected[:, :, start:end])
            assert all(half.is_contiguous() for view in views for layer in view for half in layer)
        else:
            assert not views
        assert torch.equal(
            concatenate_pieces(pool.views(allocation, 0, sizes[number]), CPU), expected
        )
    pool.check()


def test_a_stored_value_is_read_bit_for_bit(make_tiers: Callable[..., TiersHarness]) -> None:
    tiers = make_tiers(host_pages=8)
    tiers.put(offer(1, 37), offer(2, 16))
    tier_read = tiers.read(1, 37)
    assert torch.equal(whole(tier_read, 37), value(1, 37))
    assert tier_read is not None
    assert tier_read.tier == "host"
    assert torch.equal(whole(tiers.read(2)), value(2, 16))
    assert tiers.tiers.take_counts().held_bytes == {"host": 4 * PAGE}
    assert tiers.tiers.take_counts().held_bytes == {}, "nothing has changed since"


def test_a_read_gets_only_a_value_that_matches(make_tiers: Callable[..., TiersHarness]) -> None:
    tiers = make_tiers(host_pages=8)
    tiers.put(offer(1, base=5), offer(2, base=5, exact=False))
    assert tiers.read(1, base_position=5) is not None
    assert tiers.read(1, base_position=6) is None
    assert tiers.read(1, 15, base_position=5) is None
    assert tiers.read(1, base_position=5, domain="other") is None
    assert tiers.read(2, base_position=5) is None, "never as exact"
    assert tiers.read(2, base_position=5, exact=False) is not None
    assert tiers.read(3, base_position=5) is None


def test_an_exact_value_replaces_an_approximate_one_and_never_vice_versa(
    make_tiers: Callable[..., TiersHarness],
) -> None:
    tiers = make_tiers(host_pages=8)
    tiers.put(offer(1, exact=False, seed=10))
    tiers.put(offer(1, exact=True, seed=11))
    assert torch.equal(whole(tiers.read(1)), value(11, PAGE_TOKENS))
    tiers.put(offer(1, exact=False, base=3, seed=12), offer(1, exact=True, seed=13))
    assert torch.equal(whole(tiers.read(1)), value(11, PAGE_TOKENS))
    assert tiers.tiers.take_counts().evicted == {}


def test_a_value_with_another_base_position_replaces_the_old_one(
    make_tiers: Callable[..., TiersHarness],
) -> None:
    tiers = make_tiers(host_pages=8)
    tiers.put(offer(1, exact=False, base=3, seed=10), offer(1, exact=False, base=7, seed=11))
    assert tiers.read(1, base_position=3, exact=False) is None
    found = tiers.read(1, base_position=7, exact=False)
    assert torch.equal(whole(found), value(11, PAGE_TOKENS))


def test_an_evicted_value_is_read_to_its_end(make_tiers: Callable[..., TiersHarness]) -> None:
    tiers = make_tiers(host_pages=2)
    tiers.put(offer(1), offer(2))
    tier_read = tiers.hold(1)
    for number in range(3, 9):
        tiers.put(offer(number))
    assert tiers.where(1) is None
    assert torch.equal(whole(tier_read), value(1, PAGE_TOKENS))
    assert tiers.pools[PINNED].used_bytes == 2 * PAGE, "its pages count until the read ends"
    tier_read = None  # collected, which also closes it
    tiers.tiers.check()
    assert tiers.pools[PINNED].used_bytes == PAGE
    tiers.put(offer(9))
    assert tiers.pools[PINNED].used_bytes == 2 * PAGE
    tiers.tiers.check()


def test_a_read_that_is_closed_twice_ends_once(make_tiers: Callable[..., TiersHarness]) -> None:
    tiers = make_tiers(host_pages=2)
    tiers.put(offer(1))
    one, other = tiers.read(1), tiers.read(1)
    assert one is not None
    one.close()
    one.close()
    tiers.put(offer(2), offer(3))
    assert torch.equal(whole(other), value(1, PAGE_TOKENS))
    tiers.tiers.check()


def test_used_values_are_promoted_and_unused_ones_demoted(
    make_tiers: Callable[..., TiersHarness],
) -> None:
    tiers = make_tiers(device_pages=1, host_pages=3)
    tiers.put(offer(1), offer(2), offer(3))
    assert [tiers.where(n) for n in (1, 2, 3)] == ["host", "host", "device"]
    for _ in range(3):
        tiers.now += 1.0
        assert tiers.read(1) is not None
        tiers.rebalance()
    assert [tiers.where(n) for n in (1, 2, 3)] == ["device", "host", "host"]
    assert torch.equal(whole(tiers.read(1)), value(1, PAGE_TOKENS))
    assert torch.equal(whole(tiers.read(3)), value(3, PAGE_TOKENS))
    assert set(tiers.noted_reads) == {(key(1), REUSE)}
    assert tiers.tiers.take_counts().evicted == {}


def test_a_demotion_without_room_becomes_an_eviction(
    make_tiers: Callable[..., TiersHarness],
) -> None:
    tiers = make_tiers(device_pages=1, host_pages=2)
    tiers.put(offer(1), offer(2))
    assert [tiers.where(n) for n in (1, 2)] == ["host", "device"]
    tier_read = tiers.hold(1)  # keeps the pages that values would swap through
    tiers.put(offer(3))
    assert [tiers.where(n) for n in (1, 2, 3)] == [None, "host", "device"]
    tiers.tiers.take_counts()
    for _ in range(3):
        tiers.now += 1.0
        assert tiers.read(2) is not None
        tiers.rebalance()
    assert [tiers.where(n) for n in (2, 3)] == ["device", None]
    assert tiers.tiers.take_counts().evicted == {"device": 1}
    assert torch.equal(whole(tier_read), value(1, PAGE_TOKENS))


def test_queued_offers_are_bounded(make_tiers: Callable[..., TiersHarness]) -> None:
    tiers = make_tiers(host_pages=int(2 / QUEUE_SHARE))  # the queue has room for two offers
    tiers.tiers.offer(offer(number) for number in range(1, 6))
    tiers.rebalance()
    assert [tiers.where(n) is not None for n in range(1, 6)] == [True, True, False, False, False]
    tiers.put(offer(3))  # the queue has room again
    assert tiers.where(3) == "host"


def test_an_offer_that_fails_does_not_affect_others(
    make_tiers: Callable[..., TiersHarness],
) -> None:
    tiers = make_tiers(host_pages=16)

    def broken() -> torch.Tensor:
        raise RuntimeError("device error")

    bad = replace(offer(1), num_bytes=PAGE, native=broken)
    none = replace(offer(2), num_bytes=PAGE, native=lambda: None)
    tiers.put(bad, none, offer(3), offer(1))
    assert [tiers.where(n) for n in (1, 2, 3)] == ["host", None, "host"]
    tiers.tiers.check()
    assert tiers.tiers._queued_bytes == 0


def test_without_memory_no_value_is_stored(make_tiers: Callable[..., TiersHarness]) -> None:
    tiers = make_tiers()
    assert not tiers.tiers.has_memory
    tiers.put(offer(1))
    assert tiers.read(1) is None


@pytest.mark.parametrize("policy", TIER_POLICIES)
@settings(max_examples=25, deadline=None)
@given(
    device_pages=st.integers(0, 4),
    host_pages=st.integers(0, 6),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["offer", "read", "hold", "close"]),
            st.integers(1, 9),
            st.integers(1, 50),
        ),
        max_size=30,
    ),
)
def test_limits_hold_and_every_read_is_right(
    policy: str, device_pages: int, host_pages: int, steps: list[tuple[str, int, int]]
) -> None:
    tiers = TiersHarness(device_pages, host_pages, policy)
    held: list[tuple[int, int, TierRead]] = []
    sizes: dict[int, int] = {}
    for name, number, num_tokens in steps:
        tiers.now += 1.0
        if name == "offer":
            size = sizes.setdefault(number, num_tokens)
            tiers.put(offer(number, size))
        elif name == "close":
            for *_, oldest in held[:1]:
                oldest.close()
            held[:1] = []
        elif number in sizes and (tier_read := tiers.read(number, sizes[number])) is not None:
            assert torch.equal(whole(tier_read, sizes[number]), value(number, sizes[number]))
            if name == "hold":
                held.append((number, sizes[number], tier_read))
            else:
                tier_read.close()
            tiers.rebalance()
        for pool in tiers.pools.values():
            assert pool.used_bytes <= pool.capacity_bytes
        for one, size, tier_read in held:
            assert torch.equal(whole(tier_read, size), value(one, size))
    for *_, tier_read in held:
        tier_read.close()
    tiers.tiers.check()
    tiers.tiers.close()


def test_reads_and_moves_in_parallel_do_not_conflict(
    make_tiers: Callable[..., TiersHarness],
) -> None:
    """Threads read while values come and go beneath them."""
    tiers = make_tiers(device_pages=3, host_pages=5)
    ended = threading.Event()
    wrong: list[int] = []
    found = [0]

    def read(numbers: Sequence[int]) -> None:
        while not ended.is_set():
            for number in numbers:
                tier_read = tiers.read(number)
                if tier_read is None:
                    continue
                found[0] += 1
                if not torch.equal(whole(tier_read), value(number, PAGE_TOKENS)):
                    wrong.append(number)
                tier_read.close()
            tiers.tiers.start_rebalance()

    with ThreadPoolExecutor(3) as pool:
        reads = [pool.submit(read, range(start, 20, 3)) for start in range(3)]
        for number in (n % 20 for n in range(400)):
            tiers.put(offer(number))
        wait_until(lambda: found[0] or any(one.done() for one in reads))
        ended.set()
        for one in reads:
            one.result()
    assert found[0] > 0
    assert wrong == []
    tiers.rebalance()
    tiers.tiers.check()
