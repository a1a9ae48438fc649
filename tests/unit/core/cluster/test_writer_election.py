"""Replicas choose one writer at a time, which has every acknowledged change."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from ragcache_core.cluster.writer_election import (
    ElectionTiming,
    LogPosition,
    WriterElection,
    WriterLease,
    acknowledged_sequence,
    majority,
    needed_positions,
)

TIMING = ElectionTiming()
NEW = LogPosition()


def election(name: str = "a", num_replicas: int = 3) -> WriterElection:
    return WriterElection(f"{name}-1", name, num_replicas, TIMING)


def lease(holder: str = "b-1", epoch: int = 1, version: str = "1", num: int = 3) -> WriterLease:
    return WriterLease(holder, holder[:1], epoch, TIMING.lease_s, num, version)


@given(st.integers(1, 9))
def test_any_majority_and_any_quorum_of_positions_share_a_replica(num_replicas: int) -> None:
    assert majority(num_replicas) + needed_positions(num_replicas) > num_replicas


@given(st.lists(st.integers(0, 50), max_size=6), st.integers(1, 7))
def test_a_majority_has_what_counts_as_acknowledged(followers: list[int], more: int) -> None:
    num_replicas = len(followers) + more
    sequence = acknowledged_sequence(followers, num_replicas)
    if sequence:
        assert 1 + sum(one >= sequence for one in followers) >= majority(num_replicas)


def test_a_candidate_takes_over_only_after_the_duration() -> None:
    one = election()
    one.observe(lease(), 100.0)
    others = {"c": LogPosition(1, 5)}
    assert one.claim(LogPosition(1, 5), others, 107.9) is None
    one.observe(lease(version="2"), 107.9)  # renewed
    assert one.claim(LogPosition(1, 5), others, 108.5) is None
    claimed = one.claim(LogPosition(1, 5), others, 115.9)
    assert claimed is not None
    assert (claimed.holder, claimed.epoch, claimed.version) == ("a-1", 2, "2")


def test_a_released_lease_is_free_at_once() -> None:
    one = election()
    one.observe(lease(holder=""), 0.0)
    assert one.claim(LogPosition(1, 5), {"c": LogPosition(1, 5)}, 0.0) is not None


def test_nothing_is_claimed_before_the_lease_was_read() -> None:
    assert election().claim(NEW, {"b": NEW, "c": NEW}, 1000.0) is None


@pytest.mark.parametrize(
    ("own", "others"),
    [
        (LogPosition(1, 5), {"c": LogPosition(1, 6)}),  # it lacks a change
        (LogPosition(1, 9), {"c": LogPosition(2, 6)}),  # its tail may be of an old writer
        (LogPosition(1, 5), {}),  # too few to know
        (LogPosition(1, 5), {"c": NEW}),  # the other one has lost its volume
        (NEW, {"c": NEW}),
    ],
)
def test_a_replica_that_may_lack_changes_does_not_lead(
    own: LogPosition, others: dict[str, LogPosition]
) -> None:
    one = election()
    one.observe(lease(holder=""), 0.0)
    assert one.claim(own, others, 0.0) is None


def test_without_a_lease_all_replicas_must_answer() -> None:
    one = election()
    one.observe(None, 0.0)
    # The third one may be a volume with documents from before there were replicas.
    assert one.claim(NEW, {"b": NEW}, 0.0) is None
    assert one.claim(NEW, {"b": NEW, "c": LogPosition(0, 7)}, 0.0) is None
    assert one.claim(LogPosition(0, 7), {"b": NEW, "c": NEW}, 0.0) is not None


def test_a_deleted_lease_gives_the_writer_its_time_and_continues_the_epoch() -> None:
    one = election()
    one.observe(lease(epoch=4), 0.0)
    one.observe(None, 5.0)
    one.observe(None, 9.0)
    all_of_them = {"b": LogPosition(4, 5), "c": LogPosition(4, 5)}
    assert one.claim(LogPosition(4, 5), all_of_them, 12.9) is None
    claimed = one.claim(LogPosition(4, 5), all_of_them, 13.0)
    assert claimed is not None
    assert (claimed.epoch, claimed.version) == (5, "")


def test_replicas_that_the_writer_knows_count_even_if_this_one_knows_fewer() -> None:
    one = election(num_replicas=2)
    one.observe(lease(holder="", num=3), 0.0)
    assert one.claim(LogPosition(1, 5), {}, 0.0) is None


def test_the_writer_stops_before_others_may_start() -> None:
    one = election("b")
    one.wrote(lease(), began_s=100.0, now_s=101.0)
    assert one.may_write(104.9)
    assert not one.may_write(105.0)
    assert one.held_epoch == 1
    one.wrote(replace(lease(), holder="", version="2"), 104.0, 104.0)
    assert not one.may_write(104.0)


@dataclass
class Replica:
    name: str
    clock_rate: float
    election: WriterElection
    log: list[tuple[int, int]] = field(default_factory=list)  # (epoch, value)
    seen: WriterLease | None = None
    is_reachable: bool = True

    def now_s(self, time_s: float) -> float:
        return time_s * self.clock_rate + 1000.0

    def position(self) -> LogPosition:
        return LogPosition(self.log[-1][0] if self.log else 0, len(self.log))


class Cluster(RuleBasedStateMachine):
    """Three replicas, whose clocks run up to 10 % apart, at any interleaving of their steps."""

    @initialize(rates=st.tuples(*[st.floats(0.95, 1.05)] * 3))
    def start(self, rates: tuple[float, float, float]) -> None:
        self.time_s = 0.0
        self.lease: WriterLease | None = None
        self.versions = 0
        self.values = 0
        self.acknowledged: dict[int, tuple[int, int]] = {}  # index in the log: entry
        self.lives = 0
        self.replicas = [
            Replica(name, rate, WriterElection(f"{name}-0", name, 3, TIMING))
            for name, rate in zip("abc", rates, strict=True)
        ]

    def _write_lease(self, replica: Replica, wanted: WriterLease, slow_s: float) -> bool:
        """Compare and swap, as the API server does."""
        began_s = replica.now_s(self.time_s)
        self.time_s += slow_s
        if wanted.version != ("" if self.lease is None else self.lease.version):
            return False
        self.versions += 1
        self.lease = replace(wanted, version=str(self.versions))
        replica.election.wrote(self.lease, began_s, replica.now_s(self.time_s))
        return True

    @rule(i=st.integers(0, 2), is_reachable=st.booleans(), seconds=st.sampled_from([0.5, 9.0]))
    def partition(self, i: int, is_reachable: bool, seconds: float) -> None:
        self.replicas[i].is_reachable = is_reachable
        self.time_s += seconds

    @rule(i=st.integers(0, 2))
    def restart(self, i: int) -> None:
        replica = self.replicas[i]
        self.lives += 1
        identity = f"{replica.name}-{self.lives}"
        replica.election = WriterElection(identity, replica.name, 3, TIMING)

    @rule(
        i=st.integers(0, 2),
        waited_s=st.sampled_from([0.5, 1.0, 5.0, 9.0]),
        slow_s=st.sampled_from([0.0, 0.0, 3.0, 12.0]),
    )
    def tick(self, i: int, waited_s: float, slow_s: float) -> None:
        """Read the Lease and renew or claim it. ``slow_s`` passes between read and write."""
        self.time_s += waited_s
        replica = self.replicas[i]
        if not replica.is_reachable:
            return
        replica.election.observe(self.lease, replica.now_s(self.time_s))
        if replica.election.held_epoch is not None:
            self._write_lease(replica, replica.election.renewal(), slow_s)
            return
        if not replica.election.is_free(replica.now_s(self.time_s)):
            return
        others = {
            one.name: one.position()
            for one in self.replicas
            if one is not replica and one.is_reachable
        }
        own = replica.position()
        wanted = replica.election.claim(own, others, replica.now_s(self.time_s))
        if wanted is not None and self._write_lease(replica, wanted, slow_s):
            assert [*enumerate(replica.log)][: len(self.acknowledged)] == sorted(
                self.acknowledged.items()
            )
            self._append(replica)

    def _append(self, replica: Replica) -> None:
        self.values += 1
        replica.log.append((replica.election.epoch, self.values))

    @rule(i=st.integers(0, 2), followers=st.lists(st.integers(0, 2), max_size=1))
    def write(self, i: int, followers: list[int]) -> None:
        writer = self.replicas[i]
        if not writer.election.may_write(writer.now_s(self.time_s)):
            return
        self._append(writer)
        reached = {i}
        for one in followers:
            follower = self.replicas[one]
            if writer.is_reachable and follower.is_reachable:
                # A follower takes the log of the latest writer that it knows of.
                follower.log = list(writer.log)
                reached.add(one)
        if len(reached) >= majority(3) and writer.election.may_write(writer.now_s(self.time_s)):
            self.acknowledged |= dict(enumerate(writer.log))

    @precondition(lambda self: hasattr(self, "replicas"))
    @invariant()
    def at_most_one_writes(self) -> None:
        writers = [one for one in self.replicas if one.election.may_write(one.now_s(self.time_s))]
        assert len(writers) <= 1


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
