"""SQL finds the same documents as the meaning of the filter language."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from ragcache_core.retrieval.filters import (
    And,
    Exists,
    Filter,
    In,
    InRange,
    Not,
    Or,
    Prefix,
    matches,
    number_of,
)
from ragcache_retriever.store.filters import after_prefix, condition_of
from ragcache_retriever.store.statements import SQLITE, Statement
from ragcache_retriever.store.tables import documents
from tests.kit.memory_database import MemoryDatabase

NAMES = ["team", "year", "id", "title", "updated_unix_ms", "missing"]
VALUES = ["", "a", "ab", "b", "2020", "2021", "-1e3", "inf", "nan", "ü", "\U0010ffff", "d1", "7"]
names = st.sampled_from(NAMES)
values = st.sampled_from(VALUES)
bounds = st.none() | st.sampled_from([-1000.0, 6.5, 7.0, 2020.0, 2021.0, math.inf])
tests_of_fields: st.SearchStrategy[Filter] = st.one_of(
    st.builds(In, names, st.lists(values, max_size=3).map(tuple)),
    st.builds(InRange, names, bounds, bounds, bounds, bounds),
    st.builds(Exists, names),
    st.builds(Prefix, names, values),
)
filters: st.SearchStrategy[Filter] = st.recursive(
    tests_of_fields,
    lambda inner: st.one_of(
        st.builds(And, st.lists(inner, max_size=3).map(tuple)),
        st.builds(Or, st.lists(inner, max_size=3).map(tuple)),
        st.builds(Not, inner),
    ),
    max_leaves=6,
)
DOCUMENTS = [
    {"id": "d0", "title": "a", "team": "a", "year": "2020"},
    {"id": "d1", "title": "ab", "team": "ab", "year": "2021"},
    {"id": "d2", "title": "7", "team": "b", "year": "-1e3"},
    {"id": "d3", "title": "", "team": "ü", "year": "inf"},
    {"id": "d4", "title": "b", "team": "", "year": "nan"},
    {"id": "\U0010ffffx", "title": "2020"},
    {"id": "a", "title": "x", "team": "\U0010ffff\U0010ffff"},
]


@pytest.fixture(scope="module")
def database() -> MemoryDatabase:
    database = MemoryDatabase()
    for row, fields in enumerate(DOCUMENTS):
        metadata = {name: value for name, value in fields.items() if name in ("team", "year")}
        database.connection.execute(
            "INSERT INTO documents VALUES (?, 1, ?, ?, ?, ?, 1, '', '', 0, ?)",
            (
                row,
                fields["id"],
                number_of(fields["id"]),
                fields["title"],
                number_of(fields["title"]),
                row + 5,
            ),
        )
        # A field of metadata cannot hide one of the document.
        for name, value in (metadata | {"id": "hidden"}).items():
            database.connection.execute(
                "INSERT INTO document_fields VALUES (?, 1, ?, ?, ?)",
                (row, name, value, number_of(value)),
            )
    return database


def documents_that_pass(wanted: Filter) -> Statement:
    passing = select(documents.c.row).where(condition_of(wanted))
    return Statement(passing.order_by(documents.c.row))


@given(wanted=filters)
@settings(max_examples=150, deadline=None)
def test_sql_agrees_with_the_meaning_of_a_filter(database: MemoryDatabase, wanted: Filter) -> None:
    found = database.query(documents_that_pass(wanted), {"home": 1})
    expected = [
        row
        for row, fields in enumerate(DOCUMENTS)
        if matches(wanted, fields | {"updated_unix_ms": str(row + 5)})
    ]
    assert [row for (row,) in found] == expected


@given(prefix=st.text(st.characters(codec="utf-8")), text=st.text(st.characters(codec="utf-8")))
def test_texts_with_a_prefix_lie_between_it_and_its_end(prefix: str, text: str) -> None:
    end = after_prefix(prefix)
    is_within = prefix <= text and (end is None or text < end)
    assert is_within == text.startswith(prefix)


def test_a_selective_condition_uses_the_index(database: MemoryDatabase) -> None:
    for wanted in (In("team", ("a",)), Prefix("team", "a"), InRange("year", gte=2000.0)):
        sql, parameters = documents_that_pass(wanted).on(SQLITE, {"home": 1})
        plan = database.query(f"EXPLAIN QUERY PLAN {sql}", parameters)
        assert any("INDEX fields_by" in str(step[3]) for step in plan), plan
