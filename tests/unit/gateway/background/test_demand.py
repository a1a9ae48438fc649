"""Which prefills would have served a question, by the engine's record of it."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.plan.prompt import assemble
from ragcache_core.quality.controller import AskedQuestion
from ragcache_gateway.background.demand import AnsweredQuestion, Mode, prefill_demands
from ragcache_wire.v1.engine_pb2 import RequestRecord

HEAD = (1, 2, 3)
TEXTS = ("a0", "a1", "b0")
DOCUMENTS = ("a.md", "a.md", "b.md")
SIZES = (10, 20, 30)


def question(
    mode: Literal["exact", "blend"] = "blend", head: tuple[int, ...] = HEAD
) -> AnsweredQuestion:
    prompt = assemble(head, [[7] * size for size in SIZES], [9] * 7)
    return AnsweredQuestion(AskedQuestion(prompt, DOCUMENTS, 123), mode, TEXTS)


def record(
    *, local: int = 0, loaded: int = 0, prefill_s: float = 7.0, recomputed: int = 0
) -> RequestRecord:
    return RequestRecord(
        prompt_tokens=70,
        local_tokens=local,
        loaded_tokens=loaded,
        prefill_s=prefill_s,
        recomputed_tokens=recomputed,
        recompute_s=0.02 * recomputed,
    )


def test_under_blend_each_chunk_is_a_prefill_of_its_own() -> None:
    found = prefill_demands(question(), record(), HEAD)
    assert [demand.prefill.texts for demand in found] == [("a0",), ("a1",), ("b0",)]
    assert [demand.prefill.documents for demand in found] == [(name,) for name in DOCUMENTS]
    assert {demand.prefill.mode for demand in found} == {"blend"}
    assert [demand.num_tokens for demand in found] == list(SIZES)
    assert {demand.prefill.planned_at_ms for demand in found} == {123}
    assert [demand.saved_s for demand in found] == pytest.approx([1.0, 2.0, 3.0])


def test_a_context_that_was_recomputed_is_a_prefill_in_its_order() -> None:
    *_, whole = prefill_demands(question(), record(loaded=43, prefill_s=2.7, recomputed=25), HEAD)
    assert whole.prefill.texts == TEXTS
    assert whole.prefill.documents == DOCUMENTS
    assert whole.prefill.mode == "exact"
    assert whole.num_tokens == sum(SIZES)
    assert whole.saved_s == pytest.approx(0.5 + 2.0)


def test_a_recomputed_context_of_one_chunk_is_a_prefill_too() -> None:
    asked = AskedQuestion(assemble(HEAD, [[7] * 10], [9]), ("a.md",), 123)
    one = AnsweredQuestion(asked, "blend", ("a0",))
    assert [demand.prefill.mode for demand in prefill_demands(one, record(), HEAD)] == ["blend"]
    found = prefill_demands(one, record(loaded=13, recomputed=2), HEAD)
    assert [(demand.prefill.mode, demand.saved_s > 0) for demand in found] == [
        ("blend", False),
        ("exact", True),
    ]


def test_cached_tokens_save_no_time() -> None:
    found = prefill_demands(question(), record(local=3, loaded=20, prefill_s=4.7), HEAD)
    assert [demand.saved_s for demand in found] == pytest.approx([0.0, 1.0, 3.0])


def test_under_exact_the_first_documents_chunks_are_one_prefill() -> None:
    [demand] = prefill_demands(question("exact"), record(loaded=13, prefill_s=5.7), HEAD)
    assert demand.prefill.texts == ("a0", "a1")
    assert demand.prefill.documents == ("a.md", "a.md")
    assert demand.num_tokens == 30
    assert demand.saved_s == pytest.approx(2.0)


def test_after_another_system_prompt_only_a_blend_can_use_a_prefill() -> None:
    assert prefill_demands(question("exact", head=(4, 5)), record(), HEAD) == []
    found = prefill_demands(question("blend", head=(4, 5)), record(recomputed=25), HEAD)
    assert [demand.prefill.texts for demand in found] == [("a0",), ("a1",), ("b0",)]


def test_a_question_without_chunks_wants_no_prefill() -> None:
    modes: tuple[Mode, ...] = ("exact", "blend")
    for mode in modes:
        empty = AnsweredQuestion(AskedQuestion(assemble(HEAD, [], [9]), (), 0), mode, ())
        assert prefill_demands(empty, record(), HEAD) == []


def test_a_missing_chunk_counts_in_the_recompute_time() -> None:
    one_record = record(local=3, loaded=60, prefill_s=0.7)
    one_record.recomputed_tokens, one_record.recompute_s = 25, 0.5
    one_record.missing_chunks.append(2)  # after the template and a0
    *found, _ = prefill_demands(question(), one_record, HEAD)
    assert [demand.saved_s for demand in found] == pytest.approx([0.0, 0.4, 0.0])


def test_a_missing_chunk_counts_without_the_tokens_in_the_engines_cache() -> None:
    one_record = record(local=23, loaded=40, prefill_s=0.7)
    one_record.recomputed_tokens, one_record.recompute_s = 10, 0.5
    one_record.missing_chunks.append(2)
    *found, _ = prefill_demands(question(), one_record, HEAD)
    assert [demand.saved_s for demand in found] == pytest.approx([0.0, 0.5, 0.0])


def test_without_a_template_the_first_segment_is_a_chunk() -> None:
    one_record = record(loaded=60, prefill_s=0.7)
    one_record.recomputed_tokens, one_record.recompute_s = 10, 0.5
    one_record.missing_chunks.append(0)
    found = prefill_demands(question(head=()), one_record, HEAD)
    assert [demand.saved_s for demand in found] == pytest.approx([0.5, 0.0, 0.0])


@given(local=st.integers(0, 70), loaded=st.integers(0, 70), exact=st.booleans())
def test_no_prefill_saves_more_time_than_the_question_took(
    local: int, loaded: int, exact: bool
) -> None:
    loaded = min(loaded, 70 - local)
    found = prefill_demands(
        question("exact" if exact else "blend"), record(local=local, loaded=loaded), HEAD
    )
    assert all(demand.saved_s >= 0 for demand in found)
    assert sum(demand.saved_s for demand in found) <= 7.0 + 1e-9
