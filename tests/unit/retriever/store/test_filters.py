"""The conditions of a filter use indexes. What they find is in the contract of document stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select

from ragcache_core.retrieval.filters import (
    Filter,
    In,
    InPeriod,
    InRange,
    Prefix,
)
from ragcache_retriever.store.filters import after_prefix, condition_of
from ragcache_retriever.store.statements import SQLITE, Statement
from ragcache_retriever.store.tables import documents
from tests.kit.memory_database import MemoryDatabase


@pytest.fixture
def database() -> Iterator[MemoryDatabase]:
    database = MemoryDatabase()
    yield database
    database.close()


def documents_that_pass(wanted: Filter) -> Statement:
    passing = select(documents.c.row).where(condition_of(wanted))
    return Statement(passing.order_by(documents.c.row))


@given(prefix=st.text(st.characters(codec="utf-8")), text=st.text(st.characters(codec="utf-8")))
def test_texts_with_a_prefix_lie_between_it_and_its_end(prefix: str, text: str) -> None:
    end = after_prefix(prefix)
    is_within = prefix <= text and (end is None or text < end)
    assert is_within == text.startswith(prefix)


def test_a_selective_condition_uses_the_index(database: MemoryDatabase) -> None:
    for wanted in (
        In("team", ("a",)),
        Prefix("team", "a"),
        InRange("year", gte=2000.0),
        InPeriod("date", 0),
    ):
        sql, parameters = documents_that_pass(wanted).on(SQLITE, {"home": 1})
        plan = database.query(f"EXPLAIN QUERY PLAN {sql}", parameters)
        assert any("INDEX fields_by" in str(step[3]) for step in plan), plan
