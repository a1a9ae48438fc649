"""All policies in one suite, and each against a naive model of its definition."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.support.clairvoyant import Intervals, clairvoyant
from bench.support.comparison_policies import POLICY_NAMES, make_policy
from bench.support.hazard_bound import hazard_bounds
from bench.support.traces import BYTES_PER_TOKEN, Access, Replay, Request, Trace, computed_prefill_s
from ragcache_core.eviction import DEFAULT_POLICY, EvictionCandidate, EvictionPolicy
from ragcache_core.eviction import POLICY_NAMES as PRODUCT_POLICY_NAMES
from ragcache_core.eviction.admission import make_admission
from ragcache_core.eviction.policy import MAX_PROTECTED_PER_SEARCH
from ragcache_core.eviction.reuse_by_depth import ReuseByDepth
from ragcache_core.eviction.score import FIRST_HALF_LIFE_S, USES_EXPONENT, ScorePolicy
from ragcache_core.store_api import VariantUse

MONOTONE = tuple(name for name in POLICY_NAMES if name not in {"pgdsf", "score"})
"""Policies under which a use never lowers a priority.

PGDSF's window may end meanwhile, and the half-life of the score may change. They have separate
tests.
"""

KEYS = tuple(range(12))


@dataclass(frozen=True)
class Step:
    """One call. dt: seconds since the previous call. protected: leased keys."""

    call: str
    key: int
    num_bytes: int
    num_tokens: int
    cost_s: float
    parent: int | None
    dt: float
    protected: frozenset[int]


steps = st.lists(
    st.builds(
        Step,
        call=st.sampled_from(["add", "add", "add", "touch", "touch", "evict", "evict", "remove"]),
        key=st.sampled_from(KEYS),
        num_bytes=st.integers(1, 9),
        num_tokens=st.integers(1, 4),
        cost_s=st.sampled_from([0.0, 0.25, 1.0, 3.0]),
        # A parent has a lower number, so there are no cycles.
        parent=st.none() | st.integers(0, 10),
        dt=st.sampled_from([0.0, 1.0, 50.0, 4000.0]),
        protected=st.frozensets(st.sampled_from(KEYS), max_size=4),
    ),
    max_size=80,
)


def candidate_of(step: Step) -> EvictionCandidate[int]:
    parent = step.parent if step.parent is not None and step.parent < step.key else None
    return EvictionCandidate(step.num_bytes, step.num_tokens, step.cost_s, parent)


def anything(key: int) -> bool:
    return True


def candidate(
    num_bytes: int = 1, cost_s: float = 1.0, parent: str | None = None
) -> EvictionCandidate[str]:
    return EvictionCandidate(num_bytes, 1, cost_s, parent)


def victims(policy: EvictionPolicy[str]) -> list[str]:
    """Everything, in the order in which it goes."""
    order = []
    while (key := policy.evict(lambda _: True)) is not None:
        order.append(key)
    return order


@pytest.mark.parametrize("leaves_only", [True, False])
@pytest.mark.parametrize("name", POLICY_NAMES)
@settings(max_examples=60)
@given(script=steps)
def test_every_policy_keeps_its_contract_under_random_use(
    name: str, leaves_only: bool, script: list[Step]
) -> None:
    policy: EvictionPolicy[int] = make_policy(name, leaves_only=leaves_only)
    twin: EvictionPolicy[int] = make_policy(name, leaves_only=leaves_only)
    stored: dict[int, EvictionCandidate[int]] = {}
    now = 0.0
    for step in script:
        now += step.dt
        if step.call == "add":
            stored[step.key] = candidate_of(step)
            policy.add(step.key, stored[step.key], now)
            twin.add(step.key, stored[step.key], now)
        elif step.call == "touch":
            before = policy.priority(step.key, now) if step.key in stored else None
            policy.touch(step.key, now)
            twin.touch(step.key, now)
            if before is not None and name in MONOTONE:
                assert policy.priority(step.key, now) >= before - 1e-9
        elif step.call == "remove":
            stored.pop(step.key, None)
            policy.remove(step.key)
            twin.remove(step.key)
        else:
            parents = {c.parent for c in stored.values()} if leaves_only else set()
            free = {key for key in stored if key not in step.protected and key not in parents}
            expected = policy.advance_to_victim(lambda key: key not in step.protected)  # noqa: B023
            assert len(policy) == len(stored)
            victim = policy.evict(lambda key: key not in step.protected)  # noqa: B023
            assert victim == expected  # what it announces is what it does
            assert victim == twin.evict(lambda key: key not in step.protected)  # noqa: B023
            assert (victim in free) if free else victim is None
            if victim is not None:
                del stored[victim]
                assert victim not in policy
        assert len(policy) == len(stored)
        assert all((key in policy) == (key in stored) for key in KEYS)
        policy.check()
    drained = []
    while (key := policy.evict(anything)) is not None:
        drained.append(key)
        policy.check()
    assert sorted(drained) == sorted(stored)  # each key once


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_parent_outlives_its_children_even_if_used_least(name: str) -> None:
    policy: EvictionPolicy[str] = make_policy(name, leaves_only=True)
    policy.add("root", candidate(), 0.0)
    policy.add("middle", candidate(parent="root"), 1.0)
    policy.add("leaf", candidate(parent="middle"), 2.0)
    for now in range(3, 9):
        policy.touch("leaf", float(now))
    assert victims(policy) == ["leaf", "middle", "root"]


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_child_may_be_added_before_its_parent(name: str) -> None:
    policy: EvictionPolicy[str] = make_policy(name, leaves_only=True)
    policy.add("leaf", candidate(parent="root"), 0.0)
    policy.add("root", candidate(), 1.0)
    assert policy.evict(lambda key: key != "leaf") is None
    assert victims(policy) == ["leaf", "root"]


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_leased_neighbours_do_not_hide_the_only_victim(name: str) -> None:
    policy: EvictionPolicy[str] = make_policy(name, leaves_only=False)
    for number in range(200):
        policy.add(f"leased {number}", candidate(), float(number))
    policy.add("free", candidate(cost_s=9.0), 200.0)
    assert policy.evict(lambda key: key == "free") == "free"
    assert policy.evict(lambda key: key == "free") is None
    assert len(policy) == 200
    policy.check()


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_search_is_bounded_and_the_next_one_continues(name: str) -> None:
    policy: EvictionPolicy[int] = make_policy(name, leaves_only=False)
    for number in range(10 * MAX_PROTECTED_PER_SEARCH):
        policy.add(number, EvictionCandidate(1, 1, 1.0), float(number))
    asked: list[int] = []

    def only_the_last(key: int) -> bool:
        asked.append(key)
        return key == 10 * MAX_PROTECTED_PER_SEARCH - 1

    searches = 1
    while policy.evict(only_the_last) is None:
        assert len(asked) <= searches * MAX_PROTECTED_PER_SEARCH
        searches += 1
        policy.check()
        assert searches <= 50
    assert len(policy) == 10 * MAX_PROTECTED_PER_SEARCH - 1
    left = set()
    for _ in range(20 * MAX_PROTECTED_PER_SEARCH):  # nothing that was passed over is lost
        left.add(policy.evict(lambda _: True))
    assert left >= set(range(10 * MAX_PROTECTED_PER_SEARCH - 1))
    policy.check()


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_entries_in_a_cycle_are_evicted_last(name: str) -> None:
    policy: EvictionPolicy[str] = make_policy(name, leaves_only=True)
    policy.add("a", candidate(parent="b"), 0.0)
    policy.add("b", candidate(parent="a"), 1.0)
    policy.add("own", candidate(parent="own"), 2.0)
    policy.add("leaf", candidate(parent="a"), 3.0)
    assert policy.evict(lambda key: key != "leaf") is None
    assert policy.evict(lambda _: True) == "leaf"
    assert policy.evict(lambda key: key == "b") == "b"
    policy.check()
    assert sorted(victims(policy)) == ["a", "own"]


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_resize_is_not_a_use(name: str) -> None:
    policy: EvictionPolicy[str] = make_policy(name, leaves_only=False)
    for key in "abc":
        policy.add(key, candidate(num_bytes=8), 0.0)
    before = {key: policy.priority(key, 0.0) for key in "abc"}
    policy.resize("a", candidate(num_bytes=4))
    policy.resize("b", candidate(num_bytes=16))
    policy.check()
    gained = {"a": 1.0, "b": -1.0, "c": 0.0} if name == "score" else dict.fromkeys("abc", 0.0)
    assert {key: policy.priority(key, 0.0) - before[key] for key in "abc"} == gained
    assert victims(policy) == (["b", "c", "a"] if name == "score" else ["a", "b", "c"])


def test_names_are_checked() -> None:
    assert DEFAULT_POLICY in PRODUCT_POLICY_NAMES == ("score", "pgdsf", "lru", "cachecraft")
    with pytest.raises(ValueError, match="no policy 'best'"):
        make_policy("best", leaves_only=True)


@pytest.mark.parametrize("bad", [(0, 1, 1.0), (1, 0, 1.0), (1, 1, -1.0), (1, 1, float("nan"))])
def test_a_candidate_is_checked(bad: tuple[int, int, float]) -> None:
    with pytest.raises(ValueError, match="at least"):
        EvictionCandidate(*bad)


@dataclass
class Model:
    """A naive O(n) policy that evicts the lowest rank, written from the papers."""

    rank: Callable[[int], float]

    def victim(self, stored: dict[int, EvictionCandidate[int]], leaves_only: bool) -> float | None:
        parents = {c.parent for c in stored.values()} if leaves_only else set()
        return min((self.rank(key) for key in stored if key not in parents), default=None)


@given(script=steps)
def test_lru_equals_an_ordered_dict(script: list[Step]) -> None:
    policy: EvictionPolicy[int] = make_policy("lru", leaves_only=False)
    model: OrderedDict[int, None] = OrderedDict()
    for step in script:
        if step.call == "add":
            policy.add(step.key, candidate_of(step), 0.0)
            model[step.key] = None
            model.move_to_end(step.key)
        elif step.call == "touch":
            policy.touch(step.key, 0.0)
            if step.key in model:
                model.move_to_end(step.key)
        elif step.call == "remove":
            policy.remove(step.key)
            model.pop(step.key, None)
        else:
            may = [key for key in model if key not in step.protected]
            assert policy.evict(lambda key: key not in step.protected) == next(  # noqa: B023
                iter(may), None
            )
            for key in may[:1]:
                del model[key]


@pytest.mark.parametrize("leaves_only", [True, False])
@pytest.mark.parametrize("name", ["gdsf", "pgdsf"])
@given(script=steps)
def test_greedy_dual_is_algorithm_1_of_ragcache(
    name: str, leaves_only: bool, script: list[Step]
) -> None:
    """Within one window, so that a frequency is a plain count."""
    policy: EvictionPolicy[int] = make_policy(name, leaves_only=leaves_only)
    stored: dict[int, EvictionCandidate[int]] = {}
    clock = 0.0
    frequency: dict[int, int] = {}
    costs: dict[int, list[float]] = {}
    priority: dict[int, float] = {}

    def retrieve(key: int) -> None:
        frequency[key] = frequency.get(key, 0) + 1
        mean = sum(costs[key]) / len(costs[key]) if name == "pgdsf" else 1.0
        priority[key] = clock + frequency[key] * mean

    for number, step in enumerate(script):
        now = float(number)
        if step.call == "add":
            entry = candidate_of(step)
            if step.key not in stored:
                costs.setdefault(step.key, []).append(entry.cost_s / entry.num_tokens)
            stored[step.key] = entry
            policy.add(step.key, entry, now)
            retrieve(step.key)
        elif step.call == "touch":
            policy.touch(step.key, now)
            if step.key in stored:
                retrieve(step.key)
        elif step.call == "remove":
            policy.remove(step.key)
            if stored.pop(step.key, None) is not None:  # a key that is not stored may be remembered
                del frequency[step.key], costs[step.key]
        else:
            lowest = Model(priority.__getitem__).victim(stored, leaves_only)
            victim = policy.evict(anything)
            assert (victim is None) == (lowest is None)
            if victim is not None and lowest is not None:
                # Equal priorities may go in any order; sums of floats differ in their last bits.
                assert priority[victim] == pytest.approx(lowest, abs=1e-9)
                clock = max(clock, priority[victim])
                del stored[victim]
                if name == "gdsf":  # frequencies are of the stay
                    del frequency[victim]
        for key in stored:
            assert policy.priority(key, now) == pytest.approx(priority[key], abs=1e-9)


def test_pgdsf_counts_uses_in_a_window_only() -> None:
    policy: EvictionPolicy[str] = make_policy("pgdsf", leaves_only=False, window_s=10.0)
    policy.add("once popular", candidate(), 0.0)
    for _ in range(9):
        policy.touch("once popular", 1.0)
    assert policy.priority("once popular", 1.0) == 10.0
    policy.touch("once popular", 15.0)  # half of the window before is still in sight
    assert policy.priority("once popular", 15.0) == 6.0
    policy.touch("once popular", 50.0)
    assert policy.priority("once popular", 50.0) == 1.0


def test_pgdsf_averages_the_cost_of_its_misses() -> None:
    """Formula 4: the mean over the requests that did not find it."""
    policy: EvictionPolicy[str] = make_policy("pgdsf", leaves_only=False)
    policy.add("a", EvictionCandidate(1, 2, 4.0), 0.0)
    assert policy.evict(lambda _: True) == "a"
    policy.add("a", EvictionCandidate(1, 2, 8.0), 1.0)
    clock, frequency, mean = 2.0, 2, 3.0
    assert policy.priority("a", 1.0) == clock + frequency * mean


def test_lfu_evicts_the_least_used() -> None:
    policy: EvictionPolicy[str] = make_policy("lfu", leaves_only=False)
    for key in "abc":
        policy.add(key, candidate(), 0.0)
    for key in "aab":
        policy.touch(key, 1.0)
    assert victims(policy) == ["c", "b", "a"]


def test_cachecraft_ranks_by_the_savings_of_each_use() -> None:
    policy: EvictionPolicy[str] = make_policy("cachecraft", leaves_only=False)
    for key in ("fits", "needs much fixing", "matches"):
        policy.add(key, candidate(), 0.0)
    policy.touch("fits", 1.0, VariantUse(0.25))
    policy.touch("needs much fixing", 1.0, VariantUse(1.0))
    policy.touch("needs much fixing", 1.0, VariantUse(1.0))
    policy.touch("matches", 1.0, VariantUse(0.0))
    assert policy.priority("fits", 1.0) == 5.0  # 1 + 1 / 0.25
    assert policy.priority("matches", 1.0) == 21.0  # the floor of 0.05
    assert victims(policy) == ["needs much fixing", "fits", "matches"]


@given(
    uses=st.lists(st.floats(0.0, 50.0), max_size=30),
    cost_s=st.floats(0.001, 10.0),
    num_bytes=st.integers(1, 1 << 40),
)
def test_score_and_pgdsf_rise_with_every_use(
    uses: list[float], cost_s: float, num_bytes: int
) -> None:
    """Within one window (PGDSF), and with a constant half-life (the score)."""
    score: ScorePolicy[str] = ScorePolicy(leaves_only=False)
    pgdsf: EvictionPolicy[str] = make_policy("pgdsf", leaves_only=False)
    for policy in (score, pgdsf):
        policy.add("a", EvictionCandidate(num_bytes, 1, cost_s), 0.0)
    now = 0.0
    for gap_s in uses:
        now += gap_s
        half_life_s = score.half_life_s
        for policy in (score, pgdsf):
            before = policy.priority("a", now)
            policy.touch("a", now)
            if policy is pgdsf or score.half_life_s == half_life_s:
                assert policy.priority("a", now) >= before


def test_the_score_is_saved_seconds_per_byte_and_decays() -> None:
    score: ScorePolicy[str] = ScorePolicy(leaves_only=False)
    score.add("a", EvictionCandidate(num_bytes=8, num_tokens=1, cost_s=2.0), 100.0)
    assert score.priority("a", 100.0) == pytest.approx(-2.0)  # log2(2 / 8)
    assert score.priority("a", 100.0 + FIRST_HALF_LIFE_S) == pytest.approx(-3.0)


@given(script=steps)
def test_scores_keep_their_order_as_time_goes_by(script: list[Step]) -> None:
    """What lets the heap do without the time."""
    score: ScorePolicy[int] = ScorePolicy(leaves_only=False)
    for number, step in enumerate(script):
        score.add(step.key, candidate_of(step), float(number))
    stored = [key for key in KEYS if key in score]
    soon = sorted(stored, key=lambda key: (score.priority(key, 100.0), key))
    later = [score.priority(key, 5000.0) for key in soon]
    assert all(a <= b + 1e-6 for a, b in pairwise(later))


def test_the_score_remembers_evicted_entries() -> None:
    score: EvictionPolicy[str] = make_policy("score", leaves_only=False)
    score.add("again", candidate(), 0.0)
    assert score.evict(lambda _: True) == "again"
    score.add("new", candidate(), 1.0)
    score.add("again", candidate(), 1.0)
    assert victims(score) == ["new", "again"]


def test_the_half_life_follows_the_traffic() -> None:
    """Whether uses are a second or an hour apart, it ends near twice their gap."""
    for gap_s in (1.0, 3600.0):
        score: ScorePolicy[int] = ScorePolicy(leaves_only=False)
        now = 0.0
        for _ in range(1500):
            for key in KEYS:
                score.add(key, EvictionCandidate(1, 1, 1.0), now)
            now += gap_s
        score.check()
        assert 2.0 * gap_s / 1.5 < score.half_life_s < 2.0 * gap_s * 1.5


def prompts_that_share_their_first_chunk(*, leaves_only: bool) -> ScorePolicy[str]:
    """Return a policy that has seen 200 prompts of a shared root, used twice, and a child."""
    policy: ScorePolicy[str] = ScorePolicy(leaves_only=leaves_only)
    for number in range(200):
        policy.add(f"root {number}", candidate(), float(number))
        policy.add(f"child {number}", candidate(parent=f"root {number}"), float(number))
        policy.touch(f"root {number}", float(number))
    for number in range(200):
        policy.remove(f"child {number}")
        policy.remove(f"root {number}")
    return policy


@pytest.mark.parametrize(("leaves_only", "first"), [(True, "later child"), (False, "earlier root")])
def test_the_score_learns_which_depths_are_asked_for_again(leaves_only: bool, first: str) -> None:
    policy = prompts_that_share_their_first_chunk(leaves_only=leaves_only)
    policy.add("earlier root", candidate(), 200.0)
    policy.add("later child", candidate(parent="a root of another shard"), 201.0)
    assert policy.evict(lambda key: True) == first


def test_a_depth_that_is_asked_for_as_often_does_not_change_the_order() -> None:
    policy: ScorePolicy[str] = ScorePolicy(leaves_only=True)
    for number in range(200):
        policy.add(f"root {number}", candidate(), float(number))
        policy.add(f"child {number}", candidate(parent=f"root {number}"), float(number))
        policy.touch(f"root {number}", float(number))
        policy.touch(f"child {number}", float(number))
    policy.add("earlier root", candidate(), 200.0)
    policy.add("later child", candidate(parent="a root of another shard"), 201.0)
    assert policy.priority("later child", 201.0) > policy.priority("earlier root", 201.0)


def test_the_score_remembers_the_depth_of_evicted_entries() -> None:
    policy = prompts_that_share_their_first_chunk(leaves_only=True)
    policy.add("root", candidate(), 200.0)
    policy.add("child", candidate(parent="root"), 200.0)
    once = policy.priority("child", 200.0)
    assert policy.evict(lambda key: True) == "child"
    policy.count_rejected("child", candidate(parent="root"), 200.0)
    assert policy.prospective_priority("child", candidate(parent="root"), 200.0) == pytest.approx(
        once + USES_EXPONENT * math.log2(3)
    )


@given(
    st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=200),
    st.integers(0, 20),
)
def test_a_share_of_reuse_is_finite_and_starts_at_none(
    entries: list[tuple[int, bool]], depth: int
) -> None:
    reuse = ReuseByDepth()
    assert reuse.log2_share(depth) == 0.0
    for one, is_reused in entries:
        reuse.add_entry(one)
        if is_reused:
            reuse.add_reuse(one)
    reuse.publish()
    assert not reuse.has_moved()
    assert math.isfinite(reuse.log2_share(depth))
    assert reuse.log2_share(0) == 0.0


def test_a_full_computation_adds_one_to_the_frequency_of_reuse() -> None:
    policy: EvictionPolicy[str] = make_policy("cachecraft", leaves_only=False)
    policy.add("a", candidate(), 0.0)
    policy.add("a", candidate(), 1.0)
    assert policy.priority("a", 1.0) == 2.0


@given(
    samples=st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0]), max_size=8),
    first=st.sampled_from([0.0, 0.5, 2.0]),
)
def test_pgdsf_averages_over_the_requests_that_computed_an_entry(
    samples: list[float], first: float
) -> None:
    """Formula 4. A reuse counts as a retrieval and adds no sample."""
    policy: EvictionPolicy[str] = make_policy("pgdsf", leaves_only=False)
    policy.add("a", EvictionCandidate(1, 1, cost_s=7.0, token_s=first), 0.0)
    for token_s in samples:
        policy.touch("a", 1.0, VariantUse(token_s=token_s))
    costs = [first or 7.0, *filter(None, samples)]
    mean = sum(costs) / len(costs)
    assert policy.priority("a", 1.0) == pytest.approx((1 + len(samples)) * mean)


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


def sequence_of(keys: Iterable[int]) -> Trace:
    """Return a blend that asks for one chunk of one size at a time, one a second."""
    accesses = [Access(key, None, 1, 1.0) for key in keys]
    made = [Request(float(number), (one,)) for number, one in enumerate(accesses)]
    return Trace("", exact=False, requests=tuple(made))


def test_what_a_queue_needs_is_not_evicted() -> None:
    trace = sequence_of([1, 2, 3, 4, 5, 1])

    def hits(lookahead: int) -> int:
        lru = make_policy("lru", leaves_only=False)
        admits = make_admission("always", lru)
        return Replay(lru, admits, 2 * BYTES_PER_TOKEN, lookahead).run(trace).hit_tokens

    assert [hits(lookahead) for lookahead in (0, 2, 3)] == [0, 0, 1]


@given(st.lists(st.integers(0, 5), min_size=8, max_size=40), st.integers(1, 5))
def test_the_online_bound_is_between_nothing_and_an_infinite_tier(
    keys: list[int], capacity: int
) -> None:
    trace = sequence_of(keys)
    sizes = [0, capacity * BYTES_PER_TOKEN, 6 * BYTES_PER_TOKEN]
    nothing, bound, all_of_it = hazard_bounds(trace, sizes)
    repeated = (len(keys) - len(set(keys))) / len(keys)
    assert nothing == 0.0
    assert nothing <= bound <= all_of_it + 1e-9
    assert all_of_it == pytest.approx(repeated)


def test_the_online_bound_keeps_popular_chunks() -> None:
    popular = [key for number in range(50) for key in (1, 100 + number)]
    (bound,) = hazard_bounds(sequence_of(popular), [BYTES_PER_TOKEN])
    assert bound == pytest.approx(49 / 100), "one chunk in two requests, after its first"


def test_prefill_takes_longer_with_more_cached_and_computed_tokens() -> None:
    for cached, uncached in ((0, 100), (1000, 100), (5000, 3000)):
        seconds = computed_prefill_s(cached, uncached)
        assert 0 < seconds < computed_prefill_s(cached + 500, uncached)
        assert seconds < computed_prefill_s(cached, uncached + 50)
