"""What a question says of chunks, by the engine's record of it."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.plan.prompt import assemble
from ragcache_gateway.background.demand import Question, asks
from ragcache_wire.v1.engine_pb2 import RequestRecord

HEAD = (1, 2, 3)
TEXTS = ("a0", "a1", "b0")
DOCUMENTS = ("a.md", "a.md", "b.md")
SIZES = (10, 20, 30)


def question(mode: Literal["exact", "blend"] = "blend", head: tuple[int, ...] = HEAD) -> Question:
    prompt = assemble(head, [[7] * size for size in SIZES], [9] * 7)
    return Question(mode, prompt, TEXTS, DOCUMENTS, 123)


def record(
    *, local: int = 0, loaded: int = 0, prefill_s: float = 7.0, repaired: int = 0
) -> RequestRecord:
    return RequestRecord(
        prompt_tokens=70,
        local_tokens=local,
        loaded_tokens=loaded,
        prefill_s=prefill_s,
        recomputed_tokens=repaired,
        recompute_s=0.02 * repaired,
    )


def test_under_blend_each_chunk_is_asked_for_by_itself() -> None:
    found = asks(question(), record(), HEAD)
    assert [ask.prefill.texts for ask in found] == [("a0",), ("a1",), ("b0",)]
    assert [ask.prefill.documents for ask in found] == [(name,) for name in DOCUMENTS]
    assert {ask.prefill.mode for ask in found} == {"blend"}
    assert [ask.num_tokens for ask in found] == list(SIZES)
    assert {ask.prefill.planned_at_ms for ask in found} == {123}
    assert [ask.saved_s for ask in found] == pytest.approx([1.0, 2.0, 3.0])


def test_a_context_that_was_repaired_is_asked_for_as_it_stands() -> None:
    *_, whole = asks(question(), record(loaded=43, prefill_s=2.7, repaired=25), HEAD)
    assert whole.prefill.texts == TEXTS
    assert whole.prefill.documents == DOCUMENTS
    assert whole.prefill.mode == "exact"
    assert whole.num_tokens == sum(SIZES)
    assert whole.saved_s == pytest.approx(0.5 + 2.0)


def test_one_of_a_single_chunk_is_too() -> None:
    one = Question("blend", assemble(HEAD, [[7] * 10], [9]), ("a0",), ("a.md",), 123)
    assert [ask.prefill.mode for ask in asks(one, record(), HEAD)] == ["blend"]
    found = asks(one, record(loaded=13, repaired=2), HEAD)
    assert [(ask.prefill.mode, ask.saved_s > 0) for ask in found] == [
        ("blend", False),
        ("exact", True),
    ]


def test_what_was_at_hand_was_not_computed() -> None:
    found = asks(question(), record(local=3, loaded=20, prefill_s=4.7), HEAD)
    assert [ask.saved_s for ask in found] == pytest.approx([0.0, 1.0, 3.0])


def test_under_exact_the_first_documents_chunks_are_one() -> None:
    [ask] = asks(question("exact"), record(loaded=13, prefill_s=5.7), HEAD)
    assert ask.prefill.texts == ("a0", "a1")
    assert ask.prefill.documents == ("a.md", "a.md")
    assert ask.num_tokens == 30
    assert ask.saved_s == pytest.approx(2.0)


def test_behind_another_system_prompt_only_a_blend_has_a_use_for_it() -> None:
    assert asks(question("exact", head=(4, 5)), record(), HEAD) == []
    found = asks(question("blend", head=(4, 5)), record(repaired=25), HEAD)
    assert [ask.prefill.texts for ask in found] == [("a0",), ("a1",), ("b0",)]


def test_a_question_without_chunks_asks_for_nothing() -> None:
    for mode in ("exact", "blend"):
        empty = Question(mode, assemble(HEAD, [], [9]), (), (), 0)
        assert asks(empty, record(), HEAD) == []


def test_a_hole_was_computed_in_the_repair() -> None:
    said = record(local=3, loaded=60, prefill_s=0.7)
    said.recomputed_tokens, said.recompute_s = 25, 0.5
    said.missing_chunks.append(2)  # behind the template and a0
    *found, _ = asks(question(), said, HEAD)
    assert [ask.saved_s for ask in found] == pytest.approx([0.0, 0.4, 0.0])


def test_of_a_hole_only_what_the_engine_had_not_itself_was_computed() -> None:
    said = record(local=23, loaded=40, prefill_s=0.7)
    said.recomputed_tokens, said.recompute_s = 10, 0.5
    said.missing_chunks.append(2)
    *found, _ = asks(question(), said, HEAD)
    assert [ask.saved_s for ask in found] == pytest.approx([0.0, 0.5, 0.0])


def test_without_a_template_the_first_segment_is_a_chunk() -> None:
    said = record(loaded=60, prefill_s=0.7)
    said.recomputed_tokens, said.recompute_s = 10, 0.5
    said.missing_chunks.append(0)
    found = asks(question(head=()), said, HEAD)
    assert [ask.saved_s for ask in found] == pytest.approx([0.5, 0.0, 0.0])


@given(local=st.integers(0, 70), loaded=st.integers(0, 70), exact=st.booleans())
def test_no_more_is_saved_than_the_question_took(local: int, loaded: int, exact: bool) -> None:
    loaded = min(loaded, 70 - local)
    found = asks(question("exact" if exact else "blend"), record(local=local, loaded=loaded), HEAD)
    assert all(ask.saved_s >= 0 for ask in found)
    assert sum(ask.saved_s for ask in found) <= 7.0 + 1e-9
