"""What an explanation says of each part of a prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.identity.keys import KEY_BYTES
from ragcache_core.plan.prompt import assemble
from ragcache_core.planner.request_plan import (
    ChunkAction,
    ChunkDecision,
    PlanAlternative,
    PlanReason,
    PlanSeconds,
    RequestPlan,
)
from ragcache_core.scheduling.priority import QueuePosition
from ragcache_gateway.explain.explanation import (
    HEAD_COMES_ONCE,
    REUSE_IS_OFF,
    AnsweredPrompt,
    PromptPart,
    RecentAnswers,
    explain,
    explain_plan,
    prompt_parts,
)
from ragcache_gateway.prompts.passages import Passage
from ragcache_wire.v1 import engine_pb2 as pb
from ragcache_wire.v1 import retriever_pb2

PASSAGES = [
    Passage(retriever_pb2.Chunk(id=f"doc#{n}", document_id="doc", title="Doc"), rank=n, score=0.5)
    for n in range(2)
]
PROMPT = assemble(range(10), [range(20), range(30)], range(5), stable_head=4)
HEAD, VARYING, FIRST, SECOND = (bytes([n]) * KEY_BYTES for n in range(4))
ENGINE, SHARD = "engine:10.0.0.1:8000", "store:10.0.0.9:7000"
PLAN = RequestPlan(
    (0, 1),
    ENGINE,
    (
        ChunkDecision(HEAD, 4, ChunkAction.CACHED, PlanReason.RESIDENT, "device", ENGINE),
        ChunkDecision(VARYING, 6, ChunkAction.CACHED, PlanReason.RESIDENT, "device", ENGINE),
        ChunkDecision(FIRST, 20, ChunkAction.BLEND, PlanReason.OTHER_PREFIX, "disk", SHARD),
        ChunkDecision(SECOND, 30, ChunkAction.COMPUTE, PlanReason.NOT_STORED),
    ),
    PlanSeconds(0.5, 0.1, 0.05, 0.2),
    PlanAlternative("engine:10.0.0.2:8000", (1, 0), "compute", PlanSeconds(0.0, 0.0, 0.0, 1.5)),
)
POSITION = QueuePosition(-3, 10_000, 2 / 3)
PARTS = prompt_parts(PROMPT, PASSAGES, PLAN)


def answered(record: pb.RequestRecord | None) -> AnsweredPrompt:
    return AnsweredPrompt(
        "chatcmpl-1",
        7,
        "model",
        "10.0.0.1:8000",
        None,
        "blend",
        PARTS,
        explain_plan(PLAN, POSITION),
        record,
    )


def record() -> pb.RequestRecord:
    source = pb.LoadSource(tier="disk", num_bytes=900, base_position=40, fix_overhead=0.5)
    return pb.RequestRecord(
        queue_s=0.5,
        load_s=0.3,
        recompute_s=0.1,
        select_s=0.04,
        prefill_s=0.2,
        local_tokens=10,
        miss="evicted",
        predicted=pb.PredictedTime(load_s=0.1, select_s=0.05, passes_s=0.25),
        segments=[
            pb.SegmentRecord(start=0, end=4, cached_tokens=4),
            pb.SegmentRecord(start=4, end=10, cached_tokens=6),
            pb.SegmentRecord(
                start=10, end=30, loaded_tokens=20, recomputed_tokens=3, source=source, blended=True
            ),
            pb.SegmentRecord(start=30, end=60, reason="evicted"),
        ],
    )


def test_parts_are_the_template_the_chunks_and_the_question() -> None:
    assert [(part.start, part.end, part.chunk) for part in PARTS] == [
        (0, 4, None),
        (4, 10, None),
        (10, 30, "doc#0"),
        (30, 60, "doc#1"),
        (60, 65, None),
    ]


def test_each_part_has_its_outcome_and_reason() -> None:
    explanation = explain(answered(record()))
    head, varying, blended, missing, question = explanation.parts
    assert (head.outcome, varying.outcome) == ("cached", "cached")
    assert (blended.outcome, blended.tier, blended.loaded_bytes) == ("blended", "disk", 900)
    assert (blended.shift_tokens, blended.mismatch, blended.recomputed_tokens) == (-30, 0.5, 3)
    assert (missing.outcome, missing.reason, missing.computed_tokens) == ("computed", "evicted", 30)
    assert (question.outcome, question.computed_tokens, question.reason) == ("computed", 5, "")
    assert (explanation.miss, explanation.prompt_tokens) == ("evicted", 65)


def test_a_missing_chunk_of_a_blend_is_computed_and_not_recomputed_too() -> None:
    blend = record()
    blend.segments[3].recomputed_tokens = 30
    missing = explain(answered(blend)).parts[3]
    assert (missing.tokens, missing.computed_tokens, missing.recomputed_tokens) == (30, 30, 0)


def test_the_plan_and_the_next_best_one_are_shown() -> None:
    explanation = explain(answered(record()))
    assert [(part.planned, part.planned_reason) for part in explanation.parts] == [
        ("cached", "resident"),
        ("cached", "resident"),
        ("blend", "other_prefix"),
        ("compute", "not_stored"),
        (None, ""),
    ]
    assert [(part.planned_tier, part.planned_source) for part in explanation.parts] == [
        ("device", ENGINE),
        ("device", ENGINE),
        ("disk", SHARD),
        (None, None),
        (None, None),
    ]
    plan = explanation.plan
    assert (plan.engine, plan.order) == ("10.0.0.1:8000", [0, 1])
    assert plan.predicted_ms is not None
    assert plan.predicted_ms.model_dump() == pytest.approx(
        {"queue": 500.0, "load": 100.0, "recompute": 50.0, "prefill": 200.0, "total": 850.0}
    )
    assert plan.position.model_dump() == {
        "band": -3,
        "cached_share": 0.6667,
        "delay_ms": 3333,
        "window_ms": 10_000,
        "tenant_delay_ms": 0,
    }
    assert plan.next_best is not None
    assert (plan.next_best.engine, plan.next_best.order) == ("10.0.0.2:8000", [1, 0])
    assert (plan.next_best.kind, plan.next_best.predicted_ms.total) == ("compute", 1500.0)


def test_times_are_split_alike_in_prediction_and_measurement() -> None:
    time = explain(answered(record())).time
    assert time is not None
    assert time.predicted_ms is not None
    assert time.predicted_ms.model_dump() == {
        "load": 100.0,
        "select": 50.0,
        "passes": 250.0,
        "total": 400.0,
    }
    assert time.measured_ms.model_dump() == pytest.approx(
        {"load": 200.0, "select": 40.0, "passes": 260.0, "total": 500.0}
    )
    assert time.queue_ms == 500.0


def test_without_a_record_nothing_is_claimed() -> None:
    explanation = explain(answered(None))
    assert {part.outcome for part in explanation.parts} == {"unknown"}
    assert explanation.time is None


def test_a_request_without_reuse_says_so() -> None:
    off = replace(answered(pb.RequestRecord(prompt_tokens=65)), mode="off")
    explanation = explain(off)
    assert {part.reason for part in explanation.parts if part.chunk} == {REUSE_IS_OFF}
    assert {part.outcome for part in explanation.parts} == {"computed"}


def test_a_changing_system_prompt_is_named_as_the_reason() -> None:
    record = pb.RequestRecord(prompt_tokens=65, miss="planned to be computed")
    once = replace(answered(record), mode="exact", comes_once=True)
    explanation = explain(once)
    assert {part.reason for part in explanation.parts if part.chunk} == {HEAD_COMES_ONCE}


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=30, unique=True),
    st.integers(1, 5),
    st.integers(1, 40),
)
def test_recent_answers_keep_the_latest_within_their_bounds(
    ids: list[int], max_answers: int, max_parts: int
) -> None:
    recent = RecentAnswers(max_answers, max_parts)
    for number in ids:
        parts = tuple(PromptPart(n, n + 1) for n in range(number))
        recent.add(replace(answered(None), id=str(number), parts=parts))
        kept_answer = recent.find(str(number))
        assert kept_answer is not None
        assert kept_answer.parts == parts
    kept = [number for number in ids if str(number) in recent]
    assert kept == ids[-len(kept) :]
    assert len(kept) == len(recent) <= max_answers
    assert len(kept) == 1 or sum(kept) <= max_parts
    assert all(recent.find(str(number)) is None for number in set(ids) - set(kept))


def test_another_tenants_answer_is_not_found() -> None:
    recent = RecentAnswers()
    recent.add(replace(answered(None), tenant="a"))
    kept = recent.find("chatcmpl-1", "a")
    assert kept is not None
    assert kept is recent.find("chatcmpl-1", of_any_tenant=True)
    assert recent.find("chatcmpl-1") is None
    assert recent.find("chatcmpl-1", "b") is None
