"""Decayed counts, HA-RAG's algorithms, the score assignment, and re-encoding."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.identity.variant import Codec, Precision
from ragcache_core.tiering.precision_assignment import (
    FINEST_FIRST,
    HA_RAG_SCHEMES,
    AccessObservation,
    DecayedCounts,
    HaRagAssignment,
    Placement,
    RankPlacement,
    decide_re_encoding,
)
from ragcache_core.tiering.score_assignment import (
    NATIVE_GRADE,
    Grade,
    MemoryBudget,
    ScoreAssignment,
    convex_hull,
    read_error,
    read_weights,
)

INT8 = Precision(Codec.INT8, Codec.INT8)
MIXED = Precision(Codec.INT8, Codec.INT4)
INT4 = Precision(Codec.INT4, Codec.INT4)
GRADES = (Grade(INT8, 0.53, 0.005), Grade(MIXED, 0.41, 0.03), Grade(INT4, 0.28, 0.11))
COARSENESS = {Precision(): 0, INT8: 1, MIXED: 2, INT4: 3}


def observations(accesses: list[float], num_bytes: int = 1000) -> list[AccessObservation[int]]:
    return [
        AccessObservation(key, count, num_bytes, score=count / num_bytes)
        for key, count in enumerate(accesses)
    ]


counts = st.lists(st.floats(0, 1e6), max_size=60)
variants = st.lists(
    st.builds(
        AccessObservation,
        key=st.integers(),
        accesses=st.floats(0, 1e6),
        native_bytes=st.integers(1, 1 << 30),
        score=st.floats(0, 1e6),
    ),
    max_size=60,
    unique_by=lambda one: one.key,
)
codecs = st.sampled_from(Codec)
precisions = st.builds(Precision, codecs, codecs)


# Decayed counts


def test_an_access_weighs_half_after_a_half_life() -> None:
    hotness: DecayedCounts[str] = DecayedCounts(half_life_s=10)
    hotness.add("a", now=100, times=4)
    assert hotness.count("a", now=110) == pytest.approx(2)
    hotness.add("a", now=120)
    assert hotness.count("a", now=120) == pytest.approx(2)
    assert hotness.count("never seen", now=120) == 0


def test_counts_of_removed_keys_are_forgotten() -> None:
    hotness: DecayedCounts[int] = DecayedCounts(half_life_s=10)
    for key in range(5):
        hotness.add(key, now=0)
    hotness.keep(lambda key: key == 3)
    assert len(hotness) == 1
    assert hotness.count(3, now=0) == 1


@given(
    times=st.lists(st.floats(0, 1e5), min_size=1, max_size=20).map(sorted),
    later=st.floats(0, 1e5),
)
def test_decay_keeps_the_order_of_counts(times: list[float], later: float) -> None:
    hotness: DecayedCounts[str] = DecayedCounts(half_life_s=3600)
    for now in times:
        hotness.add("often", now)
        hotness.add("often", now)
        hotness.add("seldom", now)
    now = times[-1] + later
    assert hotness.count("often", now) == pytest.approx(2 * hotness.count("seldom", now))


def test_a_half_life_is_positive() -> None:
    with pytest.raises(ValueError, match="half_life_s"):
        DecayedCounts(0)


# HA-RAG


@pytest.mark.parametrize("total", [0, 1, 7, 9, 10, 19, 20, 29, 100, 123])
def test_algorithm_1_cuts_exactly(total: int) -> None:
    ranks = list(range(total))
    random.Random(total).shuffle(ranks)
    assigned = HaRagAssignment().assign_precisions(
        [AccessObservation(key, float(total - rank), 1) for key, rank in enumerate(ranks)]
    )
    tenth = total // 10
    by_rank = sorted(assigned, key=lambda key: ranks[key])
    assert [assigned[key] for key in by_rank] == [
        *[HA_RAG_SCHEMES[0]] * tenth,
        *[HA_RAG_SCHEMES[1]] * tenth,
        *[HA_RAG_SCHEMES[2]] * tenth,
        *[HA_RAG_SCHEMES[3]] * (total - 3 * tenth),
    ]


@pytest.mark.parametrize("total", [0, 1, 19, 20, 40, 99, 100])
def test_algorithm_2_cuts_exactly(total: int) -> None:
    placed = HaRagAssignment().assign_placements(
        observations([float(total - key) for key in range(total)])
    )
    gpu, pinned, pageable = total * 5 // 100, total * 5 // 100, total * 10 // 100
    assert [placed[key] for key in range(total)] == [
        *[Placement.GPU] * gpu,
        *[Placement.PINNED] * pinned,
        *[Placement.PAGEABLE] * pageable,
        *[Placement.DISK] * (total - gpu - pinned - pageable),
    ]


def test_an_index_is_cut_exactly_in_spite_of_floats() -> None:
    # int(0.29 * 100) is 28
    placement = RankPlacement(gpu_share=0.29, pinned_share=0, pageable_share=0)
    placed = placement.assign_placements(observations([1.0] * 100))
    assert sum(memory is Placement.GPU for memory in placed.values()) == 29


@given(counts=counts)
def test_more_accesses_never_give_a_worse_precision(counts: list[float]) -> None:
    seen = observations(counts)
    assigned, placed = (
        HaRagAssignment().assign_precisions(seen),
        HaRagAssignment().assign_placements(seen),
    )
    for hot in seen:
        for cold in seen:
            if hot.accesses > cold.accesses:
                assert HA_RAG_SCHEMES.index(assigned[hot.key]) <= HA_RAG_SCHEMES.index(
                    assigned[cold.key]
                )
                assert list(Placement).index(placed[hot.key]) <= list(Placement).index(
                    placed[cold.key]
                )


@given(seen=variants, seed=st.integers())
@pytest.mark.parametrize(
    "assignment",
    [
        HaRagAssignment(),
        HaRagAssignment((INT8,), ()),
        ScoreAssignment(GRADES, max_error=0.01, memory=MemoryBudget(1 << 28, 1 << 29, 1 << 30)),
    ],
    ids=["HaRagAssignment", "one grade", "ScoreAssignment"],
)
def test_the_order_of_observations_does_not_matter(
    assignment: HaRagAssignment | ScoreAssignment,
    seen: list[AccessObservation[int]],
    seed: int,
) -> None:
    shuffled = list(seen)
    random.Random(seed).shuffle(shuffled)
    assert assignment.assign_precisions(shuffled) == assignment.assign_precisions(seen)
    assert assignment.assign_placements(shuffled) == assignment.assign_placements(seen)
    assert (
        set(assignment.assign_precisions(seen))
        == set(assignment.assign_placements(seen))
        == {o.key for o in seen}
    )


# Our assignment


@given(seen=variants, max_error=st.floats(0, 0.2), prior=st.sampled_from((0.0, 0.5, 10.0)))
def test_the_quality_bound_holds(
    seen: list[AccessObservation[int]], max_error: float, prior: float
) -> None:
    assigned = ScoreAssignment(GRADES, max_error, prior_accesses=prior).assign_precisions(seen)
    assert read_error(seen, assigned, GRADES, prior) <= max_error + 1e-9


@given(counts=counts, max_error=st.floats(0, 0.2))
def test_with_equal_sizes_more_accesses_never_give_a_coarser_precision(
    counts: list[float], max_error: float
) -> None:
    seen = observations(counts)
    assigned = ScoreAssignment(GRADES, max_error).assign_precisions(seen)
    for hot in seen:
        for cold in seen:
            if hot.accesses > cold.accesses:
                assert COARSENESS[assigned[hot.key]] <= COARSENESS[assigned[cold.key]]


@given(seen=variants, tight=st.floats(0, 0.2), loose=st.floats(0, 0.2))
def test_a_looser_bound_never_takes_more_bytes(
    seen: list[AccessObservation[int]], tight: float, loose: float
) -> None:
    tight, loose = sorted((tight, loose))
    sizes = {grade.precision: grade.size for grade in (NATIVE_GRADE, *GRADES)}

    def total(bound: float) -> float:
        assigned = ScoreAssignment(GRADES, bound).assign_precisions(seen)
        return sum(one.native_bytes * sizes[assigned[one.key]] for one in seen)

    assert total(loose) <= total(tight) + 1e-6


def test_it_stops_where_everything_fits() -> None:
    seen = observations([float(10 - key) for key in range(10)])
    assigned = ScoreAssignment(GRADES, max_error=1, capacity_bytes=9_000).assign_precisions(seen)
    assert list(assigned.values()) == [*[Precision()] * 7, *[INT8] * 3]


def test_unread_variants_are_coarse_and_often_read_ones_are_lossless() -> None:
    assignment = ScoreAssignment(GRADES, max_error=0.001, prior_accesses=0)
    assigned = assignment.assign_precisions(observations([1000, 1, 0, 0]))
    assert assigned[0] == Precision()
    assert assigned[2] == assigned[3] == INT4


def test_it_is_within_one_step_of_the_optimum() -> None:
    """Against all 4^6 assignments of six variants."""
    rng = random.Random(4)
    sizes = {grade.precision: grade for grade in (NATIVE_GRADE, *GRADES)}
    for _ in range(5):
        seen = [AccessObservation(key, rng.random(), rng.randrange(1, 1000)) for key in range(6)]
        bound = rng.uniform(0.001, 0.1)
        weights = read_weights(seen)
        least: dict[float, float] = {0.0: 0.0}  # error: bytes
        for one in seen:
            least_next: dict[float, float] = {}
            for error, num_bytes in least.items():
                for grade in sizes.values():
                    more = error + weights[one.key] * grade.error
                    if more <= bound:
                        taken = num_bytes + one.native_bytes * grade.size
                        least_next[more] = min(taken, least_next.get(more, taken))
            least = least_next
        assigned = ScoreAssignment(GRADES, bound).assign_precisions(seen)
        taken = sum(one.native_bytes * sizes[assigned[one.key]].size for one in seen)
        one_step = max(one.native_bytes for one in seen) * (1 - 0.53)
        assert min(least.values()) - 1e-9 <= taken <= min(least.values()) + one_step


def test_existing_error_counts_and_often_read_variants_want_more_precision() -> None:
    assignment = ScoreAssignment(GRADES, max_error=0.006)
    fresh = observations([100, 1, 1, 1])
    lossy = [replace(fresh[0], precision=INT4), *fresh[1:]]
    assigned = assignment.assign_precisions(lossy)
    assert decide_re_encoding(INT4, assigned[0]).wants_higher_precision
    # Nearly all reads meet an error of 0.11 by now, so no other variant may get any.
    assert [assigned[key] for key in (1, 2, 3)] == [Precision()] * 3


def test_unread_variants_do_not_count_as_free() -> None:
    seen = observations([3.0] * 5 + [0.0] * 95)
    free = ScoreAssignment(GRADES, max_error=0.02, prior_accesses=0).assign_precisions(seen)
    assert set(list(free.values())[5:]) == {INT4}
    careful = ScoreAssignment(GRADES, max_error=0.02, prior_accesses=0.5).assign_precisions(seen)
    assert list(careful.values()).count(INT4) < 20


@given(seen=variants)
def test_placement_stays_within_its_memories(seen: list[AccessObservation[int]]) -> None:
    memory = MemoryBudget(gpu_bytes=1 << 29, pinned_bytes=1 << 30, pageable_bytes=1 << 31)
    placed = ScoreAssignment((), max_error=0, memory=memory).assign_placements(seen)
    taken = dict.fromkeys(Placement, 0)
    for one in seen:
        taken[placed[one.key]] += one.native_bytes
    assert taken[Placement.GPU] <= memory.gpu_bytes
    assert taken[Placement.PINNED] <= memory.pinned_bytes
    assert taken[Placement.PAGEABLE] <= memory.pageable_bytes


def test_a_dominated_grade_is_not_used() -> None:
    worse = Grade(Precision(Codec.E5M2, Codec.E5M2), 0.53, 0.02)
    bent = Grade(Precision(Codec.GSE8, Codec.INT4), 0.5, 0.1)
    hull = convex_hull((NATIVE_GRADE, *GRADES, worse, bent))
    assert hull == [NATIVE_GRADE, *GRADES]


def test_a_smaller_lossless_grade_replaces_native() -> None:
    packed = Grade(Precision(Codec.PACKED, Codec.PACKED), 0.7, 0.0)
    assert convex_hull((NATIVE_GRADE, packed))[0] == packed


# Precision lost


@given(stored=precisions, assigned=precisions)
def test_only_lossless_values_are_re_encoded_and_as_a_whole(
    stored: Precision, assigned: Precision
) -> None:
    decision = decide_re_encoding(stored, assigned)
    assert decision.re_encode in {None, assigned}
    if not stored.lossless:
        assert decision.re_encode is None
        if assigned.lossless:
            assert decision.wants_higher_precision


@given(stored=precisions, assigned=precisions)
def test_a_second_decision_changes_nothing(stored: Precision, assigned: Precision) -> None:
    once = decide_re_encoding(stored, assigned)
    again = decide_re_encoding(once.re_encode or stored, assigned)
    assert again.re_encode is None
    assert again.wants_higher_precision == once.wants_higher_precision


def test_a_finer_codec_of_keys_or_of_values_is_wanted() -> None:
    assert decide_re_encoding(Precision(Codec.INT4, Codec.INT8), MIXED).wants_higher_precision
    assert not decide_re_encoding(MIXED, INT4).wants_higher_precision


def test_lossless_codecs_are_equivalent() -> None:
    packed = Precision(Codec.PACKED, Codec.PACKED)
    assert decide_re_encoding(Precision(), packed).re_encode == packed
    assert decide_re_encoding(packed, Precision()).re_encode is None
    assert not decide_re_encoding(packed, Precision()).wants_higher_precision


def test_every_lossy_codec_is_ranked() -> None:
    assert set(FINEST_FIRST) == {codec for codec in Codec if not codec.lossless}
