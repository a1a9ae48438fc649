"""Which values move between tiers: demotions first, replaced and evicted values before all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.tiering.precision_assignment import Placement
from ragcache_engine.tiers.local_tiers import TierMoves, plan_tier_moves

GPU, PINNED, DISK = Placement.GPU, Placement.PINNED, Placement.DISK
A, B, C = b"a", b"b", b"c"


def test_values_in_their_tier_do_not_move() -> None:
    assigned = {A: GPU, B: PINNED}
    assert plan_tier_moves(assigned, assigned, ()) == TierMoves()


def test_demotions_come_before_promotions() -> None:
    moves = plan_tier_moves({A: GPU, B: PINNED}, {A: PINNED, B: GPU}, ())
    assert list(moves.copies.items()) == [(B, PINNED), (A, GPU)]


def test_a_value_without_a_tier_is_evicted() -> None:
    assert plan_tier_moves({A: DISK}, {A: GPU}, ()) == TierMoves(evicted=[A])


def test_an_offer_without_a_tier_is_dropped() -> None:
    assert plan_tier_moves({A: DISK}, {}, {A}) == TierMoves()


def test_an_offer_replaces_the_stored_value() -> None:
    moves = plan_tier_moves({A: PINNED, B: DISK}, {A: PINNED, B: GPU}, {A, B})
    assert moves == TierMoves(replaced=[A, B], copies={A: PINNED})


def test_a_variant_without_a_value_is_unavailable() -> None:
    assert plan_tier_moves({A: GPU, C: PINNED}, {}, {C}) == TierMoves(
        unavailable=[A], copies={C: PINNED}
    )


tiers = st.sampled_from([GPU, PINNED])
names = st.sampled_from([bytes([n]) for n in range(8)])


@given(
    st.dictionaries(names, st.sampled_from([GPU, PINNED, DISK])),
    st.dictionaries(names, tiers),
    st.sets(names),
)
def test_after_the_moves_each_value_is_in_its_tier(
    assigned: dict[bytes, Placement], current: dict[bytes, Placement], offered: set[bytes]
) -> None:
    moves = plan_tier_moves(assigned, current, offered)
    stored = {name: tier for name, tier in current.items() if name in assigned}
    for name in (*moves.evicted, *moves.replaced):
        del stored[name]
    for name, tier in moves.copies.items():
        assert stored.get(name) is not tier, "a copy to the same tier"
        assert name in stored or name in offered
        stored[name] = tier
    wanted = {name: tier for name, tier in assigned.items() if tier is not DISK}
    for name in moves.unavailable:
        assert name not in current
        assert name not in offered
        del wanted[name]
    assert stored == wanted
    copies = list(moves.copies.values())
    assert copies == sorted(copies, key=lambda tier: tier is GPU)
