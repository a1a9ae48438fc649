"""What a reader of a feed does with the messages that reach it."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.identity.keys import VariantKey
from ragcache_core.knowledge.feed_position import FeedPosition, FeedStep, SnapshotMark
from ragcache_core.knowledge.node_change import NodeChange, NodeChangeLog

BOOT, OTHER_BOOT = bytes(16), bytes(range(16))
NONE, BEGIN, PART, END = SnapshotMark


def synchronized(sequence: int = 7) -> FeedPosition:
    """A position right after a snapshot."""
    position = FeedPosition()
    for mark in (BEGIN, PART, END):
        position.accept(BOOT, sequence, 0, mark)
    assert position.is_complete
    return position


def test_a_snapshot_makes_a_position_complete_at_its_end() -> None:
    position = FeedPosition()
    assert position.accept(BOOT, 5, 0, BEGIN) is FeedStep.BEGIN_SNAPSHOT
    assert position.accept(BOOT, 6, 512, PART) is FeedStep.APPLY
    assert not position.is_complete
    assert position.accept(BOOT, 7, 1, END) is FeedStep.END_SNAPSHOT
    assert position.is_complete
    assert position.sequence == 7


def test_changes_follow_each_other_without_a_gap() -> None:
    position = synchronized()
    assert position.accept(BOOT, 9, 2, NONE) is FeedStep.APPLY
    assert position.accept(BOOT, 9, 0, NONE) is FeedStep.APPLY, "a heartbeat"
    assert position.accept(BOOT, 11, 1, NONE) is FeedStep.START_AGAIN
    assert not position.is_complete
    assert position.accept(BOOT, 12, 1, NONE) is FeedStep.START_AGAIN, "until a snapshot begins"


def test_a_heartbeat_after_a_lost_message_is_a_gap() -> None:
    assert synchronized(7).accept(BOOT, 8, 0, NONE) is FeedStep.START_AGAIN


def test_a_restarted_source_needs_a_snapshot() -> None:
    position = synchronized()
    assert position.accept(OTHER_BOOT, 8, 1, NONE) is FeedStep.START_AGAIN
    assert position.accept(OTHER_BOOT, 0, 0, BEGIN) is FeedStep.BEGIN_SNAPSHOT
    assert position.accept(BOOT, 0, 0, END) is FeedStep.START_AGAIN


def test_parts_without_a_beginning_are_refused() -> None:
    for mark in (PART, END):
        assert FeedPosition().accept(BOOT, 1, 0, mark) is FeedStep.START_AGAIN
        assert synchronized().accept(BOOT, 8, 0, mark) is FeedStep.START_AGAIN
    position = FeedPosition()
    position.accept(BOOT, 1, 0, BEGIN)
    assert position.accept(BOOT, 1, 0, NONE) is FeedStep.START_AGAIN


@given(num_changes=st.integers(0, 20), capacity=st.integers(1, 8), data=st.data())
def test_a_log_gives_what_follows_or_says_that_it_cannot(
    num_changes: int, capacity: int, data: st.DataObject
) -> None:
    log = NodeChangeLog(BOOT, capacity)
    changes = [NodeChange(VariantKey(n.to_bytes(16), bytes(16))) for n in range(num_changes)]
    for change in changes:
        log.append(change)
    assert log.sequence == num_changes
    after = data.draw(st.integers(-1, num_changes + 1))
    limit = data.draw(st.integers(1, 10))
    found = log.after(after, limit)
    if num_changes - capacity <= after <= num_changes and after >= 0:
        assert found == changes[after : after + limit]
    else:
        assert found is None


def test_a_reader_of_every_message_in_order_never_starts_again() -> None:
    position = synchronized(0)
    ends = [0, 1, 3, 3, 10]
    steps = [position.accept(BOOT, end, end - start, NONE) for start, end in pairwise(ends)]
    assert set(steps) == {FeedStep.APPLY}
