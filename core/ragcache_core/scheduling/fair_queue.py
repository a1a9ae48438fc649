"""The order of tenants in a band of the engines' queues: self-clocked fair queueing.

vLLM admits by priority, and inside a band by the time in it. A request gets the time at which it
would end if its tenant had its share of the engines for itself. That is now, plus the predicted
seconds of the request and of the tenant's other waiting requests, divided by the share. So a tenant
with many waiting requests is behind those of others.

How many predicted seconds are done in a second is measured while requests wait. So the number of
engines does not matter, and predictions may all be wrong by one factor. Gateways tell each other
what waits at them, and how much of it is done in a second.

Nothing is remembered of a tenant's requests that have begun: one that used idle engines owes
nothing. A request's time is fixed when it is sent, and later requests get later times, so none
waits for ever.

Source: A self-clocked fair queueing scheme (Golestani, INFOCOM 1994). The backlog replaces the
last finish tag, so that errors of predictions do not add up.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

T = TypeVar("T", bound=Hashable)

MAX_DELAY_S: Final = 600.0
"""Most seconds that a request is behind its arrival because of its tenant's others."""

MEMORY_S: Final = 30.0
"""Waiting time after which a measurement counts a third."""

_LEAST_RATE: Final = 1e-6


@dataclass(frozen=True, slots=True)
class QueuedRequest(Generic[T]):
    """A request that waits.

    Attributes:
        weight: Of the tenant's share.
        seconds: That it is predicted to take in an engine.
    """

    tenant: T
    weight: float
    seconds: float


@dataclass(slots=True)
class Backlog:
    """The waiting requests of a tenant.

    Attributes:
        seconds: That they are predicted to take in an engine.
    """

    weight: float
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class OtherQueue(Generic[T]):
    """What waits at another gateway in the same band.

    Attributes:
        rate: Predicted seconds of its requests that engines do in one second.
    """

    rate: float
    backlogs: Mapping[T, Backlog]


@dataclass(slots=True)
class _OwnBacklog(Backlog):
    num_requests: int = 0
    last_s: float = 0.0  # time of the last of them


class FairQueue(Generic[T]):
    """The requests of all tenants in one band that have no first token yet.

    All times are on one steady clock, in seconds.
    """

    def __init__(self) -> None:
        self._backlogs: dict[T, _OwnBacklog] = {}
        self._measured_s = 0.0  # until when waiting time is counted
        # Predicted seconds that were done, and the time that it took. One engine is assumed first.
        self._done_s = 1.0
        self._busy_s = 1.0

    @property
    def rate(self) -> float:
        """Predicted seconds that are done in one second, while requests wait."""
        return max(_LEAST_RATE, self._done_s / self._busy_s)

    @property
    def backlogs(self) -> Mapping[T, Backlog]:
        """The waiting requests by tenant."""
        return self._backlogs

    def add(
        self, request: QueuedRequest[T], now_s: float, others: Sequence[OtherQueue[T]] = ()
    ) -> float:
        """Add a request that is sent now; return its time in its band.

        Args:
            others: What waits at other gateways.
        """
        if not self._backlogs:
            self._measured_s = now_s
        time_s = self.time_of(request, now_s, others)
        own = self._backlogs.setdefault(request.tenant, _OwnBacklog(request.weight))
        own.weight = request.weight
        own.seconds += request.seconds
        own.num_requests += 1
        own.last_s = time_s
        return time_s

    def time_of(
        self, request: QueuedRequest[T], now_s: float, others: Sequence[OtherQueue[T]] = ()
    ) -> float:
        """Return the time that a request would get now."""
        rate, seconds, weights = self.rate, request.seconds, dict[T, float]()
        for other in others:
            rate += other.rate
            weights.update((tenant, one.weight) for tenant, one in other.backlogs.items())
            if (elsewhere := other.backlogs.get(request.tenant)) is not None:
                seconds += elsewhere.seconds
        weights.update((tenant, one.weight) for tenant, one in self._backlogs.items())
        weights[request.tenant] = request.weight
        last_s = now_s
        if (own := self._backlogs.get(request.tenant)) is not None:
            seconds, last_s = seconds + own.seconds, own.last_s
        wait_s = seconds * sum(weights.values()) / (rate * request.weight)
        return min(max(now_s + wait_s, last_s), now_s + MAX_DELAY_S)

    def excess(self, request: QueuedRequest[T], others: Sequence[OtherQueue[T]] = ()) -> float:
        """Return what a tenant has waiting with a new request, over its share of all that waits.

        Up to 1 the request waits for what is before it now. Above 1 tenants below their share will
        go first, until it has waited so many times as long.
        """
        own_s = total_s = request.seconds
        weights = {request.tenant: request.weight}
        for backlogs in (self._backlogs, *(other.backlogs for other in others)):
            for tenant, one in backlogs.items():
                weights.setdefault(tenant, one.weight)
                total_s += one.seconds
                own_s += one.seconds if tenant == request.tenant else 0.0
        return own_s * sum(weights.values()) / (request.weight * total_s) if total_s else 0.0

    def remove(self, request: QueuedRequest[T], now_s: float, *, has_begun: bool) -> None:
        """Remove a request.

        Args:
            has_begun: Whether it has its first token. Else it was cancelled, or has failed.
        """
        if has_begun:
            elapsed_s = max(0.0, now_s - self._measured_s)
            kept = math.exp(-elapsed_s / MEMORY_S)
            self._busy_s = self._busy_s * kept + elapsed_s
            self._done_s = self._done_s * kept + request.seconds
            self._measured_s = now_s
        own = self._backlogs[request.tenant]
        own.seconds = max(0.0, own.seconds - request.seconds)
        own.num_requests -= 1
        if not own.num_requests:
            del self._backlogs[request.tenant]
