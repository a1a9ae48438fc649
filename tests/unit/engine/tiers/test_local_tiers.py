"""A worker's own tiers: what they give is what was put, within their limits, whoever reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from ragcache_core.identity.keys import KVSpace, VariantKey  # noqa: E402
from ragcache_core.tiering.precision_assignment import Placement  # noqa: E402
from ragcache_core.tiering.tier_placement import TIER_POLICIES  # noqa: E402
from ragcache_engine.kv_cache.chunk_pool import PAGE_TOKENS, ChunkPool, concatenate_pieces  # noqa: E402
from ragcache_engine.tiers.local_tiers import WAITING_SHARE, OfferedValue, TierRead, LocalTiers  # noqa: E402
from ragcache_kv.values.layout import value_bytes  # noqa: E402

SPACE = KVSpace("model", num_layers=2, num_kv_heads=1, head_dim=4, dtype="bfloat16")
CPU = torch.device("cpu")
PAGE = value_bytes(SPACE, PAGE_TOKENS)
GPU, PINNED = Placement.GPU, Placement.PINNED
TIMEOUT_S = 10.0


def key(number: int) -> VariantKey:
    return VariantKey(number.to_bytes(16, "big"), bytes(16))


def value(number: int, num_tokens: int) -> torch.Tensor:
    """Of its own numbers, so that one of another key would be known."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(2, 2, num_tokens, 1, 4, generator=generator).bfloat16()


def offer(
    number: int, num_tokens: int = PAGE_TOKENS, *, exact: bool = True, base: int = 0, seed: int = 0
) -> OfferedValue:
    made = value(seed or number, num_tokens)
    size = made.nbytes
    return OfferedValue(key(number), num_tokens, size, base, exact, "tenant", lambda: made)


@dataclass
class Kept:
    """LocalTiers of so many pages each. The memory of the device is the host's, which is all one."""

    device_pages: int = 0
    host_pages: int = 0
    policy: str = "score"
    told: list[VariantKey] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        limits = {GPU: self.device_pages, PINNED: self.host_pages}
        self.pools = {m: ChunkPool(SPACE, pages * PAGE, CPU) for m, pages in limits.items()}
        self.tiers = LocalTiers(self.pools, self.policy, self.told.extend, lambda: self.now)

    def put(self, *offers: OfferedValue) -> None:
        """Waits in between, as a bound on what waits would drop some."""
        for one in offers:
            self.now += 1.0
            self.tiers.offer((one,))
            self.settle()

    def settle(self) -> None:
        self.tiers.settle()
        deadline = time.monotonic() + TIMEOUT_S
        while self.tiers._moving:
            assert time.monotonic() < deadline
            time.sleep(0.0005)

    def read(self, number: int, num_tokens: int = PAGE_TOKENS, **other: object) -> TierRead | None:
        wanted = {"base_position": 0, "domain": "tenant", "exact": True} | other
        return self.tiers.read(key(number), num_tokens, **wanted)  # type: ignore[arg-type]

    def hold(self, number: int) -> TierRead | None:
        """A read that does not count as a use."""
        reading = self.read(number)
        self.tiers._reads.clear()
        return reading

    def where(self, number: int) -> str | None:
        reading = self.hold(number)
        return reading and reading.tier


def whole(reading: TierRead | None, num_tokens: int = PAGE_TOKENS) -> torch.Tensor:
    assert reading is not None
    return concatenate_pieces(reading.pieces(0, num_tokens), CPU)


