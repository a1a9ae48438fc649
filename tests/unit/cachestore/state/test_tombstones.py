"""The deletes that a store remembers, and what they cover."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ragcache_cachestore.state.tombstones import Tombstones
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Origin
from ragcache_core.store_api import Deletion, ForgottenDeletes, Tombstone
from tests.helpers.cachestore_parts import key


def tombstone(sequence: int, made_at_ms: int = 0, **what: object) -> Tombstone:
    return Tombstone(
        sequence,
        Deletion(id=sequence.to_bytes(16), made_at_ms=made_at_ms, **what),  # type: ignore[arg-type]
    )


def remembered(*tombstones: Tombstone) -> Tombstones:
    """Tombstones that count as applied when they were made."""
    last = max([one.sequence for one in tombstones], default=0)
    return Tombstones.recovered(tombstones, last, ForgottenDeletes())


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
    assert cut.forgotten.sequence == len(made) - len(waiting)
    variant = data.draw(st.builds(key, st.integers(0, 5), st.integers(0, 2)))
    origin = data.draw(origins)
    for after in range(len(made) + 1):
        covered = complete.covers(variant, origin, after)
        if after >= cut.forgotten.sequence:
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
    tombstones, waiting = Tombstones(), []
    for sequence, at in enumerate(applied_ms, 1):
        waiting.append(tombstone(sequence, chunks=(key(sequence).chunk,)))
        tombstones.add(waiting[-1], at)
    while count := tombstones.num_due(before_ms, sys.maxsize, limit):
        assert count <= limit
        tombstones.forget(waiting[:count])
        del waiting[:count]
    # A clock that was set back does not change the order.
    times = [max(applied_ms[: n + 1]) for n in range(len(applied_ms))]
    assert len(tombstones) == sum(at >= before_ms for at in times)
    first_ms = max([at for at in times if at < before_ms], default=0)
    assert tombstones.forgotten.applied_at_ms == first_ms


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
    old = [tombstone(3, 100), tombstone(4, 1)]
    tombstones.add(old[0], 500)
    tombstones.add(old[1], 700)
    tombstones.add(tombstone(6, 800), 600)  # the clock was set back
    assert [tombstones.applied_by(at_ms) for at_ms in (499, 500, 699, 700)] == [0, 3, 3, 6]
    tombstones.forget(old)
    assert [tombstones.applied_by(at_ms) for at_ms in (699, 700)] == [0, 6]
    tombstones.forget([tombstone(6, 800)])
    assert [tombstones.applied_by(at_ms) for at_ms in (699, 700)] == [0, 6]
