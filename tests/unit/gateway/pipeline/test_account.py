"""What the chunks of an answer add to the metrics, and what an explanation says of its search."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.planner.request_plan import ChunkAction, ChunkDecision, PlanReason
from ragcache_gateway.explain.explanation import AnsweredPrompt, PromptPart, explain
from ragcache_gateway.explain.schema import ExplainedPlan, ExplainedPosition, Outcome
from ragcache_gateway.pipeline.account import explain_prefill, observe_chunks
from ragcache_gateway.speculation.speculative_search import EndedPrefill
from ragcache_gateway.telemetry.metrics import Metrics
from ragcache_wire.v1 import engine_pb2 as pb

PLAN = ExplainedPlan(
    engine="10.0.0.1:8000",
    order=[0],
    predicted_ms=None,
    next_best=None,
    position=ExplainedPosition(band=0, cached_share=0.0, delay_ms=0, window_ms=0),
)
OUTCOMES: tuple[Outcome, ...] = ("cached", "loaded", "blended", "computed", "unknown")


def answered(
    parts: tuple[PromptPart, ...],
    record: pb.RequestRecord | None,
    *,
    prefills: tuple[EndedPrefill, ...] = (),
) -> AnsweredPrompt:
    return AnsweredPrompt(
        id="chatcmpl-1",
        created=7,
        model="tiny",
        engine="10.0.0.1:8000",
        tenant=None,
        mode="blend",
        parts=parts,
        plan=PLAN,
        record=record,
        prefills=tuple(explain_prefill(prefill, 100.0) for prefill in prefills),
    )


def chunk(start: int, planned: ChunkAction | None = None, why: str = "") -> PromptPart:
    decision = ChunkDecision(b"", 20, planned, PlanReason(why)) if planned else None
    return PromptPart(start, start + 20, f"doc#{start}", "doc", "Doc", 0, decision)


def test_chunks_are_counted_by_outcome_reason_and_plan() -> None:
    metrics = Metrics("tiny")

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"ragcache_gateway_{name}_total", labels)

    source = pb.LoadSource(tier="disk", num_bytes=900, base_position=40, fix_overhead=0.5)
    record = pb.RequestRecord(
        miss="evicted",
        segments=[
            pb.SegmentRecord(start=0, end=10, reason="evicted"),
            pb.SegmentRecord(start=10, end=30, loaded_tokens=20, source=source, blended=True),
            pb.SegmentRecord(start=30, end=50, reason="evicted"),
            pb.SegmentRecord(start=50, end=70, reason="evicted"),
            pb.SegmentRecord(start=70, end=90, cached_tokens=20),
        ],
    )
    parts = (
        PromptPart(0, 10),
        chunk(10, ChunkAction.BLEND, "other_prefix"),
        chunk(30, ChunkAction.LOAD, "stored"),
        chunk(50, ChunkAction.LOAD, "stored"),
        chunk(70),
        PromptPart(90, 95),
    )
    observe_chunks(answered(parts, record), metrics)
    assert value("chunks", outcome="blended", tier="disk") == 1
    assert value("chunks", outcome="computed", tier="") == 2, "the template is no chunk"
    assert value("chunks", outcome="cached", tier="") == 1
    assert value("chunk_misses", reason="evicted") == 2
    assert value("planned_chunks", action="blend", reason="other_prefix") == 1
    assert value("planned_chunks", action="load", reason="stored") == 2
    assert value("planned_chunks", action="compute", reason="not_stored") == 0


@st.composite
def records(draw: st.DrawFn) -> tuple[tuple[PromptPart, ...], pb.RequestRecord | None]:
    """Draw a prompt of chunks, and a record that covers some of them."""
    parts = tuple(chunk(20 * n) for n in range(draw(st.integers(0, 8))))
    if draw(st.booleans()):
        return parts, None
    segments = []
    for part in parts:
        if draw(st.booleans()):
            cached = draw(st.integers(0, 20))
            loaded = draw(st.integers(0, 20 - cached))
            segment = pb.SegmentRecord(
                start=part.start,
                end=part.end,
                cached_tokens=cached,
                loaded_tokens=loaded,
                blended=draw(st.booleans()),
                reason="" if cached + loaded == 20 else "evicted",
                source=pb.LoadSource(tier="memory") if loaded else None,
            )
            segments.append(segment)
    local_tokens = draw(st.integers(0, 200))
    return parts, pb.RequestRecord(miss="off", local_tokens=local_tokens, segments=segments)


@given(records())
def test_metrics_count_what_the_explanation_says(
    drawn: tuple[tuple[PromptPart, ...], pb.RequestRecord | None],
) -> None:
    metrics = Metrics("tiny")
    one = answered(*drawn)
    observe_chunks(one, metrics)
    explained = explain(one).parts
    for outcome in OUTCOMES:
        for tier in (None, "memory"):
            of_series = [part for part in explained if (part.outcome, part.tier) == (outcome, tier)]
            labels = {"outcome": outcome, "tier": tier or ""}
            counted = metrics.registry.get_sample_value("ragcache_gateway_chunks_total", labels)
            assert (counted or 0) == len(of_series)
    for reason in ("evicted", "off"):
        counted = metrics.registry.get_sample_value(
            "ragcache_gateway_chunk_misses_total", {"reason": reason}
        )
        assert (counted or 0) == sum(part.reason == reason for part in explained)
    if drawn[1] is not None:
        for part in explained:
            assert part.cached_tokens + part.loaded_tokens + part.computed_tokens == part.tokens


def test_an_explanation_has_the_guesses_with_times_since_the_question() -> None:
    prefills = (
        EndedPrefill(100.01, 100.025, "wrong", 512, 480),
        EndedPrefill(100.03, 100.09, "confirmed", 640, 0),
    )
    explanation = explain(answered((), None, prefills=prefills))
    assert [prefill.model_dump() for prefill in explanation.speculation] == [
        {
            "start_ms": 10.0,
            "end_ms": 25.0,
            "outcome": "wrong",
            "tokens": 512,
            "wasted_tokens": 480,
        },
        {
            "start_ms": 30.0,
            "end_ms": 90.0,
            "outcome": "confirmed",
            "tokens": 640,
            "wasted_tokens": 0,
        },
    ]


def test_an_answer_without_documents_has_neither_stages_nor_guesses() -> None:
    explanation = explain(answered((), None))
    assert (explanation.stages, explanation.speculation) == ([], [])
