"""A source sends a reader what leads to what the source has, however it changes meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.keys import VariantKey
from ragcache_core.knowledge.feed_position import FeedPosition, FeedStep
from ragcache_core.knowledge.node_change import NodeChange, NodeChangeLog, StoredNode
from ragcache_wire.feeds.feed_cursor import MARKS, FeedCursor, from_message, to_messages
from ragcache_wire.v1 import node_feed_pb2 as pb

BATCH = 2


def node(number: int, parent: int | None = None) -> StoredNode:
    key = VariantKey(number.to_bytes(16), bytes(16))
    above = None if parent is None else VariantKey(parent.to_bytes(16), bytes(16))
    return StoredNode(key, above, 10 + number, 100, exact=True, cost_s=0.5)


class ListSource:
    """A source whose batches are as they are when they are read."""

    def __init__(self) -> None:
        self.log = NodeChangeLog(bytes(16), max_changes=6)
        self.current: dict[VariantKey, NodeChange] = {}

    @property
    def boot(self) -> bytes:
        return self.log.boot

    @property
    def sequence(self) -> int:
        return self.log.sequence

    def change(self, change: NodeChange) -> None:
        self.log.append(change)
        if change.tier:
            self.current[change.key] = change
        else:
            self.current.pop(change.key, None)

    def changes_after(self, sequence: int, limit: int) -> list[NodeChange] | None:
        return self.log.after(sequence, limit)

    def node_batches(self) -> Iterator[list[NodeChange]]:
        keys = list(self.current)
        for start in range(0, len(keys), BATCH):
            yield [self.current[k] for k in keys[start : start + BATCH] if k in self.current]


class Reader:
    """Applies messages as a gateway does."""

    def __init__(self) -> None:
        self.position = FeedPosition()
        self.known: dict[VariantKey, NodeChange] = {}
        self._confirmed: set[VariantKey] = set()

    def read(self, message: pb.NodeChanges) -> FeedStep:
        mark = MARKS[message.snapshot]
        step = self.position.accept(message.boot, message.sequence, len(message.changes), mark)
        if step is FeedStep.BEGIN_SNAPSHOT:
            self._confirmed.clear()
        for change in map(from_message, message.changes):
            self._confirmed.add(change.key)
            if change.tier:
                self.known[change.key] = change
            else:
                self.known.pop(change.key, None)
        if step is FeedStep.END_SNAPSHOT:
            self.known = {k: v for k, v in self.known.items() if k in self._confirmed}
        return step


class FeedMachine(RuleBasedStateMachine):
    """Nodes change at any time, and connections end at any time, also within a snapshot."""

    def __init__(self) -> None:
        super().__init__()
        self.source = ListSource()
        self.reader = Reader()
        self.cursor = FeedCursor(self.source)

    @rule(number=st.integers(0, 7), tier=st.sampled_from(["memory", "disk", ""]))
    def change(self, number: int, tier: str) -> None:
        one = node(number)
        if tier:
            self.source.change(NodeChange.stored(tier, one))
        elif one.key in self.source.current:
            self.source.change(NodeChange(one.key))

    @rule(count=st.integers(1, 4))
    def read(self, count: int) -> None:
        for _ in range(count):
            message = self.cursor.next()
            if message is not None:
                assert self.reader.read(message) is not FeedStep.START_AGAIN

    @rule()
    def connect_again(self) -> None:
        position = self.reader.position
        if not position.is_complete:
            position.reset()
        self.cursor = FeedCursor(self.source, position.boot, position.sequence)

    @rule()
    def restart_the_reader(self) -> None:
        self.reader = Reader()
        self.cursor = FeedCursor(self.source)

    @invariant()
    def a_reader_with_every_message_knows_what_the_source_has(self) -> None:
        position = self.reader.position
        if position.is_complete and position.sequence == self.source.sequence:
            assert self.reader.known == self.source.current

    def teardown(self) -> None:
        while (message := self.cursor.next()) is not None:
            self.reader.read(message)
        assert self.reader.position.is_complete
        assert self.reader.known == self.source.current
        assert self.reader.read(self.cursor.heartbeat()) is FeedStep.APPLY


FeedMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=30)
TestFeed = FeedMachine.TestCase


def test_a_reader_that_lags_too_far_behind_gets_a_snapshot() -> None:
    source = ListSource()
    cursor = FeedCursor(source)
    while cursor.next() is not None:
        pass
    for number in range(7):
        source.change(NodeChange.stored("memory", node(number)))
    message = cursor.next()
    assert message is not None
    assert message.snapshot == pb.NodeChanges.BEGIN


def test_a_reader_of_an_earlier_boot_gets_a_snapshot() -> None:
    message = FeedCursor(ListSource(), boot=b"x" * 16, after=0).next()
    assert message is not None
    assert message.snapshot == pb.NodeChanges.BEGIN


@given(parent=st.none() | st.integers(8, 9), tier=st.sampled_from(["device", "host"]))
def test_changes_survive_their_messages(parent: int | None, tier: str) -> None:
    changes = [NodeChange.stored(tier, node(1, parent)), NodeChange(node(2).key)]
    encoded = [message.SerializeToString() for message in to_messages(changes)]
    assert [from_message(pb.NodeChange.FromString(raw)) for raw in encoded] == changes


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.NodeChange(key=b"short"), "key"),
        (pb.NodeChange(key=bytes(32), tier="tape", num_tokens=1), "tier"),
        (pb.NodeChange(key=bytes(32), tier="disk"), "num_tokens"),
        (pb.NodeChange(key=bytes(32), tier="disk", num_tokens=1, parent=b"x"), "parent"),
    ],
)
def test_a_message_that_is_no_change_is_refused(message: pb.NodeChange, field: str) -> None:
    with pytest.raises(InvalidInput, match=field):
        from_message(message)


def test_a_feed_has_no_field_for_tokens_or_text() -> None:
    fields = {
        field.name: field.message_type
        for message in (pb.NodeChanges, pb.NodeChange, pb.EngineLoad)
        for field in message.DESCRIPTOR.fields
    }
    assert set(fields) == {
        *("boot", "sequence", "snapshot", "changes", "load"),
        *("key", "tier", "parent", "num_tokens", "num_bytes", "exact", "cost_s"),
        *("pending_s", "background_s", "num_pending", "num_background", "num_decoding"),
        *("free_tokens", "last_accepted", "accepted", "begun_s"),
    }
