"""What the gateway records of an answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ragcache_core.planner.request_plan import ChunkAction, PlanReason
from ragcache_gateway.planning.source_follower import FeedState
from ragcache_gateway.telemetry.metrics import AnswerCost, Metrics
from ragcache_wire.telemetry.catalogue import gateway as rows

COST = AnswerCost(
    stages_ms={"queue": 20.0, "load": None},
    tokens_by_source={"loaded": 300, "blended": 0, "recomputed": 0, "local": 10, "computed": 90},
    loaded_bytes=4096,
    miss="",
    prompt_tokens=400,
    completion_tokens=5,
    first_token_s=1.0,
    total_s=3.0,
)
MODEL = {
    "gen_ai_operation_name": "chat",
    "gen_ai_provider_name": "ragcache",
    "gen_ai_request_model": "tiny",
}


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_an_answer_is_counted_by_source_stage_and_size() -> None:
    metrics = Metrics("tiny")
    metrics.observe_first_token(1.0, "team-a")
    metrics.observe_answer(COST, "team-a")
    assert value(metrics, "ragcache_gateway_prompt_tokens_total", source="loaded") == 300
    assert value(metrics, "ragcache_gateway_stage_seconds_sum", stage="queue") == 0.02
    assert value(metrics, "ragcache_gateway_stage_seconds_count", stage="load") == 0
    assert value(metrics, "ragcache_gateway_loaded_bytes_total") == 4096
    assert value(metrics, "gen_ai_server_time_to_first_token_seconds_sum", **MODEL) == 1
    assert value(metrics, "gen_ai_server_request_duration_seconds_sum", **MODEL) == 3
    # Two seconds for the four tokens after the first.
    assert value(metrics, "gen_ai_server_time_per_output_token_seconds_sum", **MODEL) == 0.5
    usage = {**MODEL, "gen_ai_token_type": "output"}
    assert value(metrics, "gen_ai_client_token_usage_sum", **usage) == 5


@pytest.mark.parametrize(
    ("miss", "tokens", "loaded"),
    [
        ("", {"loaded": 5}, "full"),
        ("evicted", {"blended": 5}, "partial"),
        ("evicted", {"computed": 5}, "none"),
        (None, {}, "unknown"),
    ],
)
def test_answers_are_told_apart_by_what_was_loaded(
    miss: str | None, tokens: dict[str, int], loaded: str
) -> None:
    metrics = Metrics("tiny")
    metrics.observe_answer(replace(COST, miss=miss, tokens_by_source=tokens), "team-a")
    labels = {"loaded": loaded, "miss": miss or ""}
    assert value(metrics, "ragcache_gateway_answers_total", **labels) == 1


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    metrics = Metrics("tiny")
    metrics.observe_answer(replace(COST, completion_tokens=1), "team-a")
    assert value(metrics, "gen_ai_server_time_per_output_token_seconds_count", **MODEL) == 0


def test_an_engine_that_left_leaves_no_series() -> None:
    metrics = Metrics("tiny")
    metrics.engine_in_flight.labels("10.0.0.1:8000").set(1)
    metrics.engine_failures.labels("10.0.0.1:8000").inc()
    metrics.remove_engine("10.0.0.1:8000")
    name = "ragcache_gateway_engine_requests_in_flight"
    assert value(metrics, name, engine="10.0.0.1:8000") is None


def test_a_measured_time_is_compared_with_the_predicted_one() -> None:
    metrics = Metrics("tiny")
    metrics.observe_prediction(0.5, 1.0)
    metrics.observe_prediction(0.0, 1.0)  # nothing was predicted
    assert value(metrics, "ragcache_gateway_prediction_ratio_sum") == 2
    assert value(metrics, "ragcache_gateway_prediction_ratio_count") == 1


def test_sources_of_the_cache_view_are_counted_by_their_state_now() -> None:
    metrics = Metrics("tiny")
    name = "ragcache_gateway_sources"
    metrics.set_sources({("engine", "synchronized"): 2, ("store", "silent"): 1})
    assert value(metrics, name, kind="engine", state="synchronized") == 2
    metrics.set_sources({("store", "synchronized"): 1})
    assert value(metrics, name, kind="store", state="silent") == 0
    assert value(metrics, name, kind="store", state="synchronized") == 1
    assert value(metrics, name, kind="engine", state="synchronized") == 0


def test_every_state_of_a_source_has_a_series() -> None:
    states = {state for _, state in rows.SOURCES.known_series()}
    assert states == {state.value for state in FeedState} | {"predicted"}


def test_every_decision_about_a_chunk_has_a_series() -> None:
    actions, reasons = zip(*rows.PLANNED_CHUNKS.known_series(), strict=True)
    assert set(actions) == {action.value for action in ChunkAction}
    assert set(reasons) == {reason.value for reason in PlanReason}
