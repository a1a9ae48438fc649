"""Run loads: background threads fetch values, and the worker's main thread writes them."""

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
from ragcache_engine.kv_cache.block_writer import PlacedValue
from ragcache_engine.kv_cache.incoming_value import IncomingValue, OfferedValue
from ragcache_engine.protocol.messages import LoadJob, LoadOutcome, VariantSpan
from ragcache_engine.threads import unpinned_pool
from ragcache_engine.tiers.local_tiers import LocalTiers
from ragcache_engine.worker.fetcher import Fetcher, share_values
from ragcache_wire.tracing import NO_SPAN, SpanKind, Tracer, metadata
from ragcache_wire.tracing import Span as TraceSpan

log = logging.getLogger("vllm.ragcache")

_TIMED_OUT_SHARE = 0.9
"""Share of its deadline after which a failed load counts as timed out. A request to the store ends
a little before the load's own deadline."""

Write = Callable[[LoadJob, Sequence[PlacedValue]], None]
"""Writes values to the job's blocks."""


@dataclass(slots=True)
class _RunningLoad:
    job: LoadJob
    started: float
    cancelled: threading.Event = field(default_factory=threading.Event)
    fetched: queue.SimpleQueue[IncomingValue] = field(default_factory=queue.SimpleQueue)
    trace: TraceSpan = NO_SPAN
    # Spans for which the fetching thread has queued a result.
    spans_fetched: int = 0
    spans_done: int = 0
    tokens: int = 0
    num_bytes: int = 0
    missing_ranges: list[range] = field(default_factory=list)
    missing_reasons: Counter[str] = field(default_factory=Counter)
    values_by_tier: Counter[str] = field(default_factory=Counter)
    bytes_by_tier: Counter[str] = field(default_factory=Counter)
    tokens_by_tier: Counter[str] = field(default_factory=Counter)
    # When the last value of each tier was written, in nanoseconds of Unix time.
    written_ns: dict[str, int] = field(default_factory=dict)
    offers: list[OfferedValue] = field(default_factory=list)

    @property
    def is_wanted(self) -> bool:
        """Whether the load was not cancelled."""
        return not self.cancelled.is_set()

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.job.deadline_s - (time.monotonic() - self.started)

    def put(self, value: IncomingValue) -> None:
        """Queue the result for the next span. The fetching thread calls this."""
        self.spans_fetched += 1
        self.fetched.put(value)

    def fail(self, reason: str) -> None:
        """End the load before its next span. The fetching thread calls this."""
        if self.spans_fetched < len(self.job.spans):
            self.put(IncomingValue(self.job.spans[self.spans_fetched], None, reason=reason))

    def take_arrived(self) -> tuple[list[IncomingValue], IncomingValue | None]:
        """Return the results that have come since the last call.

        Returns:
            Values, and missing ones that the worker can recompute. After them a value that did
            neither arrive nor can be recomputed, if there is one.
        """
        arrived: list[IncomingValue] = []
        while self.spans_done + len(arrived) < len(self.job.spans):
            try:
                value = self.fetched.get_nowait()
            except queue.Empty:
                break
            if value.source is None and not value.can_recompute:
                return arrived, value
            arrived.append(value)
        return arrived, None

    def note_written(self, value: IncomingValue, num_tokens: int) -> None:
        """Count the next span as written."""
        self.spans_done += 1
        self.tokens += num_tokens
        self.num_bytes += value.num_bytes
        self.values_by_tier[value.tier] += 1
        self.bytes_by_tier[value.tier] += value.num_bytes
        self.tokens_by_tier[value.tier] += num_tokens
        self.written_ns[value.tier] = time.time_ns()
        if value.offer is not None:
            self.offers.append(value.offer)

    def note_missing(self, span: VariantSpan, reason: str) -> None:
        """Count the next span as missing; the worker recomputes it."""
        self.missing_ranges.append(range(*self.job.written_range(span)))
        self.missing_reasons[reason] += 1
        self.spans_done += 1

    def end(self, missing: VariantSpan | None, reason: str) -> LoadOutcome:
        """End the load's trace and return its outcome.

        Args:
            missing: The first span that did not arrive and is not recomputed here.
            reason: Why the load failed, or "".
        """
        self.trace.set(tokens=self.tokens, bytes=self.num_bytes, miss=reason)
        self.trace.end()
        seconds = time.monotonic() - self.started
        incomplete = bool(reason or self.missing_ranges)
        return LoadOutcome(
            self.job.request_id,
            self.tokens,
            self.num_bytes,
            seconds,
            missing.variant if missing else None,
            reason,
            tuple(self.missing_ranges),
            missing_reasons=self.missing_reasons,
            timed_out=incomplete and seconds > _TIMED_OUT_SHARE * self.job.deadline_s,
            values_by_tier=self.values_by_tier,
            bytes_by_tier=self.bytes_by_tier,
        )


