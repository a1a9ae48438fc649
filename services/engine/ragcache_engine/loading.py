"""Fetch variants from the store in the background and hand them to the engine's own thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ragcache_core.errors import RagCacheError
from ragcache_core.keys import KVSpace
from ragcache_core.variant import Miss
from ragcache_engine.records import reason
from ragcache_engine.threads import side_pool
from ragcache_engine.transfer import LoadJob, LoadOutcome, Span
from ragcache_engine.values import decode
from ragcache_kv.rotation import KeyRotation
from ragcache_kv.store.sharded import ShardedStore
from ragcache_kv.store.stored_value import StoredValue

log = logging.getLogger("vllm.ragcache")

Write = Callable[[LoadJob, torch.Tensor, int], None]


@dataclass(slots=True)
class _Arrival:
    """One variant that came; value None: it did not, and unless it is mended nothing after it."""

    span: Span
    value: torch.Tensor | None
    num_bytes: int = 0
    reason: str = ""
    mended: bool = False


@dataclass(slots=True)
class _Load:
    job: LoadJob
    started: float
    cancelled: threading.Event = field(default_factory=threading.Event)
    arrivals: queue.SimpleQueue[_Arrival] = field(default_factory=queue.SimpleQueue)
    spans_done: int = 0
    tokens: int = 0
    num_bytes: int = 0
    lost: list[range] = field(default_factory=list)

    def may_lack(self, span: Span) -> bool:
        """Whether what span has can be computed later, when the load is mended."""
        repair = self.job.repair
        return repair is not None and max(span.start, self.job.first) >= repair.exact_end


class Loader:
    """Runs LoadJobs. ``write`` is called on the thread that calls ``advance``, never elsewhere.

    write(job, value, start): put value, the prompt tokens from start on, into the job's blocks.
    Values arrive in order, so what has been written is always a prefix, but for holes that are
    mended. rotation: of the model's keys, for those that have moved; None where that is not known,
    and then no job has any.
    """

    def __init__(
        self,
        client: ShardedStore,
        space: KVSpace,
        deadline_s: float,
        rotation: KeyRotation | None = None,
    ) -> None:
        self._client = client
        self._space = space
        self._deadline_s = deadline_s
        self._rotation = rotation
        self._pool = side_pool(2, "ragcache-load")
        self._loads: dict[str, _Load] = {}
        # Connects now, so that the first visitor does not wait for it; an outage is no matter here.
        self._pool.submit(self._connect)

    def _connect(self) -> None:
        if self._rotation is not None:
            self._rotation.warm_up()
        self._client.connect(self._deadline_s)
        for shard, lane in self._client.lanes().items():
            log.info("values of shard %s come over the %s lane", shard, lane)

    @property
    def idle(self) -> bool:
        """Whether no load is under way."""
        return not self._loads

    def start(self, job: LoadJob) -> None:
        """Begin fetching; ``advance`` reports the end."""
        load = _Load(job, time.monotonic())
        self._loads[job.request_id] = load
        try:
            self._pool.submit(self._fetch, load)
        except RuntimeError:
            log.exception("load of request %s cannot be started", job.request_id)
            load.arrivals.put(_Arrival(job.spans[0], None, reason="load failed"))

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
        return outcomes

    def close(self) -> None:
        """Give up every load."""
        for load in self._loads.values():
            load.cancelled.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _advance(self, load: _Load, write: Write) -> LoadOutcome | None:
        while load.spans_done < len(load.job.spans):
            try:
                arrival = load.arrivals.get_nowait()
            except queue.Empty:
                if load.cancelled.is_set():
                    return self._outcome(load, load.job.spans[load.spans_done], "cancelled")
                # The fetch has a deadline of its own; this one also covers a fetch that waits for
                # a thread of the pool.
                if time.monotonic() - load.started <= self._deadline_s:
                    return None
                load.cancelled.set()
                return self._outcome(load, load.job.spans[load.spans_done], "load late")
            span = arrival.span
            start, end = max(span.start, load.job.first), min(span.end, load.job.end)
            if arrival.value is None:
                if not arrival.mended:
                    return self._outcome(load, span, arrival.reason)
                load.lost.append(range(start, end))
                load.spans_done += 1
                continue
            write(load.job, arrival.value[:, :, start - span.start : end - span.start], start)
            load.spans_done += 1
            load.tokens += end - start
            load.num_bytes += arrival.num_bytes
        return self._outcome(load, None, "")

    @staticmethod
    def _outcome(load: _Load, missing: Span | None, reason: str) -> LoadOutcome:
        return LoadOutcome(
            load.job.request_id,
            load.tokens,
            load.num_bytes,
            time.monotonic() - load.started,
            missing.variant if missing else None,
            reason,
            tuple(load.lost),
        )

    def _arrival(self, load: _Load, span: Span, stored: StoredValue | Miss) -> _Arrival:
        mended = load.may_lack(span)
        if isinstance(stored, Miss):
            return _Arrival(span, None, reason=reason(stored), mended=mended)
        if not (mended or stored.info.serves_exact):
            # It was when it was looked up; since then it has been held with a loss.
            return _Arrival(span, None, reason=reason(Miss.OTHER_PRECISION))
        if span.base_position not in (None, stored.info.base_position):
            return _Arrival(span, None, reason="other position", mended=mended)
        value = decode(stored, span.end - span.start, self._space)
        if value is None:
            return _Arrival(span, None, reason="other layout", mended=mended)
        if span.moved_by:
            assert self._rotation is not None
            self._rotation.rotate_part(value, span.moved_by)
        return _Arrival(span, value, num_bytes=len(stored.value))

    def _fetch(self, load: _Load) -> None:
        spans = load.job.spans
        done = 0
        # What waited for a thread of the pool has less time left, or is not wanted any more.
        left_s = self._deadline_s - (time.monotonic() - load.started)
        if load.cancelled.is_set() or left_s <= 0:
            return
        try:
            values = self._client.get(
                [span.variant for span in spans],
                left_s,
                exact=load.job.repair is None,
                domain=load.job.domain,
            )
            for span, (key, stored) in zip(spans, values, strict=False):
                if load.cancelled.is_set():
                    return
                if key != span.variant:
                    raise RagCacheError("the store answered in another order")
                arrival = self._arrival(load, span, stored)
                load.arrivals.put(arrival)
                if arrival.value is None and not arrival.mended:
                    return
                done += 1
            if done < len(spans):
                load.arrivals.put(_Arrival(spans[done], None, reason="store ended early"))
        except RagCacheError as error:
            log.warning("load of request %s failed: %s", load.job.request_id, error)
            load.arrivals.put(_Arrival(spans[done], None, reason="store unavailable"))
        except Exception:
            # Whatever it was, the request must be computed rather than wait for its deadline.
            log.exception("load of request %s failed", load.job.request_id)
            load.arrivals.put(_Arrival(spans[done], None, reason="load failed"))
