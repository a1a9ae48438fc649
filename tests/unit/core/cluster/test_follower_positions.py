"""A change counts as acknowledged only if a majority of the logs has it."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ragcache_core.cluster.follower_positions import FollowerPositions
from ragcache_core.cluster.writer_election import LogPosition, majority

PEERS = ("a", "b", "c")


def positions(epoch: int = 2) -> FollowerPositions:
    return FollowerPositions(epoch, PEERS)


def test_a_follower_counts_only_while_changes_are_sent_to_it() -> None:
    followers = positions()
    followers.acknowledge("b", LogPosition(2, 5), 0.0)
    assert followers.acknowledged_sequence() == 0
    stream = followers.start_stream("b", LogPosition(1, 3), 0.0)
    followers.sent("b", stream, 6)
    followers.acknowledge("b", LogPosition(2, 5), 0.0)
    assert followers.acknowledged_sequence() == 5
    followers.end_stream("b", stream)
    followers.acknowledge("b", LogPosition(2, 6), 0.0)
    assert followers.acknowledged_sequence() == 5, "it keeps what it has"


def test_a_change_that_was_not_sent_does_not_count() -> None:
    followers = positions()
    stream = followers.start_stream("b", LogPosition(2, 3), 0.0)
    followers.sent("b", stream, 4)
    followers.acknowledge("b", LogPosition(2, 5), 0.0)
    assert followers.acknowledged_sequence() == 3
    followers.acknowledge("b", LogPosition(2, 4), 0.0)
    followers.acknowledge("b", LogPosition(2, 3), 0.0)  # it was delayed
    assert followers.acknowledged_sequence() == 4


def test_a_change_of_an_earlier_epoch_does_not_count() -> None:
    followers = positions()
    stream = followers.start_stream("b", LogPosition(1, 3), 0.0)
    followers.sent("b", stream, 9)
    followers.acknowledge("b", LogPosition(1, 5), 0.0)
    assert followers.acknowledged_sequence() == 0
    assert followers.sequences() == {"b": 5}


def test_a_new_stream_and_a_needed_copy_reset_what_a_follower_has() -> None:
    followers = positions()
    first = followers.start_stream("b", LogPosition(2, 7), 0.0)
    assert followers.acknowledged_sequence() == 7
    second = followers.start_stream("b", LogPosition(), 0.0)  # it has lost its volume
    assert followers.acknowledged_sequence() == 0
    followers.sent("b", first, 8)
    followers.end_stream("b", first)
    followers.acknowledge("b", LogPosition(2, 8), 0.0)
    assert followers.acknowledged_sequence() == 0
    followers.sent("b", second, 8)
    followers.acknowledge("b", LogPosition(2, 8), 0.0)
    assert followers.acknowledged_sequence() == 8
    followers.forget("b")
    followers.acknowledge("b", LogPosition(2, 8), 0.0)
    assert followers.acknowledged_sequence() == 0
    assert followers.sequences() == {}


def test_a_stranger_does_not_count() -> None:
    followers = positions()
    stream = followers.start_stream("d", LogPosition(2, 7), 0.0)
    followers.sent("d", stream, 8)
    followers.acknowledge("d", LogPosition(2, 8), 0.0)
    assert followers.acknowledged_sequence() == 0
    assert followers.num_heard(-1.0) == 0


def test_a_silent_follower_is_not_waited_for() -> None:
    followers = positions()
    followers.start_stream("b", LogPosition(2, 7), 10.0)
    followers.start_stream("c", LogPosition(2, 6), 5.0)
    assert not followers.have_all_heard(7, since_s=4.0)
    assert followers.have_all_heard(7, since_s=6.0)
    assert (followers.num_heard(4.0), followers.num_heard(6.0)) == (2, 1)


Entry = tuple[int, int]  # epoch, value


@dataclass
class Replica:
    log: list[Entry] = field(default_factory=list)
    writes_in: int = 0
    """The epoch in which it believes to write."""
    stream: int | None = None
    """Of the current writer to it."""

    @property
    def position(self) -> LogPosition:
        return LogPosition(self.log[-1][0] if self.log else 0, len(self.log))


class Cluster(RuleBasedStateMachine):
    """Replicas at any interleaving of writes, streams, acknowledgements, copies and elections.

    A writer that has lost the Lease goes on to write for a while. Acknowledgements are sent at any
    time, also before logs are compared, and arrive late, more than once, or never.
    """

    @initialize(count=st.sampled_from([3, 5]))
    def start(self, count: int) -> None:
        self.replicas = [Replica() for _ in range(count)]
        self.epoch = 0
        self.num_values = 0
        self.sent: list[tuple[int, LogPosition, int]] = []
        self.acknowledged: dict[int, Entry] = {}  # index in the log: entry
        self._lead(0)

    def _lead(self, i: int) -> None:
        self.epoch += 1
        self.writer = self.replicas[i]
        self.writer.writes_in = self.epoch
        self._append(self.writer)
        for one in self.replicas:
            one.stream = None
        names = [str(one) for one in range(len(self.replicas))]
        self.followers = FollowerPositions(self.epoch, names)

    def _append(self, replica: Replica) -> None:
        self.num_values += 1
        replica.log.append((replica.writes_in, self.num_values))

    def _replica(self, draw: int) -> tuple[int, Replica]:
        i = draw % len(self.replicas)
        return i, self.replicas[i]

    @rule(draw=st.integers(0, 14), voters=st.sets(st.integers(0, 4)))
    def elect(self, draw: int, voters: set[int]) -> None:
        i, candidate = self._replica(draw)
        asked = {i} | {one for one in voters if one < len(self.replicas)}
        if len(asked) < majority(len(self.replicas)):
            return
        if all(self.replicas[one].position <= candidate.position for one in asked):
            self._lead(i)

    @rule(draw=st.integers(0, 14))
    def write(self, draw: int) -> None:
        _, replica = self._replica(draw)
        if replica.writes_in:
            self._append(replica)

    @rule(draw=st.integers(0, 14), copies=st.booleans())
    def follow(self, draw: int, copies: bool) -> None:
        i, replica = self._replica(draw)
        if replica is self.writer:
            return
        replica.writes_in = 0
        after = len(replica.log)
        if after and (
            after > len(self.writer.log) or self.writer.log[after - 1] != replica.log[-1]
        ):
            self.followers.forget(str(i))
            replica.stream = None
            if copies:
                replica.log = list(self.writer.log)
            return
        replica.stream = self.followers.start_stream(str(i), replica.position, 0.0)

    @rule(draw=st.integers(0, 14), is_applied=st.booleans())
    def send(self, draw: int, is_applied: bool) -> None:
        i, replica = self._replica(draw)
        if replica.stream is not None and len(replica.log) < len(self.writer.log):
            self.followers.sent(str(i), replica.stream, len(replica.log) + 1)
            if is_applied:
                replica.log.append(self.writer.log[len(replica.log)])

    @rule(draw=st.integers(0, 14))
    def disconnect(self, draw: int) -> None:
        i, replica = self._replica(draw)
        if replica.stream is not None:
            self.followers.end_stream(str(i), replica.stream)
            replica.stream = None

    @rule(draw=st.integers(0, 14))
    def acknowledge(self, draw: int) -> None:
        i, replica = self._replica(draw)
        if replica is not self.writer:
            self.sent.append((i, replica.position, self.epoch))
            self.deliver(-1)

    @precondition(lambda self: self.sent)
    @rule(draw=st.integers(0, 40))
    def deliver(self, draw: int) -> None:
        i, position, epoch = self.sent[draw % len(self.sent)]
        if epoch != self.epoch:
            return  # the writer refuses it
        self.followers.acknowledge(str(i), position, 0.0)
        sequence = self.followers.acknowledged_sequence()
        assert sequence <= len(self.writer.log)
        self.acknowledged |= dict(enumerate(self.writer.log[:sequence]))

    @precondition(lambda self: hasattr(self, "replicas"))
    @invariant()
    def a_majority_has_each_acknowledged_change(self) -> None:
        for index, entry in self.acknowledged.items():
            num_logs = sum(one.log[index : index + 1] == [entry] for one in self.replicas)
            assert num_logs >= majority(len(self.replicas))


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
