"""Run loads: values are fetched in the background and written by the engine's own thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field

from ragcache_core.errors import RagCacheError
from ragcache_engine.kv_cache.incoming_value import IncomingValue
from ragcache_engine.protocol.messages import LoadJob, LoadOutcome, VariantSpan
from ragcache_engine.threads import unpinned_pool
from ragcache_engine.tiers.local_tiers import LocalTiers, OfferedValue
from ragcache_engine.worker.fetcher import Fetcher, share_values
from ragcache_wire.trace_context import metadata
from ragcache_wire.tracing import NO_SPAN, SpanKind, Tracer
from ragcache_wire.tracing import Span as TraceSpan

log = logging.getLogger("vllm.ragcache")

_LATE = 0.9
"""Of its time: a store that is asked ends a little earlier than who waits for it."""

Write = Callable[[LoadJob, IncomingValue, int, int], None]


@dataclass(slots=True)
class _Load:
    job: LoadJob
    started: float
    cancelled: threading.Event = field(default_factory=threading.Event)
    arrivals: queue.SimpleQueue[IncomingValue] = field(default_factory=queue.SimpleQueue)
    spans_done: int = 0
    tokens: int = 0
    num_bytes: int = 0
    lost: list[range] = field(default_factory=list)
    missing_reasons: Counter[str] = field(default_factory=Counter)
    trace: TraceSpan = NO_SPAN
    values_by_tier: Counter[str] = field(default_factory=Counter)
    bytes_by_tier: Counter[str] = field(default_factory=Counter)
    offers: list[OfferedValue] = field(default_factory=list)
    came: int = 0  # spans of which the fetching thread has said something

    @property
    def is_wanted(self) -> bool:
        """Whether anybody waits for it."""
        return not self.cancelled.is_set()

    @property
    def left_s(self) -> float:
        """Seconds before it is late."""
        return self.job.deadline_s - (time.monotonic() - self.started)

    def take(self, arrival: IncomingValue) -> None:
        """The next span has come, or has not; for the fetching thread."""
        self.came += 1
        self.arrivals.put(arrival)

    def fail(self, reason: str) -> None:
        """Nothing more comes; for the fetching thread."""
        if self.came < len(self.job.spans):
            self.take(IncomingValue(self.job.spans[self.came], None, reason=reason))

    def lose(self, span: VariantSpan, reason: str) -> None:
        """The next span has not come, and is to be mended."""
        self.lost.append(range(*self.job.written_range(span)))
        self.missing_reasons[reason] += 1
        self.spans_done += 1


class Loader:
    """Runs LoadJobs. ``write`` is called on the thread that calls ``advance``, never elsewhere.

    write(job, arrival, start, end): put prompt tokens [start, end) of an arrival into the job's
    blocks. Values arrive in order, so what has been written is always a prefix, but for holes that
    are mended. What a load has brought is offered to the tiers when it has ended. first: what has
    to be done once, so that the first load is as fast as later ones; it is begun at once, on the
    threads that loads need, too. tracer: of loads that are part of a trace.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        tiers: LocalTiers,
        first: Sequence[Callable[[], None]],
        tracer: Tracer | None = None,
    ) -> None:
        self._fetcher = fetcher
        self._tiers = tiers
        self._tracer = tracer or Tracer()
        self._pool = unpinned_pool(2, "ragcache-load")
        self._loads: dict[str, _Load] = {}
        self._first = [self._pool.submit(step) for step in first]

    @property
    def idle(self) -> bool:
        """Whether no load is under way."""
        return not self._loads

    def wait_until_warm(self, timeout_s: float) -> None:
        """Until what has to be done once is done, or has failed, or takes longer."""
        done, late = wait(self._first, timeout_s)
        for step in done:
            if (error := step.exception()) is not None:
                log.warning("the first load may be slow", exc_info=error)
        if late:
            log.warning("the first load may be slow: not ready for it within %g s", timeout_s)

    def start(self, jobs: Iterable[LoadJob]) -> None:
        """Begin fetching; ``advance`` reports the end of each.

        Jobs that want some of the same values fetch them once.
        """
        groups: list[list[_Load]] = []
        for job in jobs:
            load = _Load(job, time.monotonic())
            load.trace = self._tracer.start_child_of("load", metadata(job.traceparent), SpanKind.INTERNAL)
            self._loads[job.request_id] = load
            alike = (group for group in groups if share_values(group[0].job, job))
            if (group := next(alike, None)) is not None:
                group.append(load)
            else:
                groups.append([load])
        for group in groups:
            try:
                self._pool.submit(self._traced_fetch, group)
            except RuntimeError:
                log.exception("loads cannot be started")
                for load in group:
                    load.fail("load failed")

    def cancel(self, request_id: str) -> None:
        """Stop wanting a load, if it is running; it is still reported, as every load is."""
        load = self._loads.get(request_id)
        if load is not None:
            load.cancelled.set()

    def advance(self, write: Write) -> list[LoadOutcome]:
        """Write what has arrived; returns the loads that ended, whole or not.

        A write that raises (a device error) ends its own load and no other.
        """
        outcomes = []
        for request_id, load in list(self._loads.items()):
            try:
                outcome = self._advance(load, write)
            except Exception:
                log.exception("loaded KV of request %s could not be written", request_id)
                load.cancelled.set()
                outcome = self._outcome(load, load.job.spans[load.spans_done], "write failed")
            if outcome is not None:
                outcomes.append(outcome)
                del self._loads[request_id]
                self._tiers.offer(load.offers)
        if outcomes:
            self._tiers.settle()
        return outcomes

    def close(self) -> None:
        """Give up every load."""
        for load in self._loads.values():
            load.cancelled.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _advance(self, load: _Load, write: Write) -> LoadOutcome | None:
        while load.spans_done < len(load.job.spans):
            if load.cancelled.is_set():
                return self._outcome(load, load.job.spans[load.spans_done], "cancelled")
            try:
                arrival = load.arrivals.get_nowait()
            except queue.Empty:
                # The fetch has a deadline of its own; this one also covers a fetch that waits for
                # a thread of the pool.
                if load.left_s >= 0:
                    return None
                load.cancelled.set()
                return self._given_up(load, "load late")
            span = arrival.span
            start, end = load.job.written_range(span)
            if arrival.source is None:
                if not arrival.mended:
                    return self._given_up(load, arrival.reason)
                load.lose(span, arrival.reason)
                continue
            write(load.job, arrival, start, end)
            load.spans_done += 1
            load.tokens += end - start
            load.num_bytes += arrival.num_bytes
            load.values_by_tier[arrival.came_from] += 1
            load.bytes_by_tier[arrival.came_from] += arrival.num_bytes
            if arrival.offer is not None:
                load.offers.append(arrival.offer)
        return self._outcome(load, None, "")

    def _given_up(self, load: _Load, reason: str) -> LoadOutcome:
        """Nothing more comes: what is left is computed when the load is mended, if it can be.

        Where nothing is there yet of what would be mended, all of that is computed as it stands,
        and exact.
        """
        job, left = load.job, load.job.spans[load.spans_done :]
        approximate = [span for span in job.spans[: load.spans_done] if job.can_recompute(span)]
        came = sum(len(range(*job.written_range(span))) for span in approximate) - sum(map(len, load.lost))
        if came <= 0 or not all(job.can_recompute(span) for span in left):
            return self._outcome(load, left[0], reason)
        for span in left:
            load.lose(span, reason)
        return self._outcome(load, None, "")

    @staticmethod
    def _outcome(load: _Load, missing: VariantSpan | None, reason: str) -> LoadOutcome:
        load.trace.set(tokens=load.tokens, bytes=load.num_bytes, miss=reason)
        load.trace.end()
        seconds = time.monotonic() - load.started
        return LoadOutcome(
            load.job.request_id,
            load.tokens,
            load.num_bytes,
            seconds,
            missing.variant if missing else None,
            reason,
            tuple(load.lost),
            missing_reasons=load.missing_reasons,
            timed_out=bool(reason or load.lost) and seconds > _LATE * load.job.deadline_s,
            values_by_tier=load.values_by_tier,
            bytes_by_tier=load.bytes_by_tier,
        )

    def _traced_fetch(self, loads: Sequence[_Load]) -> None:
        # What the store does for several is part of the first one's trace.
        with loads[0].trace.current():
            self._fetch(loads)

    def _fetch(self, group: Sequence[_Load]) -> None:
        # What waited for a thread of the pool has less time left, or is not wanted any more.
        loads = [load for load in group if load.is_wanted and load.left_s > 0]
        if not loads:
            return
        jobs = [load.job for load in loads]
        try:
            for place, arrival in self._fetcher.fetch(jobs, max(load.left_s for load in loads)):
                if not any(load.is_wanted for load in loads):
                    return
                loads[place].take(arrival)
        except RagCacheError as error:
            log.warning("a load failed: %s", error)
            for load in loads:
                load.fail("store unavailable")
        except Exception:
            # Whatever it was, the request must be computed rather than wait for its deadline.
            log.exception("a load failed")
            for load in loads:
                load.fail("load failed")
