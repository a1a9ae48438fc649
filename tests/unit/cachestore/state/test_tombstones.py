"""The deletes that a store remembers, and what they cover."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ragcache_cachestore.state.tombstones import SteadyClock, Tombstones
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Origin
from ragcache_core.store_api import Deletion, ForgottenDeletes, Tombstone
from tests.kit.store import key


def tombstone(sequence: int, made_at_ms: int = 0, **what: object) -> Tombstone:
    return Tombstone(
        sequence,
        Deletion(id=sequence.to_bytes(16), made_at_ms=made_at_ms, **what),  # type: ignore[arg-type]
    )


def remembered(*tombstones: Tombstone) -> Tombstones:
    found = Tombstones()
    for one in tombstones:
        found.add(one, one.sequence)
    return found


def test_what_a_delete_covers() -> None:
    after = Origin(prefix_chunks=(key(1).chunk,))
    document = Origin(domain="acme", document="doc")
    cases: list[tuple[dict[str, Any], VariantKey, Origin, bool]] = [
        ({"chunks": (key(1).chunk,)}, key(1, 7), Origin(), True),
        ({"chunks": (key(1).chunk,)}, key(2), after, True),
        ({"chunks": (key(2).chunk,)}, key(3), after, False),
        ({"variants": (key(1, 7),)}, key(1, 7), Origin(), True),
        ({"variants": (key(1, 7),)}, key(1, 8), Origin(), False),
        ({"documents": ("doc",), "domain": "acme"}, key(9), document, True),
        ({"documents": ("doc",), "domain": "public"}, key(9), document, False),
        ({"documents": ("other",), "domain": "acme"}, key(9), document, False),
        ({"domain": "acme"}, key(9), document, True),
        ({"domain": "acme"}, key(9), Origin(), False),
        ({}, key(9), Origin(), True),  # names nothing: everything before it
    ]
    for what, variant, origin, covered in cases:
        assert remembered(tombstone(5, **what)).covers(variant, origin, 4) is covered
        assert not remembered(tombstone(5, **what)).covers(variant, origin, 5)


def test_a_chunk_deleted_twice_counts_from_the_last_delete() -> None:
    first, last = (tombstone(n, chunks=(key(1).chunk,)) for n in (3, 9))
    tombstones = remembered(first, last)
    assert tombstones.covers(key(1), Origin(), 8)
    assert tombstones.last_sequence == 9
    tombstones.forget([first])
    assert tombstones.names(key(1))
    assert tombstones.covers(key(1), Origin(), 8)
    tombstones.forget([last])
    assert not tombstones.names(key(1))


deletes: st.SearchStrategy[list[dict[str, Any]]] = st.lists(
    st.builds(
        dict,
        chunks=st.lists(st.integers(0, 5), max_size=3).map(
            lambda numbers: tuple([key(number).chunk for number in numbers])
        ),
        variants=st.lists(st.builds(key, st.integers(0, 5), st.integers(0, 2)), max_size=2).map(
            tuple
        ),
        documents=st.lists(st.sampled_from("ab"), max_size=2).map(tuple),
        domain=st.sampled_from(["acme", "public"]),
    ),
    max_size=30,
)
origins = st.builds(
    Origin,
    prefix_chunks=st.lists(st.integers(0, 5), max_size=2).map(
        lambda numbers: tuple([key(number).chunk for number in numbers])
    ),
    domain=st.sampled_from(["acme", "public", ""]),
    document=st.sampled_from("ab"),
)


@given(deletes, st.data())
def test_whatever_is_forgotten_no_delete_is_undone(
    made: Sequence[dict[str, Any]], data: st.DataObject
) -> None:
    """A put that a delete covers is refused. One that has seen all forgotten ones is judged as if
    none was forgotten."""
    complete = remembered(*(tombstone(n, **what) for n, what in enumerate(made, 1)))
    cut, waiting = Tombstones(), []
    for sequence, what in enumerate(made, 1):
        waiting.append(tombstone(sequence, **what))
        cut.add(waiting[-1], sequence)
        count = data.draw(st.integers(0, len(waiting)))
        cut.forget(waiting[:count])
        del waiting[:count]
    assert cut.last_sequence == complete.last_sequence == len(made)
    assert len(cut) == len(waiting)
    assert cut.forgotten_sequence == len(made) - len(waiting)
    variant = data.draw(st.builds(key, st.integers(0, 5), st.integers(0, 2)))
    origin = data.draw(origins)
    for after in range(len(made) + 1):
        covered = complete.covers(variant, origin, after)
        if after >= cut.forgotten_sequence:
            assert cut.covers(variant, origin, after) is covered
        else:
            assert cut.covers(variant, origin, after)
    for one in waiting:
        assert one.deletion.id in cut
    cut.forget(waiting)
    assert cut.num_bytes == 0
    assert not cut.names(variant)


@given(st.lists(st.integers(0, 20), max_size=12), st.integers(0, 21), st.integers(1, 5))
def test_deletes_are_due_by_their_age_from_the_oldest_on(
    applied_ms: list[int], before_ms: int, limit: int
) -> None:
    applied_ms.sort()
    tombstones, waiting = Tombstones(), []
    for sequence, at in enumerate(applied_ms, 1):
        waiting.append(tombstone(sequence, chunks=(key(sequence).chunk,)))
        tombstones.add(waiting[-1], at)
    while count := tombstones.num_due(before_ms, sys.maxsize, limit):
        assert count <= limit
        tombstones.forget(waiting[:count])
        del waiting[:count]
    assert len(tombstones) == sum(at >= before_ms for at in applied_ms)
    assert tombstones.forgotten_sequence == sum(at < before_ms for at in applied_ms)


@given(st.integers(0, 40), st.integers(1, 8), st.integers(0, 10_000))
def test_memory_stays_below_its_bound(count: int, num_chunks: int, max_bytes: int) -> None:
    tombstones, waiting = Tombstones(), []
    for sequence in range(1, count + 1):
        names = tuple(key(100 * sequence + n).chunk for n in range(num_chunks))
        waiting.append(tombstone(sequence, chunks=names))
        tombstones.add(waiting[-1], 0)
        while due := tombstones.num_due(0, max_bytes, 3):
            tombstones.forget(waiting[:due])
            del waiting[:due]
        assert tombstones.num_bytes <= max_bytes
        assert (tombstones.num_bytes > 0) is (len(tombstones) > 0)


def test_plans_count_from_the_application_of_a_delete() -> None:
    tombstones = Tombstones()
    old = [tombstone(3), tombstone(4)]
    tombstones.add(old[0], 500)
    tombstones.add(old[1], 700)
    tombstones.add(tombstone(6), 700)
    assert [tombstones.applied_by(at_ms, 0) for at_ms in (499, 500, 699, 700)] == [0, 3, 3, 6]
    tombstones.forget(old)
    assert [tombstones.applied_by(at_ms, 0) for at_ms in (699, 700)] == [0, 6]
    tombstones.forget([tombstone(6)])
    assert [tombstones.applied_by(at_ms, 0) for at_ms in (699, 700)] == [0, 6]


NOW_MS = 1_700_000_000_000
LATER_MS = NOW_MS + 10**9


def test_plans_from_before_a_start_are_compared_by_unix_time() -> None:
    """The wall clock may be wrong at the start, and be corrected afterwards."""
    clock = SteadyClock(lambda: 5.0, lambda: LATER_MS)
    found = [tombstone(4, NOW_MS - 900), tombstone(5, NOW_MS - 950), tombstone(6, NOW_MS - 100)]
    tombstones = Tombstones.recovered(found, 6, ForgottenDeletes(3, NOW_MS - 1000), clock)
    tombstones.add(tombstone(7), 6000)

    def seen_before_start(*unix_ms: int) -> list[int]:
        return [tombstones.applied_by(4999, one) for one in unix_ms]

    around = [NOW_MS - age_ms for age_ms in (1001, 1000, 901, 900, 100, 0)]
    assert seen_before_start(*around) == [0, 3, 3, 5, 6, 6]
    assert [tombstones.applied_by(at_ms, 0) for at_ms in (5000, 5999, 6000)] == [6, 6, 7]
    assert tombstones.applied_unix_ms(2, clock) == NOW_MS - 900
    assert tombstones.applied_unix_ms(4, clock) == LATER_MS + 1000
    tombstones.forget(found[:2])
    assert seen_before_start(*around) == [0, 0, 0, 5, 6, 6]
    tombstones.forget([found[2], tombstone(7)])
    assert seen_before_start(*around) == [0] * 6
    assert [tombstones.applied_by(at_ms, 0) for at_ms in (5999, 6000)] == [0, 7]


def test_what_a_wrong_clock_dated_in_the_future_counts_as_applied_at_the_start() -> None:
    clock = SteadyClock(lambda: 5.0, lambda: NOW_MS)
    found = [tombstone(4, LATER_MS), tombstone(5, NOW_MS - 100)]
    tombstones = Tombstones.recovered(found, 5, ForgottenDeletes(3, LATER_MS), clock)
    assert tombstones.applied_by(5000, NOW_MS) == 5
    assert tombstones.num_due(5000, sys.maxsize, 9) == 0
    assert tombstones.num_due(5001, sys.maxsize, 9) == 2
