"""What the span of a plan says: how many plans were compared, and what was chosen."""

from __future__ import annotations

from collections import Counter

from ragcache_core.planner.request_plan import PlanSeconds, RequestPlan
from ragcache_gateway.planning.cache_view import engine_address
from ragcache_wire.tracing import Span


def describe_plan(span: Span, plan: RequestPlan) -> None:
    """Set the attributes of a plan's span, and an event for the next best plan."""
    if not span.is_recording:
        return
    chunks = Counter(f"{decision.action.value}_chunks" for decision in plan.decisions)
    span.set(
        considered=plan.num_considered,
        engine=engine_address(plan.source),
        reordered=plan.is_reordered,
        **chunks,
        **_predicted(plan.seconds),
    )
    if (other := plan.runner_up) is not None:
        engine = engine_address(other.source)
        span.event("next best", engine=engine, reuse=other.reuse, **_predicted(other.seconds))


def _predicted(seconds: PlanSeconds | None) -> dict[str, float]:
    if seconds is None:
        return {}
    return {
        "queue_s": seconds.queue_s,
        "load_s": seconds.load_s,
        "recompute_s": seconds.recompute_s,
        "prefill_s": seconds.prefill_s,
    }
