"""One replica of the retriever: its role, its part in elections, and its readiness.

A replica follows the writer until it becomes the writer itself. A former writer may have changes
that no other replica has. It finds that when it follows the new writer, whose log differs, and then
takes a copy of all documents from the new writer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from ragcache_core.cluster.writer_election import (
    ElectionTiming,
    LogPosition,
    WriterElection,
    majority,
)
from ragcache_core.errors import InvalidInput, RagCacheError, Unavailable
from ragcache_retriever.replication.change_feed import ChangeFeed
from ragcache_retriever.replication.elector import WriterElector
from ragcache_retriever.replication.follower import Follower, LagClock
from ragcache_retriever.replication.lease_store import LeaseStore
from ragcache_retriever.store.change_log import ChangeLog, CommittedChange
from ragcache_wire.clients.retriever_client import ChangesGone, RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb

log = logging.getLogger(__name__)

POSITION_TIMEOUT_S = 1.0
RETRY_S = 0.25
FAILURE_PAUSE_S = 2.0
"""Time until a replica follows again after an unexpected error."""
LEASE_UNREAD_S = 5.0
"""After this time without the Lease, another replica may have become the writer."""


class ReplicatedDocuments(Protocol):
    """The documents of this replica."""

    @property
    def changes(self) -> ChangeLog:
        """The log of their changes."""
        ...

    async def apply_change(self, change: CommittedChange) -> None:
        """Repeat a change of the writer, and let searches see it."""
        ...

    async def finish_changes(self) -> None:
        """See ChangeTarget."""
        ...

    async def start_epoch(self, epoch: int, note: bytes) -> None:
        """Commit a first change in a new epoch, which holds a note."""
        ...

    async def start_writing(self) -> None:
        """Begin the background work of the writer."""
        ...

    async def stop_writing(self) -> None:
        """End that work."""
        ...

    def write_only_if(self, may_write: Callable[[], bool]) -> None:
        """Refuse transactions that are not repeated ones, unless a function returns True."""
        ...


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Which replica this is.

    Attributes:
        identity: Identity of this process. Every process needs a new one.
        own_address: Its address among the peers.
        peers: Addresses of all replicas.
        max_lag_s: Lag from which it is not ready.
    """

    identity: str
    own_address: str
    peers: Sequence[str]
    max_lag_s: float
    timing: ElectionTiming = field(default_factory=ElectionTiming)


