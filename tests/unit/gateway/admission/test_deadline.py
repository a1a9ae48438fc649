"""What runs for a request ends when its deadline has passed."""

from __future__ import annotations

import asyncio

import pytest

from ragcache_core.scheduling.admission import RefusalCode
from ragcache_gateway.admission.deadline import within_deadline
from ragcache_gateway.admission.refusal import Refused
from ragcache_gateway.admission.slo import Arrival
from tests.kit.clock import elapse, now, simulate


def arrival(deadline_s: float | None) -> Arrival:
    return Arrival(now, deadline_s)


def test_a_deadline_ends_the_work_and_says_so() -> None:
    async def story() -> None:
        await elapse(2.0)
        has_ended = False

        async def work() -> None:
            nonlocal has_ended
            async with within_deadline(arrival(5.0)):
                try:
                    await elapse(1000.0)
                finally:
                    has_ended = True

        with pytest.raises(Refused) as refused:
            await work()
        assert has_ended
        assert now() == pytest.approx(5.0), "the time before it began counts"
        assert refused.value.reason is RefusalCode.DEADLINE_PASSED
        assert refused.value.status == 504

    simulate(story())


def test_work_in_time_goes_on_after_it() -> None:
    async def story() -> None:
        async with within_deadline(arrival(5.0)):
            await elapse(1.0)
        await elapse(100.0)
        async with within_deadline(arrival(None)):
            await elapse(100.0)

    simulate(story())


def test_a_timeout_of_the_work_itself_is_no_deadline() -> None:
    async def story() -> None:
        with pytest.raises(TimeoutError):
            async with within_deadline(arrival(5.0)), asyncio.timeout(1.0):
                await elapse(100.0)

    simulate(story())
