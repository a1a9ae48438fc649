"""Leader election: the replica that holds a Lease reconciles, the others wait.

The replicas never compare clocks of different machines. A candidate measures by its own clock how
long the Lease has not changed, and takes it over after the duration that the holder announced. The
holder stops, by its own clock, earlier than that. The difference is the time for its work to end.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from ragcache_core.errors import RagCacheError
from ragcache_operator.kube.api import Api, ApiError, Conflict
from ragcache_operator.kube.resources import LEASES, Object

log = logging.getLogger(__name__)


class LeaseLost(RagCacheError):
    """The Lease could not be renewed in time. Another replica may lead: the process must exit."""


@dataclass(frozen=True, slots=True)
class LeaseTiming:
    """Intervals in seconds. The defaults are those of the Kubernetes controllers.

    Args:
        duration_s: How long candidates wait after the holder's last renewal; an integer.
        renew_deadline_s: How long the holder works without a successful renewal.
        retry_s: Time between two tries. Jitter makes it up to a fifth longer.
    """

    duration_s: int = 15
    renew_deadline_s: float = 10.0
    retry_s: float = 2.0

    def __post_init__(self) -> None:
        assert self.retry_s < self.renew_deadline_s < self.duration_s

    @property
    def stop_window_s(self) -> float:
        """How long the work may take to end after the holder lost the Lease."""
        return self.duration_s - self.renew_deadline_s


@dataclass(frozen=True, slots=True)
class LeaseClaim:
    """A Lease, and the replica that wants it. Every process needs a new ``identity``."""

    namespace: str
    name: str
    identity: str


@dataclass(frozen=True, slots=True)
class ObservedLease:
    """A candidate's last observation of the Lease.

    Args:
        holder: Identity of the holder. Empty if there is none.
        version: Resource version, which changes with every renewal. Empty if there is no Lease.
        since_s: When the candidate first saw this version, by its own clock.
    """

    holder: str
    duration_s: float
    version: str
    since_s: float


def observe_lease(
    before: ObservedLease | None, lease: Object | None, now_s: float
) -> ObservedLease:
    """Return the observation of the current Lease, given the observation before."""
    if lease is None:
        if before is None:
            return ObservedLease("", 0.0, "", now_s)
        # A deletion does not reach the holder, so it keeps the time that a renewal would give it.
        return before if not before.version else replace(before, version="", since_s=now_s)
    version = lease["metadata"]["resourceVersion"]
    if before is not None and before.version == version:
        return before
    spec = lease.get("spec") or {}
    duration_s = float(spec.get("leaseDurationSeconds") or 0)
    return ObservedLease(spec.get("holderIdentity") or "", duration_s, version, now_s)


def may_acquire(observed: ObservedLease, identity: str, now_s: float) -> bool:
    """Whether the Lease is released, already ours, or not renewed within its duration."""
    expired = now_s >= observed.since_s + observed.duration_s
    return observed.holder in ("", identity) or expired


def lease_spec(
    identity: str, lease: Object | None, timing: LeaseTiming, wall_time: datetime
) -> Object:
    """Return the spec of a Lease that ``identity`` acquires or renews.

    Args:
        wall_time: The time of the write. Only people read it.
    """
    before: Object = (lease or {}).get("spec") or {}
    now = wall_time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    if before.get("holderIdentity") == identity:
        return {**before, "leaseDurationSeconds": timing.duration_s, "renewTime": now}
    return {
        "holderIdentity": identity,
        "leaseDurationSeconds": timing.duration_s,
        "acquireTime": now,
        "renewTime": now,
        "leaseTransitions": int(before.get("leaseTransitions") or 0) + 1 if lease else 0,
    }


async def run_while_leading(
    api: Api,
    claim: LeaseClaim,
    run: Callable[[], Awaitable[None]],
    *,
    timing: LeaseTiming = LeaseTiming(),
    jitter: Callable[[], float] = random.random,
) -> None:
    """Acquire the Lease, run while it is held, release it. Return or raise as ``run`` does.

    A cancellation also cancels ``run``, and the Lease is held until ``run`` has ended.

    Args:
        jitter: Returns random numbers in [0, 1].

    Raises:
        LeaseLost: The Lease could not be renewed. ``run`` was cancelled and had
            ``timing.stop_window_s`` to end. The process must exit, because a ``run`` that ignores
            its cancellation would work at the same time as the next holder.
    """
    candidate = _Candidate(api, claim, timing, jitter)
    await candidate.acquire()
    work = asyncio.ensure_future(run())
    renewal = asyncio.create_task(candidate.renew_until_lost())
    try:
        await asyncio.wait((work, renewal), return_when=asyncio.FIRST_COMPLETED)
    finally:
        # Cancelled work takes time to end, and no other replica may lead until then.
        work.cancel()
        await asyncio.wait((work, renewal), return_when=asyncio.FIRST_COMPLETED)
        if renewal.done():
            log.error("%s", renewal.exception())
            await asyncio.wait((work,), timeout=timing.stop_window_s)
        else:
            renewal.cancel()
            await asyncio.wait((renewal,))
            await candidate.release()
    if not renewal.cancelled():
        await renewal
    await work


class _Candidate:
    def __init__(
        self, api: Api, claim: LeaseClaim, timing: LeaseTiming, jitter: Callable[[], float]
    ) -> None:
        self._api = api
        self._namespace, self._name = claim.namespace, claim.name
        self._identity = claim.identity
        self._timing = timing
        self._jitter = jitter
        self._observed: ObservedLease | None = None
        self._written: Object | None = None  # the Lease as this replica last wrote it
        self._renewed_s = 0.0  # when that write started

    async def acquire(self) -> None:
        """Return once this replica holds the Lease."""
        problem, holder = "", None
        while True:
            try:
                async with asyncio.timeout(self._timing.renew_deadline_s):
                    acquired = await self._try()
            except Conflict:
                # Another replica was faster.
                acquired = False
            except (ApiError, TimeoutError) as error:
                acquired, before, problem = False, problem, str(error) or "no answer in time"
                if problem != before:
                    log.warning("lease: read failed name=%s error=%s", self._name, problem)
            if acquired:
                log.info("lease: acquired name=%s identity=%s", self._name, self._identity)
                return
            if self._observed is not None and self._observed.holder != holder:
                holder = self._observed.holder
                log.info("lease: waiting name=%s holder=%s", self._name, holder or "none")
            await self._wait_retry()

    async def renew_until_lost(self) -> None:
        """Renew the Lease until renewal fails for the renew deadline, then raise LeaseLost."""
        while True:
            deadline_s = self._renewed_s + self._timing.renew_deadline_s
            problem = "no answer in time"
            try:
                async with asyncio.timeout_at(deadline_s):
                    while True:
                        await self._wait_retry()
                        try:
                            renewed = await self._try()
                        except ApiError as error:
                            problem = str(error)
                        else:
                            break
            except TimeoutError as error:
                raise LeaseLost(
                    f"lease {self._name} could not be renewed for "
                    f"{self._timing.renew_deadline_s:g} s: {problem}"
                ) from error
            if not renewed:
                assert self._observed is not None
                holder = self._observed.holder or "nothing"
                raise LeaseLost(f"lease {self._name} was taken by {holder}")

    async def release(self) -> None:
        """Release the Lease, so that the next candidate acquires it at once.

        A Lease that cannot be released expires after its duration.
        """
        try:
            async with asyncio.timeout(self._timing.stop_window_s):
                lease = await self._api.get(LEASES, self._name, self._namespace)
                if lease is None or lease["spec"].get("holderIdentity") != self._identity:
                    return
                lease["spec"]["holderIdentity"] = ""
                await self._api.replace(LEASES, lease)
        except (ApiError, TimeoutError) as error:
            reason = error or "no answer in time"
            log.warning("lease: release failed name=%s error=%s", self._name, reason)
        else:
            log.info("lease: released name=%s identity=%s", self._name, self._identity)

    async def _try(self) -> bool:
        """Acquire or renew the Lease. Return False if another replica holds it.

        Raises:
            Conflict: Another replica wrote the Lease at the same time.
            ApiError: A call failed. The next try reads the Lease again.
        """
        clock = asyncio.get_running_loop().time
        # The Lease that this replica wrote need not be read again, unless a call failed since.
        lease, self._written = self._written, None
        if lease is None:
            lease = await self._api.get(LEASES, self._name, self._namespace)
        self._observed = observe_lease(self._observed, lease, clock())
        began_s = clock()
        if not may_acquire(self._observed, self._identity, began_s):
            return False
        spec = lease_spec(self._identity, lease, self._timing, datetime.now(UTC))
        if lease is None:
            meta = {"name": self._name, "namespace": self._namespace}
            api_version, kind = LEASES.api_version, LEASES.kind
            new = {"apiVersion": api_version, "kind": kind, "metadata": meta, "spec": spec}
            written = await self._api.create(LEASES, new)
        else:
            written = await self._api.replace(LEASES, {**lease, "spec": spec})
        self._observed = observe_lease(self._observed, written, clock())
        self._written, self._renewed_s = written, began_s
        return True

    async def _wait_retry(self) -> None:
        await asyncio.sleep(self._timing.retry_s * (1 + 0.2 * self._jitter()))
