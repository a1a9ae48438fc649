"""Holds the Lease of the writer while this replica is fit to write, and tells who the writer is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from ragcache_core.cluster.writer_election import ElectionTiming, LogPosition, WriterElection
from ragcache_core.errors import RagCacheError
from ragcache_retriever.concurrency.background import attempted
from ragcache_retriever.replication.lease_store import LeaseConflict, LeaseStore

log = logging.getLogger(__name__)

STORE_TIMEOUT_S = 2.0
"""Longest read or write of the Lease. Several fit into the renew deadline."""


def boot_time_s() -> float:
    """Return seconds since boot. They go on while the machine sleeps, unlike Python's monotonic."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Candidate(Protocol):
    """The replica that the elector works for."""

    def position(self) -> LogPosition:
        """Return the last change of this replica."""
        ...

    async def ask_others(self) -> Mapping[str, LogPosition]:
        """Return the positions of the other replicas that answer in time, by address."""
        ...

    def is_fit(self) -> bool:
        """Whether this replica could write now: it is loaded, and its storage answers."""
        ...

    async def is_followed(self) -> bool:
        """Whether this replica, as the writer, is connected to a majority."""
        ...

    async def start_writing(self, epoch: int) -> None:
        """Become the writer. An error gives the Lease up."""
        ...

    async def stop_writing(self) -> None:
        """Stop to be the writer."""
        ...


class WriterElector:
    """Acquires, renews and releases the Lease for one replica."""

    def __init__(
        self,
        election: WriterElection,
        lease_store: LeaseStore,
        candidate: Candidate,
        timing: ElectionTiming,
        *,
        clock: Callable[[], float] = boot_time_s,
    ) -> None:
        self._election = election
        self._lease_store = lease_store
        self._candidate = candidate
        self._timing = timing
        self._clock = clock
        self._starting: asyncio.Task[None] | None = None
        self._read_s = clock()
        self._changed = asyncio.Event()
        self._problem = ""

    @property
    def epoch(self) -> int:
        """Epoch of the last writer that is known."""
        return self._election.epoch

    @property
    def writer(self) -> str:
        """Address of the writer, or empty if none is known."""
        return self._election.writer

    @property
    def unread_s(self) -> float:
        """Time since the Lease was last read or written."""
        return self._clock() - self._read_s

    def has_writer(self) -> bool:
        """Whether another replica or this one holds a Lease that has not expired."""
        return not self._election.is_free(self._clock()) and bool(self._election.writer)

    def may_write(self) -> bool:
        """Whether this replica is the writer, and no other one can be."""
        is_started = self._starting is not None and self._starting.done()
        return is_started and self._election.may_write(self._clock())

    async def wait_changed(self) -> None:
        """Wait until the Lease has another holder or epoch."""
        await self._changed.wait()

    async def run(self) -> None:
        """Work until cancelled, then release the Lease."""
        try:
            while True:
                await attempted(log, "lease: step failed", self._step())
                await asyncio.sleep(self._timing.retry_s)
        finally:
            if self._election.held_epoch is not None:
                await self._give_up("the replica stops")

    async def _step(self) -> None:
        before = self._election.epoch, self._election.writer
        problem = ""
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                await self._renew_or_read()
            self._read_s = self._clock()
        except LeaseConflict:
            pass  # The next step reads what another replica wrote.
        except (RagCacheError, TimeoutError) as error:
            problem = str(error) or "no answer in time"
        except Exception as error:
            # A defect must not keep this replica from stepping down below.
            log.exception("lease: failed")
            problem = self._problem = repr(error)
        if problem and problem != self._problem:
            log.warning("lease: failed problem=%s", problem)
        self._problem = problem
        await self._check_held()
        if self._election.held_epoch is None:
            await self._try_to_lead()
        if (self._election.epoch, self._election.writer) != before:
            self._changed.set()
            self._changed = asyncio.Event()

    async def _renew_or_read(self) -> None:
        began_s = self._clock()
        if self._election.held_epoch is None:
            self._election.observe(await self._lease_store.read(), self._clock())
            return
        try:
            lease = await self._lease_store.write(self._election.renewal())
        except LeaseConflict:
            self._election.observe(await self._lease_store.read(), self._clock())
            return
        self._election.wrote(lease, began_s, self._clock())

    async def _check_held(self) -> None:
        """Stop to write if the Lease is lost, not renewed in time, or of no use here."""
        if self._starting is None:
            return
        if self._election.held_epoch is None:
            await self._step_down("another replica has the Lease")
        elif not self._election.may_write(self._clock()):
            await self._step_down("the Lease was not renewed in time")
        elif not self._candidate.is_fit():
            await self._give_up("the storage does not answer")
        elif not await self._candidate.is_followed():
            await self._give_up("no majority of the replicas can be reached")
        elif self._starting.done() and (error := self._starting.exception()) is not None:
            if not isinstance(error, RagCacheError):
                log.error("replica: writing could not begin", exc_info=error)
            await self._give_up(f"writing could not begin: {error}")

    async def _try_to_lead(self) -> None:
        if not self._election.is_free(self._clock()) or not self._candidate.is_fit():
            return
        others = await self._candidate.ask_others()
        wanted = self._election.claim(self._candidate.position(), others, self._clock())
        if wanted is None:
            return
        began_s = self._clock()
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                lease = await self._lease_store.write(wanted)
        except LeaseConflict:
            return
        except (RagCacheError, TimeoutError) as error:
            log.warning("lease: failed problem=%s", str(error) or "no answer in time")
            return
        self._election.wrote(lease, began_s, self._clock())
        log.info("lease: acquired epoch=%d position=%s", lease.epoch, self._candidate.position())
        # It may wait for a disk, and the Lease is renewed meanwhile.
        self._starting = asyncio.create_task(self._candidate.start_writing(lease.epoch))

    async def _step_down(self, reason: str) -> None:
        log.info("lease: left epoch=%d reason=%s", self._election.epoch, reason)
        starting, self._starting = self._starting, None
        self._election.step_down()
        if starting is not None:
            starting.cancel()
            await asyncio.wait((starting,), timeout=self._timing.retry_s)
        await self._candidate.stop_writing()

    async def _give_up(self, reason: str) -> None:
        """Step down, and release the Lease so that another replica writes at once."""
        release = self._election.release()
        await self._step_down(reason)
        with contextlib.suppress(RagCacheError, TimeoutError):
            async with asyncio.timeout(STORE_TIMEOUT_S):
                self._election.observe(await self._lease_store.write(release), self._clock())
