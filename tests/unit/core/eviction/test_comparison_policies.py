"""The benchmark of policies: the clairvoyant policy and the replay of traces."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.support.clairvoyant import Intervals, clairvoyant
from bench.support.comparison_policies import POLICY_NAMES, make_policy
from bench.support.traces import BYTES_PER_TOKEN, Access, Replay, Request, Trace, computed_prefill_s
from ragcache_core.eviction.admission import make_admission

UNIT_BYTES = 10 * BYTES_PER_TOKEN


def trace_of(requests: list[list[int]], exact: bool) -> Trace:
    """Return a trace of chunks with 10 tokens and 1 second each. exact: requests are tree paths."""
    numbers: dict[tuple[int, ...], int] = {}
    made = []
    for time_s, chunks in enumerate(requests):
        accesses: list[Access] = []
        for index, chunk in enumerate(chunks):
            name = tuple(chunks[: index + 1]) if exact else (chunk,)
            key = numbers.setdefault(name, len(numbers))
            parent = accesses[-1].key if exact and accesses else None
            accesses.append(Access(key, parent, 10, 1.0))
        made.append(Request(float(time_s), tuple(accesses)))
    return Trace("test", exact, tuple(made))


requests = st.lists(st.lists(st.integers(0, 3), max_size=3, unique=True), min_size=1, max_size=8)


@settings(max_examples=60)
@given(requests, st.booleans(), st.integers(0, 5))
def test_no_policy_beats_the_clairvoyant_where_sizes_are_equal(
    asked: list[list[int]], exact: bool, room: int
) -> None:
    trace = trace_of(asked, exact)
    intervals = Intervals(trace)
    best = clairvoyant(intervals, intervals.cost_s, room * UNIT_BYTES)
    assert best.gain <= best.bound + 1e-9
    for name in POLICY_NAMES:
        policy = make_policy(name, leaves_only=exact)
        replay = Replay(policy, make_admission("always", policy), room * UNIT_BYTES)
        assert replay.run(trace).saved_s <= best.gain + 1e-9
        policy.check()


@settings(max_examples=60)
@given(requests, st.booleans(), st.integers(0, 3))
def test_the_clairvoyant_is_optimal_where_sizes_are_equal(
    asked: list[list[int]], exact: bool, room: int
) -> None:
    """Compare with every choice of intervals."""
    intervals = Intervals(trace_of(asked[:5], exact))
    count = len(intervals.start)
    optimum = 0
    for size in range(min(count, 9) + 1):
        for chosen in combinations(range(count), size):
            load = [0] * intervals.num_requests
            for index in chosen:
                for request in range(intervals.start[index], intervals.end[index]):
                    load[request] += 1
            if max(load, default=0) <= room:
                optimum = max(optimum, size)
    found = clairvoyant(intervals, intervals.cost_s, room * UNIT_BYTES)
    assert found.gain >= optimum


def test_a_replay_counts_a_prefix_up_to_its_first_gap() -> None:
    trace = trace_of([[0, 1], [0, 1], [2, 1], [0, 2]], exact=True)
    policy = make_policy("lru", leaves_only=True)
    tally = Replay(policy, make_admission("always", policy), 100 * UNIT_BYTES).run(trace)
    assert (tally.tokens, tally.hit_tokens, tally.saved_s) == (80, 30, 3.0)
    assert tally.written_bytes == 5 * UNIT_BYTES


def test_prefill_takes_longer_with_more_cached_and_computed_tokens() -> None:
    for cached, uncached in ((0, 100), (1000, 100), (5000, 3000)):
        seconds = computed_prefill_s(cached, uncached)
        assert 0 < seconds < computed_prefill_s(cached + 500, uncached)
        assert seconds < computed_prefill_s(cached, uncached + 50)
