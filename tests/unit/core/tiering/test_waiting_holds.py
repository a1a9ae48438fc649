"""What waiting requests need is held within bounds, and no longer than was asked."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.tiering.waiting_holds import WaitingHolds


def test_a_hold_ends_by_itself_and_a_renewal_prolongs_it() -> None:
    holds: WaitingHolds[str] = WaitingHolds(10)
    assert holds.hold("short", "a", 1, 10.0)
    assert holds.hold("renewed", "a", 1, 10.0)
    assert holds.hold("renewed", "a", 1, 20.0)
    assert holds.hold("renewed", "a", 1, 5.0), "an earlier end does not shorten a hold"
    holds.expire(10.0)
    assert "short" not in holds
    assert "renewed" in holds
    holds.expire(20.0)
    assert len(holds) == holds.held_bytes == 0


def test_all_holds_together_have_a_bound() -> None:
    holds: WaitingHolds[int] = WaitingHolds(10)
    held = [holds.hold(number, "a", 3, 10.0) for number in range(5)]
    assert held == [True, True, True, False, False], "the first requests keep what they need"
    assert not holds.hold(9, "b", 11, 10.0), "larger than all that may be held"


def test_a_tenant_that_comes_later_gets_an_equal_share() -> None:
    holds: WaitingHolds[tuple[str, int]] = WaitingHolds(12)
    for number in range(12):
        assert holds.hold(("first", number), "first", 1, 10.0)
    for number in range(12):
        holds.hold(("second", number), "second", 1, 10.0)
    of = {name: sum((name, n) in holds for n in range(12)) for name in ("first", "second")}
    assert of == {"first": 6, "second": 6}
    assert ("first", 0) in holds, "the latest holds of the largest tenant end first"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["hold", "hold", "hold", "release", "expire"]),
            st.integers(0, 9),
            st.integers(1, 9),
            st.integers(0, 100),
        ),
        max_size=200,
    )
)
def test_the_bounds_hold_after_any_calls(calls: list[tuple[str, int, int, int]]) -> None:
    holds: WaitingHolds[int] = WaitingHolds(20)
    now = 0
    for call, key, num_bytes, seconds in calls:
        if call == "hold":
            assert holds.hold(key, f"tenant {key % 3}", num_bytes, now + seconds) == (key in holds)
        elif call == "release":
            holds.release(key)
        else:
            now += seconds
            holds.expire(now)
        holds.check()
    holds.expire(now + 101)
    assert len(holds) == 0