@pytest.fixture
def kept() -> Iterator[Callable[..., Kept]]:
    made: list[Kept] = []

    def make(**settings: object) -> Kept:
        made.append(Kept(**settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.tiers.close()


@given(
    sizes=st.lists(st.integers(1, 70), min_size=1, max_size=12),
    freed=st.sets(st.integers(0, 11)),
    cut=st.tuples(st.integers(0, 70), st.integers(0, 70)),
)
def test_a_pool_gives_back_what_it_was_given_however_fragmented(
    sizes: list[int], freed: set[int], cut: tuple[int, int]
) -> None:
    pool = ChunkPool(SPACE, 14 * PAGE + PAGE - 1, CPU)
    assert pool.capacity_bytes == 14 * PAGE
    rooms = {}
    for number, size in enumerate(sizes):
        fits = pool.used_bytes + pool.bytes_for(size) <= pool.capacity_bytes
        room = pool.allocate(size)
        assert (room is not None) == fits
        if room is not None:
            pool.fill(room, (value(number, size),))
            rooms[number] = room
    for number in freed & rooms.keys():
        pool.free(rooms.pop(number))
    size = (pool.capacity_bytes - pool.used_bytes) // PAGE * PAGE_TOKENS
    if size and (room := pool.allocate(size)) is not None:  # all that is left, in however many runs
        at = size // 3
        last = value(99, size)
        pool.fill(room, (last[:, :, :at], last[:, :, at:]))
        rooms[99] = room
        sizes = [*sizes, *[0] * (99 - len(sizes)), size]
    for number, room in rooms.items():
        expected = value(number, sizes[number])
        start, end = sorted(min(place, sizes[number]) for place in cut)
        views = pool.views(room, start, end)
        if start < end:
            assert torch.equal(concatenate_pieces(views, CPU), expected[:, :, start:end])
            assert all(half.is_contiguous() for view in views for layer in view for half in layer)
        else:
            assert not views
        assert torch.equal(concatenate_pieces(pool.views(room, 0, sizes[number]), CPU), expected)
    pool.check()


def test_what_was_kept_is_read_bit_for_bit(kept: Callable[..., Kept]) -> None:
    tiers = kept(host_pages=8)
    tiers.put(offer(1, 37), offer(2, 16))
    reading = tiers.read(1, 37)
    assert torch.equal(whole(reading, 37), value(1, 37))
    assert reading is not None
    assert reading.tier == "host"
    assert torch.equal(whole(tiers.read(2)), value(2, 16))
    assert tiers.tiers.take_counts().held_bytes == {"host": 4 * PAGE}
    assert tiers.tiers.take_counts().held_bytes == {}, "nothing has changed since"


def test_nothing_else_than_what_is_wanted_is_given(kept: Callable[..., Kept]) -> None:
    tiers = kept(host_pages=8)
    tiers.put(offer(1, base=5), offer(2, base=5, exact=False))
    assert tiers.read(1, base_position=5) is not None
    assert tiers.read(1, base_position=6) is None
    assert tiers.read(1, 15, base_position=5) is None
    assert tiers.read(1, base_position=5, domain="other") is None
    assert tiers.read(2, base_position=5) is None, "never as exact"
    assert tiers.read(2, base_position=5, exact=False) is not None
    assert tiers.read(3, base_position=5) is None


def test_what_serves_exact_takes_the_place_of_what_does_not_and_never_the_other_way(
    kept: Callable[..., Kept],
) -> None:
    tiers = kept(host_pages=8)
    tiers.put(offer(1, exact=False, seed=10))
    tiers.put(offer(1, exact=True, seed=11))
    assert torch.equal(whole(tiers.read(1)), value(11, PAGE_TOKENS))
    tiers.put(offer(1, exact=False, base=3, seed=12), offer(1, exact=True, seed=13))
    assert torch.equal(whole(tiers.read(1)), value(11, PAGE_TOKENS))
    assert tiers.tiers.take_counts().evicted == {}


def test_a_value_that_was_computed_elsewhere_since_takes_the_place_of_the_old(
    kept: Callable[..., Kept],
) -> None:
    tiers = kept(host_pages=8)
    tiers.put(offer(1, exact=False, base=3, seed=10), offer(1, exact=False, base=7, seed=11))
    assert tiers.read(1, base_position=3, exact=False) is None
    found = tiers.read(1, base_position=7, exact=False)
    assert torch.equal(whole(found), value(11, PAGE_TOKENS))


def test_a_value_is_read_to_its_end_though_it_is_evicted(kept: Callable[..., Kept]) -> None:
    tiers = kept(host_pages=2)
    tiers.put(offer(1), offer(2))
    reading = tiers.hold(1)
    for number in range(3, 9):
        tiers.put(offer(number))
    assert tiers.where(1) is None
    assert torch.equal(whole(reading), value(1, PAGE_TOKENS))
    assert tiers.pools[PINNED].used_bytes == 2 * PAGE, "its room counts until nobody reads it"
    reading = None  # forgotten, not closed: which comes to the same
    tiers.tiers.check()
    assert tiers.pools[PINNED].used_bytes == PAGE
    tiers.put(offer(9))
    assert tiers.pools[PINNED].used_bytes == 2 * PAGE
    tiers.tiers.check()


def test_a_read_that_is_closed_twice_ends_once(kept: Callable[..., Kept]) -> None:
    tiers = kept(host_pages=2)
    tiers.put(offer(1))
    one, other = tiers.read(1), tiers.read(1)
    assert one is not None
    one.close()
    one.close()
    tiers.put(offer(2), offer(3))
    assert torch.equal(whole(other), value(1, PAGE_TOKENS))
    tiers.tiers.check()


def test_what_is_used_goes_up_and_what_is_not_goes_down(kept: Callable[..., Kept]) -> None:
    tiers = kept(device_pages=1, host_pages=3)
    tiers.put(offer(1), offer(2), offer(3))
    assert [tiers.where(n) for n in (1, 2, 3)] == ["host", "host", "device"]
    for _ in range(3):
        tiers.now += 1.0
        assert tiers.read(1) is not None
        tiers.settle()
    assert [tiers.where(n) for n in (1, 2, 3)] == ["device", "host", "host"]
    assert torch.equal(whole(tiers.read(1)), value(1, PAGE_TOKENS))
    assert torch.equal(whole(tiers.read(3)), value(3, PAGE_TOKENS))
    assert set(tiers.told) == {key(1)}
    assert tiers.tiers.take_counts().evicted == {}


def test_where_none_can_make_room_for_the_other_the_colder_goes(kept: Callable[..., Kept]) -> None:
    tiers = kept(device_pages=1, host_pages=2)
    tiers.put(offer(1), offer(2))
    assert [tiers.where(n) for n in (1, 2)] == ["host", "device"]
    reading = tiers.hold(1)  # keeps the room free that values change places by
    tiers.put(offer(3))
    assert [tiers.where(n) for n in (1, 2, 3)] == [None, "host", "device"]
    tiers.tiers.take_counts()
    for _ in range(3):
        tiers.now += 1.0
        assert tiers.read(2) is not None
        tiers.settle()
    assert [tiers.where(n) for n in (2, 3)] == ["device", None]
    assert tiers.tiers.take_counts().evicted == {"device": 1}
    assert torch.equal(whole(reading), value(1, PAGE_TOKENS))


def test_what_waits_is_bounded(kept: Callable[..., Kept]) -> None:
    tiers = kept(host_pages=2 * WAITING_SHARE)  # room for two to wait
    tiers.tiers.offer(offer(number) for number in range(1, 6))
    tiers.settle()
    assert [tiers.where(n) is not None for n in range(1, 6)] == [True, True, False, False, False]
    tiers.put(offer(3))  # there is room again
    assert tiers.where(3) == "host"


def test_a_value_that_cannot_be_made_costs_itself_and_no_other(kept: Callable[..., Kept]) -> None:
    tiers = kept(host_pages=16)

    def broken() -> torch.Tensor:
        raise RuntimeError("device error")

    bad = OfferedValue(key(1), PAGE_TOKENS, PAGE, 0, True, "tenant", broken)
    none = OfferedValue(key(2), PAGE_TOKENS, PAGE, 0, True, "tenant", lambda: None)
    tiers.put(bad, none, offer(3), offer(1))
    assert [tiers.where(n) for n in (1, 2, 3)] == ["host", None, "host"]
    tiers.tiers.check()
    assert tiers.tiers._waiting_bytes == 0


def test_without_memory_nothing_is_kept(kept: Callable[..., Kept]) -> None:
    tiers = kept()
    assert not tiers.tiers.keeps
    tiers.put(offer(1))
    assert tiers.read(1) is None


@pytest.mark.parametrize("policy", TIER_POLICIES)
@settings(max_examples=25, deadline=None)
@given(
    device_pages=st.integers(0, 4),
    host_pages=st.integers(0, 6),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["offer", "read", "hold", "let go"]),
            st.integers(1, 9),
            st.integers(1, 50),
        ),
        max_size=30,
    ),
)
def test_limits_hold_and_every_reader_reads_right(
    policy: str, device_pages: int, host_pages: int, steps: list[tuple[str, int, int]]
) -> None:
    kept = Kept(device_pages, host_pages, policy)
    held: list[tuple[int, int, TierRead]] = []
    sizes: dict[int, int] = {}
    for name, number, num_tokens in steps:
        kept.now += 1.0
        if name == "offer":
            size = sizes.setdefault(number, num_tokens)
            kept.put(offer(number, size))
        elif name == "let go":
            for *_, reading in held[:1]:
                reading.close()
            held[:1] = []
        elif number in sizes and (reading := kept.read(number, sizes[number])) is not None:
            assert torch.equal(whole(reading, sizes[number]), value(number, sizes[number]))
            if name == "hold":
                held.append((number, sizes[number], reading))
            else:
                reading.close()
            kept.settle()
        for pool in kept.pools.values():
            assert pool.used_bytes <= pool.capacity_bytes
        for one, size, reading in held:
            assert torch.equal(whole(reading, size), value(one, size))
    for *_, reading in held:
        reading.close()
    kept.tiers.check()
    kept.tiers.close()


def test_readers_and_the_mover_do_not_meet(kept: Callable[..., Kept]) -> None:
    """Threads read while values come and go beneath them."""
    tiers = kept(device_pages=3, host_pages=5)
    ended = threading.Event()
    wrong: list[int] = []
    found = [0]

    def read(numbers: Sequence[int]) -> None:
        while not ended.is_set():
            for number in numbers:
                reading = tiers.read(number)
                if reading is None:
                    continue
                found[0] += 1
                if not torch.equal(whole(reading), value(number, PAGE_TOKENS)):
                    wrong.append(number)
                reading.close()
            tiers.tiers.settle()

    with ThreadPoolExecutor(3) as pool:
        reads = [pool.submit(read, range(start, 20, 3)) for start in range(3)]
        for number in (n % 20 for n in range(400)):
            tiers.put(offer(number))
        while not found[0] and not any(one.done() for one in reads):
            time.sleep(0.001)
        ended.set()
        for one in reads:
            one.result()
    assert found[0] > 0
    assert wrong == []
    tiers.settle()
    tiers.tiers.check()
