"""An encoded transaction comes back as it was, and other content is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_retriever.store.change_log import ChangedRows
from ragcache_retriever.store.sqlite.statements import Statement, StatementLog, decode

integers = st.integers(-(2**63), 2**63 - 1)
values = st.one_of(
    st.none(),
    integers,
    st.floats(allow_nan=False),
    st.text(st.characters(codec="utf-8")),
    st.binary(),
)
statements = st.builds(
    Statement,
    st.sampled_from(["INSERT", "DELETE ü"]),
    st.lists(st.lists(values, max_size=4).map(tuple), max_size=4),
)
rows = st.lists(integers, max_size=3).map(tuple)
logs = st.builds(
    StatementLog,
    st.lists(statements, max_size=4),
    st.lists(st.builds(ChangedRows, integers, rows, rows), max_size=2),
    st.booleans(),
)


@given(log=logs)
def test_a_transaction_comes_back_as_it_was(log: StatementLog) -> None:
    assert decode(log.encode()) == log


@given(log=logs, data=st.data())
def test_a_transaction_that_is_cut_off_is_refused(log: StatementLog, data: st.DataObject) -> None:
    content = log.encode()
    with pytest.raises(ValueError, match=r"cut off|not an encoded"):
        decode(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(ValueError, match="after the end"):
        decode(content + b"x")


def test_a_statement_is_stored_once() -> None:
    sql = "INSERT INTO a_long_table_name VALUES (?)"
    log = StatementLog([Statement(sql, [(1,)]), Statement(sql, [(2,), (3,)])])
    assert log.encode().count(sql.encode()) == 1
