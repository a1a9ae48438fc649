"""Delays of tenants with many waiting requests."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from ragcache_core.access.caller import Caller, TenantRules
from ragcache_core.scheduling.priority import QueuePosition
from ragcache_gateway.admission.tenant_queue import TenantQueue

RED, BLUE = Caller("a", "red"), Caller("b", "blue", rules=TenantRules(3.0))
WEIGHTS: dict[str | None, float] = {"red": 1.0, "blue": 3.0}


def queue(weights: dict[str | None, float] | None = None) -> TenantQueue:
    return TenantQueue(lambda: WEIGHTS if weights is None else weights, lambda: 100.0)


def test_a_request_is_behind_those_of_its_tenant() -> None:
    tenants = queue()
    with tenants.waiting(RED, 2.0) as first, tenants.waiting(RED, 2.0) as second:
        assert (first.tenant_delay_ms, second.tenant_delay_ms) == (2000, 4000)
        with tenants.waiting(BLUE, 3.0) as other:
            assert other.tenant_delay_ms == 4000
            assert other.tenant_excess == 1.0, "it has less than its share"
            with tenants.waiting(RED, 1.0) as third:
                assert third.tenant_delay_ms == 20_000
                # Five of eight seconds wait for a quarter of the engines.
                assert third.tenant_excess == 2.5
    # Four requests were done at once, as far as the clock tells.
    with tenants.waiting(RED, 2.0) as later:
        assert later.tenant_delay_ms < 1000


@pytest.mark.parametrize("weights", [{}, {None: 1.0}, {"red": 2.0}])
def test_one_tenant_alone_is_not_delayed(weights: dict[str | None, float]) -> None:
    tenants = queue(weights)
    with ExitStack() as stack:
        found = [stack.enter_context(tenants.waiting(RED, 5.0)) for _ in range(3)]
        assert found == [QueuePosition(RED.priority, tenant=RED.tenant)] * 3


def test_a_failed_request_leaves_the_queue() -> None:
    tenants = queue()
    with pytest.raises(ValueError, match="lost"), tenants.waiting(RED, 2.0):
        raise ValueError("lost")
    with tenants.waiting(RED, 2.0) as position:
        assert position.tenant_delay_ms == 2000


def test_priorities_do_not_delay_each_other() -> None:
    tenants = queue()
    with tenants.waiting(RED, 2.0), tenants.waiting(Caller("c", "red", priority=5), 1.0) as other:
        assert other.tenant_delay_ms == 1000


def test_gateways_delay_a_tenant_together() -> None:
    first, second = queue(), queue()
    with first.waiting(RED, 6.0), first.waiting(Caller("d"), 1.0):
        second.learn([first.load(), b"of another release"])
        with second.waiting(RED, 2.0) as position:
            # Half of two seconds in each second is red's, and 8 seconds of it wait.
            assert position.tenant_delay_ms == 8000
    second.learn([first.load()])
    with second.waiting(RED, 2.0) as position:
        assert position.tenant_delay_ms < 2000
    assert first.load() == b""
