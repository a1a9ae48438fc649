"""The log of transactions in SQLite, which followers repeat. See ChangeLog."""

from __future__ import annotations

import time
from collections.abc import Callable

from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_retriever.store.change_log import AppliedChange, CommittedChange
from ragcache_retriever.store.sqlite.database import Database
from ragcache_retriever.store.sqlite.statements import StatementLog, decode

MAX_KEPT_BYTES = 256 << 20
MAX_KEPT_MS = 3600 * 1000
MIN_KEPT_CHANGES = 64
"""Changes that are kept whatever their age. A new writer knows its followers by their last change,
which may be old."""


class SqliteChangeLog:
    """Numbers the transactions of a database and keeps their statements, if asked to.

    Args:
        max_kept_bytes: Most bytes of kept statements. The last transaction is always kept.
        clock: Unix time in seconds.
    """

    def __init__(
        self,
        database: Database,
        *,
        max_kept_bytes: int = MAX_KEPT_BYTES,
        max_kept_ms: int = MAX_KEPT_MS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._max_kept_bytes = max_kept_bytes
        self._max_kept_ms = max_kept_ms
        self._clock = clock
        self._is_kept = False
        self._listeners: list[Callable[[CommittedChange], None]] = []
        found = database.query_one("SELECT sequence, epoch FROM state")
        assert found is not None, "the schema inserts it"
        self._sequence, self._epoch = int(found[0]), int(found[1])
        self._kept_bytes = self._count_kept_bytes()
        self._prepared: CommittedChange | None = None
        database.before_commit(self._prepare)
        database.after_commit(self._notify)

    @property
    def sequence(self) -> int:
        """Sequence number of the last transaction that this store has committed."""
        return self._sequence

    @property
    def epoch(self) -> int:
        """Epoch of the last transaction."""
        return self._epoch

    def keep_changes(self, is_kept: bool) -> None:
        """Begin or end to keep statements for followers. Sequence numbers ascend in any case."""
        self._is_kept = is_kept

    def start_epoch(self, epoch: int) -> None:
        """Write in this epoch from now on. Call it in the writer's thread.

        Raises:
            Unavailable: The store has seen a later epoch.
        """
        if epoch < self._epoch:
            raise Unavailable("retriever", f"epoch {self._epoch} has replaced epoch {epoch}")
        self._epoch = epoch

    def on_commit(self, listener: Callable[[CommittedChange], None]) -> None:
        """Have a function called after each commit, in the writer's thread. It must not block."""
        self._listeners.append(listener)

    def changes_after(self, sequence: int, limit_bytes: int) -> list[CommittedChange] | None:
        """Return kept changes after a sequence number, oldest first, at least one if there is any.

        Returns:
            None if changes after this number are no longer kept.
        """
        found: list[CommittedChange] = []
        num_bytes = 0
        with self._database.snapshot():
            state = self._database.read_one("SELECT sequence FROM state")
            last = state[0] if state else 0
            for number, epoch, committed_ms, statements in self._database.iterate(
                "SELECT sequence, epoch, committed_unix_ms, statements FROM changes"
                " WHERE sequence > ? ORDER BY sequence",
                (sequence,),
            ):
                num_bytes += len(statements)
                if found and num_bytes > limit_bytes:
                    break
                found.append(CommittedChange(number, epoch, statements, committed_ms))
        if sequence > last or (not found and sequence < last):
            return None
        if found and found[0].sequence != sequence + 1:
            return None
        return found

    def apply_change(self, change: CommittedChange) -> AppliedChange:
        """Repeat a transaction of the writer. Call it in the writer's thread.

        Raises:
            InvalidInput: It is not the next one, or is of an earlier epoch.
        """
        if change.sequence != self._sequence + 1 or change.epoch < self._epoch:
            raise InvalidInput(
                "sequence",
                f"change {change.sequence} of epoch {change.epoch} does not follow change"
                f" {self._sequence} of epoch {self._epoch}",
                "take a backup of the writer",
            )
        try:
            repeated = decode(change.statements)
        except ValueError as error:
            raise InvalidInput("statements", str(error), "take a backup of the writer") from error
        with self._database.transaction(is_repeated=True):
            self._database.repeat(repeated)
            self._store(change)
            self._database.commit_locally()
        self._sequence, self._epoch = change.sequence, change.epoch
        for listener in self._listeners:
            listener(change)
        return AppliedChange(tuple(repeated.rows), repeated.has_other_collections)

    def _prepare(self, log: StatementLog) -> None:
        if self._prepared is not None:  # its commit failed
            self._kept_bytes = self._count_kept_bytes()
        needs_statements = self._is_kept or bool(self._listeners)
        self._prepared = CommittedChange(
            self._sequence + 1,
            self._epoch,
            log.encode() if needs_statements else b"",
            int(self._clock() * 1000),
        )
        self._store(self._prepared)

    def _notify(self) -> None:
        change, self._prepared = self._prepared, None
        assert change is not None, "it is prepared before each commit"
        self._sequence, self._epoch = change.sequence, change.epoch
        for listener in self._listeners:
            listener(change)

    def _store(self, change: CommittedChange) -> None:
        self._database.execute_locally(
            "UPDATE state SET sequence = ?, epoch = ?", (change.sequence, change.epoch)
        )
        if self._is_kept:
            self._database.execute_locally(
                "INSERT INTO changes (sequence, epoch, committed_unix_ms, statements)"
                " VALUES (?, ?, ?, ?)",
                (change.sequence, change.epoch, change.committed_unix_ms, change.statements),
            )
            self._kept_bytes += len(change.statements)
        if self._kept_bytes:
            self._trim(change)

    def _trim(self, last: CommittedChange) -> None:
        """Remove changes above the bounds, or all if they are not kept any more."""
        kept_from = last.sequence if self._is_kept else last.sequence + 1
        oldest_ms = last.committed_unix_ms - self._max_kept_ms
        while True:
            oldest = self._database.query_one(
                "SELECT sequence, committed_unix_ms, length(statements) FROM changes"
                " WHERE sequence < ? ORDER BY sequence LIMIT 1",
                (kept_from,),
            )
            if oldest is None:
                break
            is_recent = oldest[0] > last.sequence - MIN_KEPT_CHANGES
            is_old = not self._is_kept or (oldest[1] < oldest_ms and not is_recent)
            if not is_old and self._kept_bytes <= self._max_kept_bytes:
                break
            self._database.execute_locally("DELETE FROM changes WHERE sequence = ?", oldest[:1])
            self._kept_bytes -= oldest[2]

    def _count_kept_bytes(self) -> int:
        found = self._database.query_one("SELECT coalesce(sum(length(statements)), 0) FROM changes")
        return int(found[0]) if found else 0