class Replica:
    """Runs elections and follows the writer.

    Args:
        is_fit: Whether this replica could write now: it is loaded, and its storage answers.
        take_copy: Stores a copy of all documents, given as parts and the epoch of the writer. It
            raises an error if the copy is not complete, or not of this writer.
        restart: Ends the process, so that it starts again with a copy.
        threads: Pool for reads of the log.
    """

    def __init__(
        self,
        documents: ReplicatedDocuments,
        lease_store: LeaseStore,
        options: ReplicaOptions,
        *,
        is_fit: Callable[[], bool],
        take_copy: Callable[[AsyncIterator[bytes], int], Awaitable[None]],
        restart: Callable[[], None],
        threads: ThreadPoolExecutor,
    ) -> None:
        self._documents = documents
        self._lease_store = lease_store
        self._options = options
        self._is_fit = is_fit
        self._take_copy = take_copy
        self._restart = restart
        election = WriterElection(
            options.identity, options.own_address, len(options.peers), options.timing
        )
        self._elector = WriterElector(election, lease_store, self, options.timing)
        self._position = LogPosition(documents.changes.epoch, documents.changes.sequence)
        documents.changes.keep_changes(True)
        documents.changes.on_commit(self._on_commit)
        documents.write_only_if(lambda: self._writing_epoch is not None)
        self.feed = ChangeFeed(documents.changes, options.peers, threads)
        self._clients = {
            address: RetrieverClient(address)
            for address in options.peers
            if address != options.own_address
        }
        self._lag = LagClock()
        self._writing_epoch: int | None = None
        self._following: asyncio.Task[None] | None = None
        self._follower: Follower | None = None
        self._is_copying = False

    async def run(self) -> None:
        """Work until cancelled, then release the Lease."""
        electing = asyncio.create_task(self._elector.run(), name="elector")
        try:
            while not electing.done():
                self._following = asyncio.create_task(self._follow(), name="follower")
                changed = asyncio.create_task(self._elector.wait_changed())
                try:
                    await asyncio.wait((changed, electing), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
                await self._stop_following()
            electing.result()
        finally:
            electing.cancel()
            await asyncio.gather(electing, return_exceptions=True)
            await self._stop_following()

    async def close(self) -> None:
        """Close connections. No call may be forwarded any more."""
        for client in self._clients.values():
            await client.close()
        await self._lease_store.close()

    # State

    def position(self) -> LogPosition:
        """Return the last change of this replica."""
        return self._position

    @property
    def is_writer(self) -> bool:
        """Whether this replica may acknowledge writes now."""
        return self._elector.may_write()

    @property
    def writer(self) -> str:
        """Address of the writer, or empty if none is known."""
        return self._elector.writer

    @property
    def writer_sequence(self) -> int:
        """Last change of the writer that this replica knows of."""
        known = 0 if self._follower is None else self._follower.writer_sequence
        return max(known, self._position.sequence)

    @property
    def lag_s(self) -> float:
        """Age of the oldest change that this replica lacks or may lack."""
        if self.is_writer:
            return 0.0
        is_cut_off = self._elector.unread_s > LEASE_UNREAD_S
        return self._lag.lag_s(has_writer=is_cut_off or self._elector.has_writer())

    async def problem(self) -> str | None:
        """Return why this replica should get no searches, or None."""
        if self._is_copying:
            return "copying the documents of the writer"
        if self._position.sequence == 0:
            return "waiting for the first writer"
        if self.is_writer:
            return None
        has_writer = self._elector.has_writer() and self.writer != self._options.own_address
        if has_writer and not self._lag.has_caught_up:
            behind = self.writer_sequence - self._position.sequence
            return f"following the writer: {behind} changes behind"
        if self.lag_s > self._options.max_lag_s and not await self._knows_of_no_writer():
            return f"it lacks changes of the last {self.lag_s:.0f} s"
        return None

    async def _knows_of_no_writer(self) -> bool:
        """Whether no replica can be ahead, although the Lease cannot be read.

        A writer needs a majority, so it is one of the replicas that answer, or cannot write.
        """
        if self._elector.unread_s <= LEASE_UNREAD_S:
            return False
        found = await self._ask_all()
        writes = any(one.role == pb.RetrieverStatus.ROLE_WRITER for one in found.values())
        is_ahead = any(
            LogPosition(one.epoch, one.sequence) > self._position for one in found.values()
        )
        return 1 + len(found) >= majority(len(self._options.peers)) and not writes and not is_ahead

    def client_of_writer(self) -> RetrieverClient:
        """Return a client of the writer. Raises Unavailable if none is known."""
        client = self._clients.get(self._elector.writer)
        if client is None:
            raise Unavailable("retriever", "its replicas are choosing a writer", 2.0)
        return client

    async def confirm(self, *, settles: bool = True) -> None:
        """Wait until a majority has every change of this replica. Raises Unavailable.

        Args:
            settles: Wait shortly for the other live followers, too.
        """
        await self.feed.wait_acknowledged(self._position.sequence, settles=settles)
        # Without the Lease, another replica may have become the writer before the majority had it.
        if not self.is_writer:
            raise Unavailable("retriever", "another replica became the writer")

    # Candidate

    def is_fit(self) -> bool:
        """Whether this replica could write now."""
        return self._is_fit() and not self._is_copying

    async def is_followed(self) -> bool:
        """Whether followers or answers of others show a connection to a majority.

        Replicas that copy the documents follow nothing yet, and a new election would end the copy.
        """
        if not self.feed.is_deserted():
            return True
        return 1 + len(await self._ask_all()) >= majority(len(self._options.peers))

    async def ask_others(self) -> Mapping[str, LogPosition]:
        """Return the positions of the other replicas that answer in time, by address."""
        found = await self._ask_all()
        return {
            address: LogPosition(status.epoch, status.sequence) for address, status in found.items()
        }

    async def _ask_all(self) -> dict[str, pb.RetrieverStatus]:
        async def ask(
            address: str, client: RetrieverClient
        ) -> tuple[str, pb.RetrieverStatus] | None:
            try:
                return address, await client.status(POSITION_TIMEOUT_S)
            except RagCacheError:
                return None

        answers = await asyncio.gather(*(ask(*one) for one in self._clients.items()))
        return dict(answer for answer in answers if answer is not None)

    async def start_writing(self, epoch: int) -> None:
        """Become the writer. Called when this replica has acquired the Lease."""
        await self._stop_following()
        self._writing_epoch = epoch
        # A change of this epoch proves to followers that they have all earlier ones (Raft, 5.4.2).
        await self._documents.start_epoch(epoch, self._options.own_address.encode())
        self.feed.open(epoch)
        await self._documents.start_writing()
        log.info("replica: writes epoch=%d sequence=%d", epoch, self._position.sequence)

    async def stop_writing(self) -> None:
        """Become a follower. A commit that hangs in the disk may still end, without effect here."""
        if self._writing_epoch is not None:
            # Until now, this replica had every change.
            self._lag.heard(is_complete=True)
        self._writing_epoch = None
        self.feed.close()
        await self._documents.stop_writing()

    def _on_commit(self, change: CommittedChange) -> None:
        self._position = LogPosition(change.epoch, change.sequence)

    # Follower

    async def finish_changes(self) -> None:
        """See ChangeTarget."""
        await self._documents.finish_changes()

    async def apply_change(self, change: CommittedChange) -> None:
        """See ChangeTarget."""
        await self._documents.apply_change(change)

    async def _stop_following(self) -> None:
        following, self._following = self._following, None
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _follow(self) -> None:
        """Follow the writer of this epoch until cancelled."""
        epoch, writer = self._elector.epoch, self._elector.writer
        client = self._clients.get(writer)
        if client is None or self._is_copying:
            return  # it writes itself, or ends soon to start again with a copy
        log.info("replica: follows writer=%s epoch=%d position=%s", writer, epoch, self._position)
        problem = ""
        while True:
            self._follower = Follower(self, self._options.own_address, client, epoch, self._lag)
            try:
                await self._follower.run()
            except (ChangesGone, InvalidInput) as error:
                log.warning("replica: takes a copy writer=%s reason=%s", writer, error)
                await self._copy(client, epoch)
            except RagCacheError as error:
                if str(error) != problem:
                    log.warning("replica: writer lost writer=%s error=%s", writer, error)
                problem = str(error)
            except Exception:
                # The change may be committed. Its index is then completed in the background.
                log.exception("replica: following failed writer=%s", writer)
                await asyncio.sleep(FAILURE_PAUSE_S)
            await asyncio.sleep(RETRY_S)

    async def _copy(self, client: RetrieverClient, epoch: int) -> None:
        """Replace the documents by those of the writer, and ask for a restart with them."""
        self._is_copying, has_copy = True, False
        try:
            async with contextlib.aclosing(client.backup()) as parts:
                await self._take_copy(parts, epoch)
                has_copy = True
                position = self._position
                log.warning("replica: has a copy and starts again position=%s", position)
                self._restart()
        except RagCacheError as error:
            log.warning("replica: copy failed error=%s", error)
        except Exception:
            log.exception("replica: copy failed")
        finally:
            # With a copy it stays so until the end. The copy would lack what is acknowledged now.
            self._is_copying = has_copy
        if has_copy:
            # Nothing that the old documents could repeat is of use.
            await asyncio.Event().wait()
