"""A request waits for the work with a priority as good as its own, or a better one."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.scheduling.waiting_work import WaitingWork

requests = st.lists(st.tuples(st.integers(-3, 3), st.floats(0.01, 100)), max_size=20)


@given(waiting=requests, priority=st.integers(-4, 4))
def test_the_share_is_that_of_the_work_before(
    waiting: list[tuple[int, float]], priority: int
) -> None:
    work = WaitingWork()
    with ExitStack() as stack:
        for one, seconds in waiting:
            stack.enter_context(work.counted(one, seconds))
        before_s = sum(seconds for one, seconds in waiting if one <= priority)
        total_s = sum(seconds for _, seconds in waiting)
        expected = before_s / total_s if waiting else 1.0
        assert work.share_before(priority) == pytest.approx(expected)
    assert work.share_before(priority) == 1.0, "nothing waits, so nothing is known of the shares"


def test_work_that_is_not_predicted_has_no_share() -> None:
    work = WaitingWork()
    with work.counted(5, 0.0):
        assert work.share_before(0) == 1.0
        with work.counted(5, 2.0):
            assert work.share_before(0) == 0.0
            assert work.share_before(5) == 1.0
