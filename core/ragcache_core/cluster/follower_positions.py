"""Which changes the followers of one writer have, as far as the writer itself can tell.

A former writer may have changes that no other replica has. Their sequence numbers are also those of
other changes of the new writer. So a sequence number alone proves nothing. A position counts under
three conditions:

- The writer has compared the log of the follower with its own, and sends changes to it since.
- The change is one of the writer's epoch. No other replica makes changes of this epoch, so the
  follower has it from this writer, after all earlier ones.
- The writer has sent the change to the follower, so it is in the writer's log.

A writer begins with a change of its epoch and waits for no earlier one, so positions of earlier
epochs are not needed (Raft, section 5.4.2).

Source: Ongaro and Ousterhout, "In Search of an Understandable Consensus Algorithm", sections 5.3
and 5.4.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ragcache_core.cluster.writer_election import LogPosition, acknowledged_sequence


@dataclass(slots=True)
class _Progress:
    stream: int | None
    position: LogPosition
    sent_sequence: int
    heard_s: float
    counted_sequence: int = 0


class FollowerPositions:
    """The positions of the followers in one epoch of the writer. Times are of one clock.

    Args:
        epoch: Of the writer.
        peers: Addresses of all replicas, the writer included. Others do not count.
    """

    def __init__(self, epoch: int, peers: Iterable[str]) -> None:
        self._epoch = epoch
        self._peers = frozenset(peers)
        self._last_stream = 0
        self._followers: dict[str, _Progress] = {}

    def start_stream(self, follower: str, position: LogPosition, now_s: float) -> int:
        """Note that a follower gets changes from now on, and forget what it had before.

        Args:
            position: The follower's last change, which the writer has found in its own log.

        Returns:
            The stream, for ``sent`` and ``end_stream``.
        """
        self._last_stream += 1
        if follower in self._peers:
            progress = _Progress(self._last_stream, position, position.sequence, now_s)
            self._followers[follower] = progress
            self._count(progress)
        return self._last_stream

    def sent(self, follower: str, stream: int, sequence: int) -> None:
        """Note that changes up to a sequence number are being sent to a follower."""
        progress = self._followers.get(follower)
        if progress is not None and progress.stream == stream:
            progress.sent_sequence = max(progress.sent_sequence, sequence)

    def end_stream(self, follower: str, stream: int) -> None:
        """Ignore acknowledgements of a follower until its next stream. It keeps what it has."""
        progress = self._followers.get(follower)
        if progress is not None and progress.stream == stream:
            progress.stream = None

    def forget(self, follower: str) -> None:
        """Note that a follower needs a copy, so that nothing is known of its changes."""
        self._followers.pop(follower, None)

    def acknowledge(self, follower: str, position: LogPosition, now_s: float) -> None:
        """Take note of the last change that a follower says it has."""
        progress = self._followers.get(follower)
        if progress is None or progress.stream is None:
            return
        progress.heard_s = now_s
        if position.sequence <= progress.sent_sequence:
            progress.position = max(progress.position, position)
            self._count(progress)

    def sequences(self) -> dict[str, int]:
        """Return the sequence number of the last change of each follower, by address."""
        return {address: one.position.sequence for address, one in self._followers.items()}

    def acknowledged_sequence(self) -> int:
        """Return the last sequence number that a majority has, the writer included."""
        counts = [one.counted_sequence for one in self._followers.values()]
        return acknowledged_sequence(counts, len(self._peers))

    def num_heard(self, since_s: float) -> int:
        """Return the number of followers that were heard after a time."""
        return sum(one.heard_s > since_s for one in self._followers.values())

    def have_all_heard(self, sequence: int, since_s: float) -> bool:
        """Whether all followers that were heard since a time have a change."""
        return all(
            one.counted_sequence >= sequence or one.heard_s < since_s
            for one in self._followers.values()
        )

    def _count(self, progress: _Progress) -> None:
        if progress.position.epoch == self._epoch:
            progress.counted_sequence = progress.position.sequence
