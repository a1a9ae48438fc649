"""One active replica: whoever holds a Lease works, the others wait.

Clocks of different machines are never compared. A contender notes by its own clock when it last
saw the Lease change, and takes it over once that is longer ago than the holder asked for; the
holder gives up, by its own clock, well before that. In between lies the time that its work may take
to end.
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
    """The Lease could not be renewed in time. Another replica may be at work: exit."""


@dataclass(frozen=True, slots=True)
class LeaseTiming:
    """Seconds. The defaults are those of Kubernetes' own controllers.

    duration_s: how long others wait for a holder that has fallen silent; whole, as the API has it.
    renew_deadline_s: how long the holder goes on without a renewal that succeeded.
    retry_s: between two looks at the Lease; jitter makes it up to a fifth longer.
    """

    duration_s: int = 15
    renew_deadline_s: float = 10.0
    retry_s: float = 2.0

    def __post_init__(self) -> None:
        assert self.retry_s < self.renew_deadline_s < self.duration_s

    @property
    def stop_window_s(self) -> float:
        """How long the work of a holder that lost the Lease may take to end."""
        return self.duration_s - self.renew_deadline_s


@dataclass(frozen=True, slots=True)
class ObservedLease:
    """What a contender knows of the Lease.

    holder: empty if nobody has it. version: changes with every renewal; empty if there is no Lease.
    since_s: when, by the contender's clock, it was first seen at this version.
    """

    holder: str
    duration_s: float
    version: str
    since_s: float


def observe_lease(
    before: ObservedLease | None, lease: Object | None, now_s: float
) -> ObservedLease:
    """Take note of the Lease as it is now."""
    if lease is None:
        if before is None:
            return ObservedLease("", 0.0, "", now_s)
        # Somebody deleted it, which tells its holder nothing: it has as long as after a renewal.
        return before if not before.version else replace(before, version="", since_s=now_s)
    version = lease["metadata"]["resourceVersion"]
    if before is not None and before.version == version:
        return before
    spec = lease.get("spec") or {}
    duration_s = float(spec.get("leaseDurationSeconds") or 0)
    return ObservedLease(spec.get("holderIdentity") or "", duration_s, version, now_s)


def may_acquire(seen: ObservedLease, identity: str, now_s: float) -> bool:
    """Whether the Lease is given up, was ours all along, or its holder has fallen silent."""
    return seen.holder in ("", identity) or now_s >= seen.since_s + seen.duration_s


def lease_spec(identity: str, lease: Object | None, timing: LeaseTiming, wall: datetime) -> Object:
    """Spec of a Lease that identity takes or renews at wall, a time that only people read."""
    before: Object = (lease or {}).get("spec") or {}
    at = wall.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    if before.get("holderIdentity") == identity:
        return {**before, "leaseDurationSeconds": timing.duration_s, "renewTime": at}
    return {
        "holderIdentity": identity,
        "leaseDurationSeconds": timing.duration_s,
        "acquireTime": at,
        "renewTime": at,
        "leaseTransitions": int(before.get("leaseTransitions") or 0) + 1 if lease else 0,
    }


async def run_while_leading(
    api: Api,
    namespace: str,
    name: str,
    identity: str,
    run: Callable[[], Awaitable[None]],
    *,
    timing: LeaseTiming = LeaseTiming(),
    jitter: Callable[[], float] = random.random,
) -> None:
    """Wait for the Lease, run while it is held, give it up; returns or raises as run does.

    identity: a new one for every process. jitter: random in [0, 1].

    When cancelled, run is cancelled too, and keeps the Lease until it has ended. Raises LeaseLost,
    after run is cancelled and has had timing.ending_s to end; the process must then exit, because
    a run that ignores its cancellation would work beside the next holder.
    """
    contender = _Candidate(api, namespace, name, identity, timing, jitter)
    await contender.take()
    work = asyncio.ensure_future(run())
    renewal = asyncio.create_task(contender.keep())
    try:
        await asyncio.wait((work, renewal), return_when=asyncio.FIRST_COMPLETED)
    finally:
        # Cancelled, the work goes on for as long as its end takes, and must be alone until then.
        work.cancel()
        await asyncio.wait((work, renewal), return_when=asyncio.FIRST_COMPLETED)
        if renewal.done():
            log.error("%s", renewal.exception())
            await asyncio.wait((work,), timeout=timing.stop_window_s)
        else:
            renewal.cancel()
            await asyncio.wait((renewal,))
            await contender.give_up()
    if not renewal.cancelled():
        await renewal
    await work


class _Candidate:
    def __init__(
        self,
        api: Api,
        namespace: str,
        name: str,
        identity: str,
        timing: LeaseTiming,
        jitter: Callable[[], float],
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._timing = timing
        self._jitter = jitter
        self._seen: ObservedLease | None = None
        self._held: Object | None = None  # the Lease as this replica last wrote it
        self._renewed_s = 0.0  # when that write was begun

    async def take(self) -> None:
        """Return once the Lease is held."""
        trouble, holder = "", None
        while True:
            try:
                async with asyncio.timeout(self._timing.renew_deadline_s):
                    taken = await self._try()
            except Conflict:
                # Somebody else was faster.
                taken = False
            except (ApiError, TimeoutError) as error:
                taken, before, trouble = False, trouble, str(error) or "no answer in time"
                if trouble != before:
                    log.warning("cannot look at lease %s: %s", self._name, trouble)
            if taken:
                log.info("%s holds lease %s", self._identity, self._name)
                return
            if self._seen is not None and self._seen.holder != holder:
                holder = self._seen.holder
                log.info("waiting for lease %s, held by %s", self._name, holder or "nobody")
            await self._pause()

    async def keep(self) -> None:
        """Renew until that fails for too long, then raise LeaseLost."""
        while True:
            deadline_s = self._renewed_s + self._timing.renew_deadline_s
            trouble = "no answer in time"
            try:
                async with asyncio.timeout_at(deadline_s):
                    while True:
                        await self._pause()
                        try:
                            renewed = await self._try()
                        except ApiError as error:
                            trouble = str(error)
                        else:
                            break
            except TimeoutError as error:
                raise LeaseLost(
                    f"lease {self._name} could not be renewed for "
                    f"{self._timing.renew_deadline_s:g} s: {trouble}"
                ) from error
            if not renewed:
                assert self._seen is not None
                raise LeaseLost(f"lease {self._name} was taken by {self._seen.holder or 'nobody'}")

    async def give_up(self) -> None:
        """Let the next one in at once; a Lease that cannot be given up runs out by itself."""
        try:
            async with asyncio.timeout(self._timing.stop_window_s):
                lease = await self._api.get(LEASES, self._name, self._namespace)
                if lease is None or lease["spec"].get("holderIdentity") != self._identity:
                    return
                lease["spec"]["holderIdentity"] = ""
                await self._api.replace(LEASES, lease)
        except (ApiError, TimeoutError) as error:
            log.warning("cannot give up lease %s: %s", self._name, error or "no answer in time")
        else:
            log.info("%s gave up lease %s", self._identity, self._name)

    async def _try(self) -> bool:
        """Take or renew the Lease if that may be; False if it may not.

        Raises Conflict when somebody wrote in between, ApiError; the next look tells more.
        """
        clock = asyncio.get_running_loop().time
        # What it wrote itself need not be read again; if anything went wrong since, it must be.
        lease, self._held = self._held, None
        if lease is None:
            lease = await self._api.get(LEASES, self._name, self._namespace)
        self._seen = observe_lease(self._seen, lease, clock())
        began_s = clock()
        if not may_acquire(self._seen, self._identity, began_s):
            return False
        spec = lease_spec(self._identity, lease, self._timing, datetime.now(UTC))
        if lease is None:
            meta = {"name": self._name, "namespace": self._namespace}
            api_version, kind = LEASES.api_version, LEASES.kind
            new = {"apiVersion": api_version, "kind": kind, "metadata": meta, "spec": spec}
            written = await self._api.create(LEASES, new)
        else:
            written = await self._api.replace(LEASES, {**lease, "spec": spec})
        self._seen = observe_lease(self._seen, written, clock())
        self._held, self._renewed_s = written, began_s
        return True

    async def _pause(self) -> None:
        await asyncio.sleep(self._timing.retry_s * (1 + 0.2 * self._jitter()))
