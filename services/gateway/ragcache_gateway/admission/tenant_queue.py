"""The order of tenants in the engines' queues.

Each gateway orders the requests that it sends, and the engines compare the times of all gateways.
Gateways tell each other about once a second what waits at them, with their counts of usage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from google.protobuf.message import DecodeError

from ragcache_core.access.caller import Caller
from ragcache_core.scheduling.fair_queue import Backlog, FairQueue, OtherQueue, QueuedRequest
from ragcache_core.scheduling.priority import QueuePosition
from ragcache_wire.v1 import retriever_pb2 as pb

Weights = Callable[[], Mapping[str | None, float]]
"""Returns weights by tenant; None: that of all callers without a tenant."""

MAX_TENANTS: Final = 500
"""Most tenants that other gateways are told of: those with the most waiting work, in 50 KiB."""

HEARD_S: Final = 5.0
"""Time for which what another gateway has told counts."""


class TenantQueue:
    """Delays requests of tenants with many waiting ones. For one event loop.

    Args:
        weights: Of the tenants that may ask. With one tenant no request is delayed.
        clock: Returns seconds that never go back.
    """

    def __init__(self, weights: Weights, clock: Callable[[], float] = time.monotonic) -> None:
        self._weights = weights
        self._clock = clock
        self._bands: dict[int, FairQueue[str | None]] = {}
        self._others: dict[int, list[OtherQueue[str | None]]] = {}
        self._heard_s = 0.0

    @contextmanager
    def waiting(self, caller: Caller, seconds: float) -> Generator[QueuePosition, None, None]:
        """Count a request as waiting, until its first token.

        Args:
            seconds: That it is predicted to take in an engine until then.

        Yields:
            Its position, as far as that depends on its tenant.
        """
        if len(self._weights()) < 2:
            yield QueuePosition(caller.priority, tenant=caller.tenant)
            return
        position = self.position(caller, seconds)
        queue = self._bands.setdefault(caller.priority, FairQueue())
        request = QueuedRequest(caller.tenant, caller.rules.weight, seconds)
        now_s = self._clock()
        queue.add(request, now_s, self._others_in(caller.priority, now_s))
        has_begun = False
        try:
            yield position
            has_begun = True
        finally:
            queue.remove(request, self._clock(), has_begun=has_begun)

    def position(self, caller: Caller, seconds: float = 0.0) -> QueuePosition:
        """Return the position that a request of a caller would get now."""
        if len(self._weights()) < 2:
            return QueuePosition(caller.priority, tenant=caller.tenant)
        queue = self._bands.get(caller.priority) or FairQueue()
        request = QueuedRequest(caller.tenant, caller.rules.weight, seconds)
        now_s = self._clock()
        others = self._others_in(caller.priority, now_s)
        delay_ms = round(1e3 * (queue.time_of(request, now_s, others) - now_s))
        excess = max(1.0, queue.excess(request, others))
        return QueuePosition(
            caller.priority, tenant_delay_ms=delay_ms, tenant=caller.tenant, tenant_excess=excess
        )

    def load(self) -> bytes:
        """Return a QueueLoad of what waits; empty: nothing does."""
        waiting = [
            (one.seconds, band, tenant, one.weight)
            for band, queue in self._bands.items()
            for tenant, one in queue.backlogs.items()
        ]
        waiting.sort(key=lambda item: -item[0])
        bands: dict[int, pb.BandLoad] = {}
        for seconds, band, tenant, weight in waiting[:MAX_TENANTS]:
            if band not in bands:
                bands[band] = pb.BandLoad(band=band, rate=self._bands[band].rate)
            bands[band].tenants.add(tenant=tenant, weight=weight, seconds=seconds)
        return pb.QueueLoad(bands=bands.values()).SerializeToString()

    def learn(self, loads: Iterable[bytes]) -> None:
        """Take over the queues that the other gateways reported last."""
        self._others = {}
        self._heard_s = self._clock()
        for load in loads:
            try:
                bands = pb.QueueLoad.FromString(load).bands
            except DecodeError:  # of another release
                continue
            for band in bands:
                other = OtherQueue(max(0.0, band.rate), _backlogs(band))
                self._others.setdefault(band.band, []).append(other)

    def _others_in(self, band: int, now_s: float) -> Sequence[OtherQueue[str | None]]:
        return self._others.get(band, ()) if now_s - self._heard_s < HEARD_S else ()


def _backlogs(band: pb.BandLoad) -> dict[str | None, Backlog]:
    return {
        (one.tenant if one.HasField("tenant") else None): Backlog(one.weight, one.seconds)
        for one in band.tenants
    }
