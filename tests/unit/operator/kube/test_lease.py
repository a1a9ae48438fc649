"""Leader election: never two leaders at once, and one leader again after network failures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_operator.kube.api import Api, ApiError, Conflict
from ragcache_operator.kube.lease import (
    LeaseClaim,
    LeaseLost,
    LeaseTiming,
    ObservedLease,
    lease_spec,
    may_acquire,
    observe_lease,
    run_while_leading,
)
from ragcache_operator.kube.resources import Object, Resource
from tests.kit.clock import elapse, now, simulate

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
TIMING = LeaseTiming()


def lease(holder: str, version: str = "1", duration_s: int = 15) -> Object:
    return {
        "metadata": {"name": "lease", "namespace": "ns", "resourceVersion": version},
        "spec": {"holderIdentity": holder, "leaseDurationSeconds": duration_s},
    }


@pytest.mark.parametrize(
    ("seen", "who", "may_from_s"),
    [
        pytest.param([(None, 0)], "a", 0, id="a missing lease"),
        pytest.param([({"metadata": {"resourceVersion": "1"}}, 0)], "a", 0, id="an empty lease"),
        pytest.param([(lease("b"), 0), (lease("", "2"), 1)], "a", 1, id="a released lease"),
        pytest.param([(lease("a"), 0)], "a", 0, id="its own lease"),
        # renewTime does not count, because it is another machine's clock.
        pytest.param([(lease("b"), 100)], "a", 115, id="a new holder has its full duration"),
        pytest.param([(lease("b"), 0), (lease("b", "2"), 14)], "a", 29, id="a renewal restarts"),
        pytest.param([(lease("b"), 0), (lease("b"), 14)], "a", 15, id="a repetition does not"),
        pytest.param([(lease("b", duration_s=60), 0)], "a", 60, id="the holder sets the duration"),
        pytest.param([(lease("b"), 0), (None, 1), (None, 10)], "a", 16, id="a deletion is no end"),
        pytest.param([(lease("b"), 0), (None, 1)], "b", 1, id="a deletion, for its holder"),
    ],
)
def test_a_lease_may_be_acquired_from_a_time_on(
    seen: list[tuple[Object | None, float]], who: str, may_from_s: float
) -> None:
    observed: ObservedLease | None = None
    for found, at_s in seen:
        observed = observe_lease(observed, found, at_s)
    assert observed is not None
    assert may_acquire(observed, who, may_from_s)
    if observed.holder not in ("", who):
        assert not may_acquire(observed, who, may_from_s - 0.1)


def test_a_takeover_is_counted_and_a_renewal_is_not() -> None:
    first = lease_spec("a", None, TIMING, NOON)
    assert first["leaseTransitions"] == 0
    assert first["acquireTime"] == first["renewTime"] == "2030-01-01T12:00:00.000000Z"
    renewed = lease_spec("a", {"spec": first}, TIMING, NOON.replace(hour=13))
    assert renewed["leaseTransitions"] == 0
    assert (renewed["acquireTime"], renewed["renewTime"]) == (
        "2030-01-01T12:00:00.000000Z",
        "2030-01-01T13:00:00.000000Z",
    )
    assert lease_spec("b", {"spec": renewed}, TIMING, NOON)["leaseTransitions"] == 1


@given(
    durations=st.integers(1, 60),
    times_s=st.lists(st.floats(0, 100), min_size=1, max_size=20).map(sorted),
)
def test_a_lease_cannot_be_acquired_within_its_duration(
    durations: int, times_s: list[float]
) -> None:
    seen: ObservedLease | None = None
    for version, now_s in enumerate(times_s):
        seen = observe_lease(seen, lease("b", str(version), durations), now_s)
        assert not may_acquire(seen, "a", now_s + durations - 0.01)


@dataclass
class LeaseStore:
    """A fake API server with one object, which rejects a write with an old resource version."""

    lease: Object | None = None
    version: int = 0
    written: asyncio.Event = field(default_factory=asyncio.Event)

    def get(self) -> Object | None:
        return None if self.lease is None else _copy(self.lease)

    def create(self, obj: Object) -> Object:
        if self.lease is not None:
            raise Conflict(409, "AlreadyExists", "exists")
        return self._put(obj)

    def replace(self, obj: Object) -> Object:
        if self.lease is None:
            raise ApiError(404, "NotFound", "gone")
        if obj["metadata"]["resourceVersion"] != str(self.version):
            raise Conflict(409, "Conflict", "moved on")
        return self._put(obj)

    def _put(self, obj: Object) -> Object:
        self.version += 1
        self.written.set()
        meta = {**obj["metadata"], "resourceVersion": str(self.version)}
        self.lease = _copy({**obj, "metadata": meta})
        return _copy(self.lease)


def _copy(obj: Object) -> Object:
    return {key: dict(value) if isinstance(value, dict) else value for key, value in obj.items()}


@dataclass
class Link:
    """The connection of a candidate to the store: slow, lossy both ways, sometimes cut."""

    store: LeaseStore
    random: Random
    slowest_s: float = 0.0
    lossy: float = 0.0
    cut: bool = False
    reply_s: float = 0.0

    async def get(self, _: Resource, name: str, namespace: str) -> Object | None:
        return cast(Object | None, await self._over(self.store.get))

    async def create(self, _: Resource, obj: Object) -> Object:
        return cast(Object, await self._over(lambda: self.store.create(_copy(obj))))

    async def replace(self, _: Resource, obj: Object) -> Object:
        sent = _copy(obj)
        return cast(Object, await self._over(lambda: self.store.replace(sent)))

    async def _over(self, act: Callable[[], Any]) -> Any:
        await self._half()
        done = act()
        await elapse(self.reply_s)
        await self._half()
        return done

    async def _half(self) -> None:
        await elapse(self.random.uniform(0, self.slowest_s / 2))
        if self.cut:
            await elapse(30)
            raise ApiError(0, "NoAnswer", "cut")
        if self.random.random() < self.lossy:
            raise ApiError(0, "NoAnswer", "lost")


@dataclass
class WorkLog:
    """Records which replica works when."""

    at_work: set[str] = field(default_factory=set)
    shifts: list[tuple[float, str]] = field(default_factory=list)

    def work(self, who: str, stop_window_s: float = 0.0) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            assert not self.at_work, f"{who} and {self.at_work} at {now()}"
            self.at_work.add(who)
            self.shifts.append((now(), who))
            try:
                await asyncio.Event().wait()
            finally:
                await elapse(stop_window_s)
                self.at_work.remove(who)

        return run


async def contend(
    link: Link, who: str, run: Callable[[], Awaitable[None]], timing: LeaseTiming = TIMING
) -> None:
    await run_while_leading(
        cast(Api, link),
        LeaseClaim("ns", "lease", who),
        run,
        timing=timing,
        jitter=link.random.random,
    )


async def run_pod(link: Link, pod: str, work_log: WorkLog) -> None:
    """A pod: after it loses the Lease it exits and restarts with another identity."""
    while True:
        who = f"{pod}.{link.random.random()}"
        run = work_log.work(who, stop_window_s=link.random.uniform(0, TIMING.stop_window_s * 0.9))
        try:
            await contend(link, who, run)
        except LeaseLost:
            await elapse(1)


def test_the_second_takes_over_at_once_when_the_first_stops_cleanly() -> None:
    async def story() -> None:
        store, work_log = LeaseStore(), WorkLog()
        first = asyncio.create_task(
            contend(Link(store, Random(1)), "a", work_log.work("a", stop_window_s=8.0))
        )
        await elapse(1)
        second = asyncio.create_task(contend(Link(store, Random(2)), "b", work_log.work("b")))
        await elapse(60)
        assert work_log.at_work == {"a"}
        first.cancel()
        # The time that the first takes to end, and one retry of the second.
        await elapse(8.0 + 2.4)
        assert work_log.at_work == {"b"}
        second.cancel()
        await asyncio.wait((first, second))
        assert store.lease is not None
        assert store.lease["spec"]["holderIdentity"] == ""

    simulate(story())


def test_a_disconnected_holder_stops_before_another_starts() -> None:
    async def story() -> None:
        store, work_log = LeaseStore(), WorkLog()
        links = [Link(store, Random(seed)) for seed in range(3)]
        tasks = [
            asyncio.create_task(contend(link, f"{n}", work_log.work(f"{n}", stop_window_s=2.0)))
            for n, link in enumerate(links)
        ]
        await elapse(30)
        (holder,) = work_log.at_work
        links[int(holder)].cut = True
        # It stops after the deadline and its own end, and the next starts after the duration.
        await elapse(10 + 2)
        assert work_log.at_work == set()
        with pytest.raises(LeaseLost, match="could not be renewed for 10 s"):
            await tasks[int(holder)]
        await elapse(15 + 2.4 - 12 + 2.4)
        assert len(work_log.at_work) == 1
        assert work_log.at_work != {holder}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    simulate(story())


def test_the_deadline_counts_from_the_start_of_a_renewal() -> None:
    async def story() -> None:
        store, work_log = LeaseStore(), WorkLog()
        slow = Link(store, Random(1), reply_s=4.0)
        first = asyncio.create_task(contend(slow, "a", work_log.work("a", stop_window_s=4.0)))
        await elapse(10)
        eager = LeaseTiming(retry_s=0.1)
        second = asyncio.create_task(
            contend(Link(store, Random(2)), "b", work_log.work("b"), timing=eager)
        )
        assert work_log.at_work == {"a"}
        store.written.clear()
        await store.written.wait()
        # The server has renewed now. The others count from here, and so must the holder.
        await elapse(slow.reply_s)
        slow.cut = True
        await elapse(30)
        assert [who for _, who in work_log.shifts] == ["a", "b"]
        second.cancel()
        await asyncio.wait((first, second))
        assert second.cancelled()
        assert isinstance(first.exception(), LeaseLost)

    simulate(story())


def test_work_that_ignores_its_cancellation_does_not_delay_the_error() -> None:
    async def story() -> None:
        link = Link(LeaseStore(), Random(1))
        stubborn = asyncio.Event()

        async def run() -> None:
            while not stubborn.is_set():
                try:
                    await stubborn.wait()
                except asyncio.CancelledError:
                    continue

        leading = asyncio.create_task(contend(link, "a", run))
        await elapse(1)
        link.cut = True
        began_s = now()
        with pytest.raises(LeaseLost):
            await leading
        assert now() - began_s <= TIMING.duration_s
        stubborn.set()
        await elapse(0)

    simulate(story())


def test_the_end_and_the_failure_of_the_work_are_passed_on() -> None:
    async def story() -> None:
        store = LeaseStore()

        async def done() -> None:
            await elapse(1)

        async def failing() -> None:
            raise RuntimeError("broken")

        await contend(Link(store, Random(1)), "a", done)
        with pytest.raises(RuntimeError, match="broken"):
            await contend(Link(store, Random(1)), "b", failing)
        assert store.lease is not None
        assert store.lease["spec"]["holderIdentity"] == ""

    simulate(story())


def test_a_deleted_lease_changes_nothing_for_its_holder() -> None:
    async def story() -> None:
        store, work_log = LeaseStore(), WorkLog()
        tasks = [
            asyncio.create_task(contend(Link(store, Random(n)), who, work_log.work(who)))
            for n, who in enumerate("abc")
        ]
        await elapse(30)
        before = set(work_log.at_work)
        store.lease = None
        await elapse(60)
        assert work_log.at_work == before
        assert len(work_log.shifts) == 1
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    simulate(story())


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    contenders=st.integers(2, 4),
    slowest_s=st.sampled_from([0.0, 0.5, 3.0, 12.0]),
    lossy=st.sampled_from([0.0, 0.1, 0.4]),
)
def test_never_two_leaders_and_one_leader_after_the_network_recovers(
    seed: int, contenders: int, slowest_s: float, lossy: float
) -> None:
    async def story() -> None:
        random, store, work_log = Random(seed), LeaseStore(), WorkLog()
        links = [
            Link(store, Random(random.random()), slowest_s=slowest_s, lossy=lossy)
            for _ in range(contenders)
        ]

        def start(n: int) -> asyncio.Task[None]:
            return asyncio.create_task(run_pod(links[n], f"{n}", work_log))

        tasks = [start(n) for n in range(contenders)]
        for _ in range(30):
            await elapse(random.uniform(0, 30))
            n = random.randrange(contenders)
            match random.choice(["cut", "restore", "stop"]):
                case "cut":
                    links[n].cut = True
                case "restore":
                    links[n].cut = False
                case "stop":
                    tasks[n].cancel()
                    await asyncio.wait((tasks[n],))
                    assert tasks[n].cancelled(), tasks[n].exception()
                    tasks[n] = start(n)
        for link in links:
            link.cut, link.lossy, link.slowest_s = False, 0.0, 0.1
        # A hanging call, a Lease that expires twice, and retries.
        await elapse(30 + 2 * (15 + 5))
        assert len(work_log.at_work) == 1
        for task in tasks:
            assert not task.done(), task.exception()
            task.cancel()
        await asyncio.wait(tasks)

    simulate(story())
