"""All refused plans are counted, and few are logged."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.errors import InvalidInput
from ragcache_engine.scheduler.request_intake import LOG_INTERVAL_S, RefusalReason, RefusedPlans

reasons = st.sampled_from(RefusalReason)


@given(st.lists(st.lists(reasons)))
def test_each_refused_plan_is_counted_once(batches: list[list[RefusalReason]]) -> None:
    refused = RefusedPlans(lambda: 0.0)
    for batch in batches:
        for why in batch:
            refused.add("r", why)
        counts = refused.take()
        assert counts.total() == len(batch)
        assert all(counts[why.value] == batch.count(why) for why in RefusalReason)


@given(st.lists(st.floats(0, 5), min_size=1, max_size=50))
def test_many_refused_plans_make_few_log_lines(steps_s: list[float]) -> None:
    now_s = 0.0
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.ragcache")
    logger.addHandler(handler)
    try:
        refused = RefusedPlans(lambda: now_s)
        for step_s in steps_s:
            now_s += step_s
            refused.add("r", RefusalReason.FORGED)
    finally:
        logger.removeHandler(handler)
    assert 1 <= len(lines) <= 1 + sum(steps_s) / LOG_INTERVAL_S


def test_a_log_line_has_the_reason_and_the_number_of_unlogged_plans(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 0.0
    refused = RefusedPlans(lambda: now_s)
    with caplog.at_level(logging.WARNING, "vllm.ragcache"):
        refused.add("one", RefusalReason.INVALID, InvalidInput("ragcache.v", "is 2", "send 1"))
        refused.add("two", RefusalReason.UNSIGNED)
        refused.add("three", RefusalReason.UNSIGNED)
        now_s = LOG_INTERVAL_S
        refused.add("four", RefusalReason.FORGED)
        now_s *= 2
        refused.add(
            "five", RefusalReason.INVALID, InvalidInput("ragcache.v", "x" * 10_000, "send 1")
        )
    *short, long = caplog.messages
    assert len(long) < 400
    assert short == [
        "scheduler: plan refused request=one reason=invalid error=ragcache.v: is 2; send 1",
        "scheduler: plan refused request=four reason=forged since_last_line=2",
    ]