class ValueLoader:
    """Runs LoadJobs.

    Values are written in order, so the written tokens are always a prefix of the load, except for
    missing chunks that the worker recomputes. When a load has ended, the loader offers its values
    to the tiers.

    Args:
        fetcher: Fetches values.
        tiers: Are offered the loaded values.
        warm_up_steps: Run once, at once, on the threads that loads use, so that the first load is
            as fast as later ones.
        tracer: Traces the loads that are part of a trace.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        tiers: LocalTiers,
        warm_up_steps: Sequence[Callable[[], None]],
        tracer: Tracer | None = None,
    ) -> None:
        self._fetcher = fetcher
        self._tiers = tiers
        self._tracer = tracer or Tracer()
        self._pool = unpinned_pool(2, "ragcache-load")
        self._loads: dict[str, _RunningLoad] = {}
        self._warm_up = [self._pool.submit(step) for step in warm_up_steps]

    @property
    def idle(self) -> bool:
        """Whether no load is running."""
        return not self._loads

    def wait_until_warm(self, timeout_s: float) -> None:
        """Wait until the warm-up steps have ended, well or not, or until the timeout."""
        done, unfinished = wait(self._warm_up, timeout_s)
        for step in done:
            if (error := step.exception()) is not None:
                log.warning("loader: warm-up failed, the first load may be slow", exc_info=error)
        if unfinished:
            log.warning(
                "loader: warm-up not finished, the first load may be slow timeout_s=%g", timeout_s
            )

    def start(self, jobs: Iterable[LoadJob]) -> None:
        """Start to fetch; ``advance`` reports the end of each load.

        Jobs that want some of the same values fetch these once.
        """
        groups: list[list[_RunningLoad]] = []
        for job in jobs:
            load = _RunningLoad(job, time.monotonic())
            load.trace = self._tracer.start_child_of(
                "load", metadata(job.traceparent), SpanKind.INTERNAL
            )
            self._loads[job.request_id] = load
            alike = (group for group in groups if share_values(group[0].job, job))
            if (group := next(alike, None)) is not None:
                group.append(load)
            else:
                groups.append([load])
        for group in groups:
            try:
                self._pool.submit(self._fetch_traced, group)
            except RuntimeError:
                log.exception("loader: cannot start loads")
                for load in group:
                    load.fail("load failed")

    def cancel(self, request_id: str) -> None:
        """Cancel a load if it is running. ``advance`` still reports it."""
        load = self._loads.get(request_id)
        if load is not None:
            load.cancelled.set()

    def advance(self, write: Write) -> list[LoadOutcome]:
        """Write the values that have arrived; return the loads that ended, complete or not.

        A write that raises (a device error) ends its own load and no other.

        Args:
            write: Called on this thread only, in the order of the prompt.
        """
        outcomes = []
        for request_id, load in list(self._loads.items()):
            try:
                outcome = self._advance(load, write)
            except Exception:
                log.exception("loader: write failed request=%s", request_id)
                load.cancelled.set()
                outcome = load.end(load.job.spans[load.spans_done], "write failed")
            if outcome is not None:
                outcomes.append(outcome)
                self._record_tiers(load)
                del self._loads[request_id]
                self._tiers.offer(load.offers)
        if outcomes:
            self._tiers.start_rebalance()
        return outcomes

    def close(self) -> None:
        """Cancel every load."""
        for load in self._loads.values():
            load.cancelled.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _record_tiers(self, load: _RunningLoad) -> None:
        """Record a span for each tier that a load has read, until its last value was written."""
        for tier, written_ns in load.written_ns.items():
            self._tracer.record(
                "load tier",
                load.trace,
                load.trace.started_ns,
                written_ns,
                tier=tier,
                values=load.values_by_tier[tier],
                tokens=load.tokens_by_tier[tier],
                bytes=load.bytes_by_tier[tier],
            )

    def _advance(self, load: _RunningLoad, write: Write) -> LoadOutcome | None:
        if load.cancelled.is_set() and load.spans_done < len(load.job.spans):
            return load.end(load.job.spans[load.spans_done], "cancelled")
        arrived, refused = load.take_arrived()
        placed = [
            PlacedValue(value, *load.job.written_range(value.span))
            for value in arrived
            if value.source is not None
        ]
        if placed:
            write(load.job, placed)
        for value in arrived:
            if value.source is not None:
                start, end = load.job.written_range(value.span)
                load.note_written(value, end - start)
            else:
                load.note_missing(value.span, value.reason)
        if refused is not None:
            return self._end_early(load, refused.reason)
        if load.spans_done == len(load.job.spans):
            return load.end(None, "")
        # The fetch has its own deadline. This one also covers a fetch that waits for a thread of
        # the pool.
        if load.left_s >= 0:
            return None
        load.cancelled.set()
        return self._end_early(load, "load timed out")

    def _end_early(self, load: _RunningLoad, reason: str) -> LoadOutcome:
        """End a load whose remaining values will not arrive.

        If all of them can be recomputed, the worker recomputes them, and the load succeeds. If no
        approximate value has arrived either, the load fails: vLLM then computes these tokens, and
        the result is exact.
        """
        job, left = load.job, load.job.spans[load.spans_done :]
        approximate = [span for span in job.spans[: load.spans_done] if job.can_recompute(span)]
        arrived = sum(len(range(*job.written_range(span))) for span in approximate)
        arrived -= sum(map(len, load.missing_ranges))
        if arrived <= 0 or not all(job.can_recompute(span) for span in left):
            return load.end(left[0], reason)
        for span in left:
            load.note_missing(span, reason)
        return load.end(None, "")

    def _fetch_traced(self, loads: Sequence[_RunningLoad]) -> None:
        # The store's work for several loads belongs to the trace of the first one.
        with loads[0].trace.current():
            self._fetch(loads)

    def _fetch(self, group: Sequence[_RunningLoad]) -> None:
        # Loads may have waited for a thread of the pool, and been cancelled meanwhile.
        loads = [load for load in group if load.is_wanted and load.left_s > 0]
        if not loads:
            return
        jobs = [load.job for load in loads]
        try:
            for index, value in self._fetcher.fetch(jobs, max(load.left_s for load in loads)):
                if not any(load.is_wanted for load in loads):
                    return
                loads[index].put(value)
        except RagCacheError as error:
            log.warning("loader: fetch failed error=%s", error)
            for load in loads:
                load.fail("store unavailable")
        except Exception:
            # vLLM computes the request now, instead of after the load's deadline.
            log.exception("loader: fetch failed")
            for load in loads:
                load.fail("load failed")
