"""Work that was planned before a delete is recognized."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.cluster.recent_deletes import MAX_DELETES, RecentDeletes

DOCUMENTS = st.sampled_from("abc")


@given(
    deletes=st.lists(st.tuples(DOCUMENTS, st.integers(0, 20))),
    documents=st.lists(DOCUMENTS),
    planned=st.integers(0, 25),
)
def test_a_delete_at_or_after_planning_includes_its_document(
    deletes: list[tuple[str, int]], documents: list[str], planned: int
) -> None:
    recent = RecentDeletes()
    for document, at_ms in deletes:
        recent.record(document, at_ms)
    expected = any(at_ms >= planned and name in documents for name, at_ms in deletes)
    assert recent.may_include(documents, planned) is expected


@given(deletes=st.lists(st.integers(0, 20), min_size=1), planned=st.integers(0, 25))
def test_if_any_document_may_be_deleted_earlier_plans_count_as_deleted(
    deletes: list[int], planned: int
) -> None:
    recent = RecentDeletes()
    for at_ms in deletes:
        recent.record_all(at_ms)
    assert recent.may_include(["any"], planned) is (planned <= max(deletes))


def test_plans_older_than_the_remembered_deletes_count_as_deleted() -> None:
    recent = RecentDeletes()
    for number in range(MAX_DELETES + 1):
        recent.record(str(number), 10 + number)
    assert recent.may_include(["never deleted"], 10)
    assert not recent.may_include(["never deleted"], 11)
    assert recent.may_include([str(MAX_DELETES)], 11)
