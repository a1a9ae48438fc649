"""The deletes that a store remembers, and what they cover."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ragcache_cachestore.state.tombstones import Tombstones
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Origin
from ragcache_core.store_api import Deletion, Tombstone
from tests.helpers.cachestore_parts import key


def tombstone(sequence: int, made_at_ms: int = 0, **what: object) -> Tombstone:
    return Tombstone(
        sequence,
        Deletion(id=sequence.to_bytes(16), made_at_ms=made_at_ms, **what),  # type: ignore[arg-type]
    )


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
    ]
    for what, variant, origin, covered in cases:
        assert Tombstones([tombstone(5, **what)]).covers(variant, origin, 4) is covered
        assert not Tombstones([tombstone(5, **what)]).covers(variant, origin, 5)


def test_a_chunk_deleted_twice_counts_from_the_last_delete() -> None:
    tombstones = Tombstones([tombstone(n, chunks=(key(1).chunk,)) for n in (9, 3)])
    assert tombstones.covers(key(1), Origin(), 8)
    assert tombstones.last_sequence == 9
    assert [one.sequence for one in tombstones.since(0)] == [3, 9]


@given(st.lists(st.integers(0, 20), max_size=8), st.integers(0, 21))
def test_forget_keeps_younger_deletes_and_the_sequence(made_at_ms: list[int], before: int) -> None:
    tombstones = Tombstones(last_sequence=100)
    for number, at in enumerate(made_at_ms):
        tombstones.add(tombstone(101 + number, at, chunks=(key(number).chunk,)), at)
    last = tombstones.last_sequence
    assert tombstones.forget(before) == sum(at < before for at in made_at_ms)
    assert tombstones.last_sequence == last == 100 + len(made_at_ms)
    for number, at in enumerate(made_at_ms):
        assert tombstones.covers(key(number), Origin(), 0) is (at >= before)
        assert tombstones.names(key(number)) is (at >= before)
        assert ((101 + number).to_bytes(16) in tombstones) is (at >= before)


def test_since_goes_by_the_time_of_application() -> None:
    tombstones = Tombstones([tombstone(3, 100)], applied_ms=500)
    tombstones.add(tombstone(4, made_at_ms=1), 700)
    tombstones.add(tombstone(6, made_at_ms=800), 600)  # the clock was set back
    assert [one.sequence for one in tombstones.since(501)] == [4, 6]
    assert [one.sequence for one in tombstones.since(700)] == [4, 6]
    assert tombstones.since(701) == []
    assert [tombstones.applied_by(at_ms) for at_ms in (499, 500, 699, 700)] == [0, 3, 3, 6]
    assert tombstones.forget(before_ms=50) == 1
    assert [one.sequence for one in tombstones.since(0)] == [3, 6]
    assert tombstones.applied_by(650) == 3
