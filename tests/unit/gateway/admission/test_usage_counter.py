"""Counts of several gateways: none is lost or added twice when calls fail."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_core.access.caller import Caller, TenantRules
from ragcache_core.access.quota import read_quota
from ragcache_core.access.usage import NOTHING_USED, Period, UsageCounts
from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_gateway.admission import usage_counter
from ragcache_gateway.admission.tenant_queue import TenantQueue
from ragcache_gateway.admission.usage_counter import Owner, UsageCounter
from ragcache_retriever.messages.usage import counted_of, sender_of, total_message
from ragcache_retriever.store.usage import UsageTable
from ragcache_wire.v1 import retriever_pb2 as pb
from tests.kit.memory_database import MemoryDatabase

NOW_S = 1_700_000_040
QUOTA = read_quota("quota", {"tokens_per_day": 100})
APP = Caller("app", "red", quota=QUOTA, rules=TenantRules(quota=QUOTA))
OTHER = Caller("other", "red", rules=TenantRules(quota=QUOTA))
KEY, TENANT = Owner("key", "app"), Owner("tenant", "red")
ONE = UsageCounts(requests=1, computed_tokens=10)


@dataclass
class Retriever:
    """Adds usage to a real table. Its calls can fail before and after that."""

    table: UsageTable = field(default_factory=lambda: UsageTable(MemoryDatabase()))
    fails: str = ""  # "before", "after" or "always refuses"
    requests: list[pb.AddUsageRequest] = field(default_factory=list)

    async def add_usage(self, request: pb.AddUsageRequest) -> pb.AddUsageReply:
        self.requests.append(request)
        if self.fails == "before":
            raise Unavailable("retriever", "it is down")
        if self.fails == "refuses":
            raise InvalidInput("deltas", "are wrong", "fix")
        self.table.add(sender_of(request), counted_of(request), 1000 * NOW_S)
        if self.fails == "after":
            raise Unavailable("retriever", "its reply is lost")
        totals = [
            total_message(owner, one)
            for owner, names in (("key", request.keys), ("tenant", request.tenants))
            for one in self.table.totals(owner, names, request.now_unix_s)
        ]
        waiting = self.table.waiting(request.gateway, 1000 * NOW_S)
        return pb.AddUsageReply(totals=totals, waiting=waiting)

    def stored(self, owner: Owner, period: Period) -> UsageCounts:
        totals = self.table.totals(owner.kind, [owner.name], NOW_S)
        return next((one.counts for one in totals if one.period is period), NOTHING_USED)


@dataclass
class Clock:
    now_s: float = NOW_S

    def __call__(self) -> float:
        return self.now_s


def counter(retriever: Any, clock: Clock | None = None) -> UsageCounter:
    made = UsageCounter(clock or Clock())
    made._retriever = retriever
    return made


async def test_gateways_learn_what_waits_at_the_others() -> None:
    retriever, queues = Retriever(), []
    gateways = [counter(retriever), counter(retriever)]
    weights: dict[str | None, float] = {"red": 1.0, "blue": 1.0}
    for gateway in gateways:
        gateway._queue = TenantQueue(lambda: weights, lambda: 0.0)
        queues.append(gateway._queue)
    with queues[0].waiting(APP, 6.0):
        await gateways[0]._send()
        assert not gateways[1]._asked
        gateways[1].used(KEY, Period.DAY)
        await gateways[1]._send()
        with queues[1].waiting(APP, 2.0) as position:
            assert position.tenant_delay_ms == 4000
    # The end of the wait is news, too.
    await gateways[0]._send()
    sent = len(retriever.requests)
    await gateways[0]._send()
    assert len(retriever.requests) == sent
    assert retriever.table.waiting(gateways[1]._gateway, 1000 * NOW_S) == []


async def send(one: UsageCounter) -> None:
    with suppress(Unavailable):
        await one._send()


ACTIONS = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from(["app", "other", "before", "after", ""])),
    max_size=30,
)


@given(ACTIONS)
@settings(max_examples=60)
def test_totals_are_what_all_gateways_have_counted(actions: list[tuple[int, str]]) -> None:
    async def run() -> None:
        retriever = Retriever()
        gateways = [counter(retriever), counter(retriever)]
        added = {KEY: NOTHING_USED, TENANT: NOTHING_USED}
        own = [NOTHING_USED, NOTHING_USED]
        for number, action in actions:
            gateway = gateways[number]
            if action in ("app", "other"):
                gateway.add(APP if action == "app" else OTHER, "m", ONE)
                added[TENANT] += ONE
                own[number] += ONE
                if action == "app":
                    added[KEY] += ONE
            else:
                retriever.fails = action
                await send(gateway)
            for one, counted in zip(gateways, own, strict=True):
                # A gateway never knows less than its own counts, nor more than all of them.
                known = one.used(TENANT, Period.DAY).requests
                assert counted.requests <= known <= added[TENANT].requests
        retriever.fails = ""
        for _ in range(2):
            for gateway in gateways:
                gateway.used(KEY, Period.DAY)
                gateway.used(TENANT, Period.DAY)
                await send(gateway)
                await send(gateway)
        for owner, counts in added.items():
            for period in Period:
                assert retriever.stored(owner, period) == counts
                assert [one.used(owner, period) for one in gateways] == [counts, counts]

    asyncio.run(run())


async def test_a_gateway_without_news_sends_nothing() -> None:
    retriever = Retriever()
    one = counter(retriever)
    await one._send()
    assert retriever.requests == []
    one.add(APP, "m", ONE)
    await one._send()
    await one._send()
    assert len(retriever.requests) == 1


async def test_a_new_window_begins_with_nothing() -> None:
    clock, retriever = Clock(), Retriever()
    one = counter(retriever, clock)
    one.add(APP, "m", ONE)
    assert one.used(KEY, Period.MINUTE) == ONE
    await one._send()
    assert one.used(KEY, Period.MINUTE) == ONE
    clock.now_s += 60
    assert one.used(KEY, Period.MINUTE) == NOTHING_USED
    assert one.used(KEY, Period.DAY) == ONE


async def test_an_outage_takes_no_memory_for_each_minute() -> None:
    clock, retriever = Clock(), Retriever(fails="before")
    one = counter(retriever, clock)
    for _ in range(100):
        one.add(APP, "m", ONE)
        clock.now_s += 60
        await send(one)
    retriever.fails = ""
    await send(one)
    await send(one)
    assert sum(len(request.deltas) for request in retriever.requests[-2:]) <= 3
    assert retriever.stored(KEY, Period.DAY).requests == 100


async def test_many_counts_are_sent_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_counter, "MAX_SENT", 2)
    retriever = Retriever()
    one = counter(retriever)
    for model in "abcde":
        one.add(APP, model, ONE)
    await one.close()
    assert [len(request.deltas) for request in retriever.requests] == [2, 2, 1]
    assert retriever.stored(KEY, Period.DAY).requests == 5


async def test_counts_that_are_refused_are_not_repeated_for_ever() -> None:
    retriever = Retriever(fails="refuses")
    one = counter(retriever)
    one.add(APP, "m", ONE)
    await one._send()
    retriever.fails = ""
    one.add(APP, "m", ONE)
    await one._send()
    assert retriever.stored(KEY, Period.DAY) == ONE
