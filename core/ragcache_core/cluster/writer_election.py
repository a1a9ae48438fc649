"""Which replica of a retriever writes: decisions about a Lease, log positions and quorums.

A replica writes while it holds a Lease. Replicas never compare clocks of different machines. A
candidate measures by its own clock how long the Lease has not changed, and takes it over after its
duration. The writer stops earlier than that, by its own clock. The difference is the safety margin
for clocks that run at different rates and for a write that was under way.

A write is acknowledged when a majority of the replicas has it. A candidate therefore asks so many
others for their positions that at least one of them has every acknowledged write, and becomes the
writer only if no position is ahead of its own. This is the rule of Raft's elections.

Source: Ongaro and Ousterhout, "In Search of an Understandable Consensus Algorithm", sections 5.2 to
5.4, and the leader election of Kubernetes' controllers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, order=True)
class LogPosition:
    """The last change in a replica's log. A greater position has everything that was acknowledged.

    Attributes:
        epoch: Epoch of the writer that made the change.
        sequence: Its sequence number; 0 for a replica that has no documents.
    """

    epoch: int = 0
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class ElectionTiming:
    """Intervals in seconds. The defaults let another replica write within 15 seconds.

    Attributes:
        lease_s: How long candidates wait after the writer's last renewal; an integer.
        renew_deadline_s: How long the writer writes without a successful renewal.
        retry_s: Time between two tries to acquire or to renew.
    """

    lease_s: int = 8
    renew_deadline_s: float = 5.0
    retry_s: float = 1.0

    def __post_init__(self) -> None:
        assert self.retry_s < self.renew_deadline_s < self.lease_s


@dataclass(frozen=True, slots=True)
class WriterLease:
    """The content of the Lease.

    Attributes:
        holder: Identity of the writer's process. Empty if the writer has released the Lease.
        address: Address of the writer, for the other replicas.
        epoch: Ascends with each writer.
        lease_s: Duration that the writer has announced.
        num_replicas: Number of replicas that the writer knows of.
        version: Changes with each write of the Lease. Empty for one that is not written yet.
    """

    holder: str
    address: str
    epoch: int
    lease_s: float
    num_replicas: int
    version: str = ""


def majority(num_replicas: int) -> int:
    """Return how many replicas must have a change before it is acknowledged."""
    return num_replicas // 2 + 1


def needed_positions(num_replicas: int) -> int:
    """Return how many replicas have at least one with each acknowledged change among them."""
    return num_replicas - majority(num_replicas) + 1


def acknowledged_sequence(followers: Sequence[int], num_replicas: int) -> int:
    """Return the last sequence number that a majority has, the writer included.

    Args:
        followers: What each follower has acknowledged.
    """
    needed = majority(num_replicas) - 1
    if needed == 0 or len(followers) < needed:
        return 0
    return sorted(followers, reverse=True)[needed - 1]


class WriterElection:
    """Decides when one replica may write. Times are of one monotonic clock, in seconds.

    Args:
        identity: Identity of this process. Every process needs a new one.
        num_replicas: Number of all replicas, this one included.
    """

    def __init__(
        self, identity: str, address: str, num_replicas: int, timing: ElectionTiming
    ) -> None:
        self._identity = identity
        self._address = address
        self._num_replicas = num_replicas
        self._timing = timing
        self._observed: WriterLease | None = None
        self._has_observed = False
        self._since_s = 0.0
        self._renewed_s: float | None = None

    @property
    def lease(self) -> WriterLease | None:
        """The Lease as last observed, or None if there is none."""
        return self._observed

    @property
    def epoch(self) -> int:
        """Epoch of the last writer that is known; 0 if there was none."""
        return 0 if self._observed is None else self._observed.epoch

    @property
    def writer(self) -> str:
        """Address of the replica that holds the Lease, as far as known. It may have ended."""
        return "" if self._observed is None or not self._observed.holder else self._observed.address

    def observe(self, lease: WriterLease | None, now_s: float) -> None:
        """Take note of the Lease as it was just read. A Lease that is gone ends no duration."""
        if lease is None and self._observed is not None:
            # The deletion does not reach the writer, which keeps the time of its last renewal.
            if self._observed.version:
                self._observed, self._since_s = replace(self._observed, version=""), now_s
            return
        if not self._has_observed or lease != self._observed:
            self._observed, self._since_s, self._has_observed = lease, now_s, True

    def is_free(self, now_s: float) -> bool:
        """Whether the Lease is released or expired, so that a candidate may ask for positions."""
        if not self._has_observed:
            return False
        lease = self._observed
        if lease is None or not lease.holder:
            return True
        return now_s >= self._since_s + lease.lease_s

    def claim(
        self, own: LogPosition, others: Mapping[str, LogPosition], now_s: float
    ) -> WriterLease | None:
        """Return the Lease to write in order to become the writer, or None.

        Args:
            own: Position of this replica, read after ``is_free`` was true.
            others: Positions of other replicas by address, read after ``is_free`` was true.
        """
        if not self.is_free(now_s) or not self._may_lead(own, list(others.values())):
            return None
        # Without a Lease, the epoch continues that of the log.
        seen = max(self.epoch, own.epoch, *(one.epoch for one in others.values()), 0)
        version = "" if self._observed is None else self._observed.version
        return WriterLease(
            self._identity,
            self._address,
            seen + 1,
            self._timing.lease_s,
            self._num_replicas,
            version,
        )

    def _may_lead(self, own: LogPosition, others: Sequence[LogPosition]) -> bool:
        if any(one > own for one in others):
            return False
        lease = self._observed
        # A replica that was added counts for its writer before it counts here.
        num_replicas = max(self._num_replicas, 0 if lease is None else lease.num_replicas)
        if 1 + len(others) >= num_replicas:
            return True
        if lease is None or not lease.version or not own.sequence:
            # Without a Lease, nothing tells which replicas have documents. So all must answer.
            return False
        # A replica that has lost its volume has acknowledged changes that it no longer has.
        with_documents = sum(one.sequence > 0 for one in (own, *others))
        return with_documents >= needed_positions(num_replicas)

    def renewal(self) -> WriterLease:
        """Return the Lease to write in order to remain the writer."""
        assert self._observed is not None
        assert self._observed.holder == self._identity
        return self._observed

    def release(self) -> WriterLease:
        """Return the Lease to write in order to let another replica write at once."""
        return replace(self.renewal(), holder="")

    def wrote(self, lease: WriterLease, began_s: float, now_s: float) -> None:
        """Take note of a successful write of the Lease by this replica.

        Args:
            lease: The Lease with its new version.
            began_s: When the write began. The duration counts from then.
        """
        self.observe(lease, now_s)
        self._renewed_s = began_s if lease.holder == self._identity else None

    def step_down(self) -> None:
        """Stop to write. Only a new claim makes this replica the writer again."""
        self._renewed_s = None

    def may_write(self, now_s: float) -> bool:
        """Whether this replica is the writer, and no other one can be."""
        if self._renewed_s is None or self.held_epoch is None:
            return False
        return now_s < self._renewed_s + self._timing.renew_deadline_s

    @property
    def held_epoch(self) -> int | None:
        """Epoch of this replica as the writer, or None if it does not hold the Lease."""
        lease = self._observed
        if self._renewed_s is None or lease is None or lease.holder != self._identity:
            return None
        return lease.epoch
