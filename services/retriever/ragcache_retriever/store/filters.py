"""Turns metadata filters into SQL conditions on documents."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TypeAlias

from sqlalchemy import ColumnElement, and_, bindparam, cast, false, func, null, or_, select, true
from sqlalchemy.types import Double

from ragcache_core.retrieval.filters import (
    And,
    Exists,
    FieldTest,
    Filter,
    In,
    InPeriod,
    InRange,
    Not,
    Or,
    Prefix,
)
from ragcache_retriever.store.statements import INDEXED_CHARACTERS, Indexed
from ragcache_retriever.store.tables import NUMBER, PLAIN_TEXT, document_fields, documents

_Columns: TypeAlias = tuple[ColumnElement[str], ColumnElement[float], ColumnElement[int]]
"""Of the text, the number and the instant of a value."""

_OWN_FIELDS: dict[str, _Columns] = {
    "id": (documents.c.id, documents.c.id_number, documents.c.id_instant),
    "title": (documents.c.title, documents.c.title_number, documents.c.title_instant),
    "updated_unix_ms": (
        cast(documents.c.updated_unix_ms, PLAIN_TEXT),
        cast(documents.c.updated_unix_ms, Double),
        cast(null(), NUMBER),
    ),
}
"""Fields of the document itself, which no metadata can hide."""

_FIRST_SURROGATE, _AFTER_SURROGATES = 0xD800, 0xE000


def condition_of(wanted: Filter) -> ColumnElement[bool]:
    """Return the condition of a filter on the table of documents.

    Its parameter ``home`` is the row of their collection, whose fields have an index.
    """
    match wanted:
        case And(filters):
            return and_(true(), *map(condition_of, filters))
        case Or(filters):
            return or_(false(), *map(condition_of, filters))
        case Not(inner):
            return ~condition_of(inner)
        case _:
            return _test_of_field(wanted)


def _test_of_field(wanted: FieldTest) -> ColumnElement[bool]:
    own = _OWN_FIELDS.get(wanted.field)
    if own is not None:
        # Never NULL, so that NOT inverts it.
        return func.coalesce(_test(wanted, own), false())
    if not _is_storable(wanted.field):
        return false()
    fields = document_fields.c
    found = select(fields.document).where(
        fields.collection == bindparam("home"),
        fields.name == wanted.field,
        _indexed(wanted),
        _test(wanted, (fields.value, fields.number, fields.instant)),
    )
    return documents.c.row.in_(found)


def _indexed(wanted: FieldTest) -> ColumnElement[bool]:
    """Return a condition on the index of values that every wanted one passes."""
    part = Indexed(document_fields.c.value)
    match wanted:
        case In(_, values):
            short = [one for one in _storable(values) if len(one) <= INDEXED_CHARACTERS]
            long = [one for one in _storable(values) if len(one) > INDEXED_CHARACTERS]
            return or_(part.in_(short), *(_begins(part, one[:INDEXED_CHARACTERS]) for one in long))
        case Prefix(_, prefix):
            return _begins(part, prefix[:INDEXED_CHARACTERS])
        case _:
            return true()


def _test(wanted: FieldTest, columns: _Columns) -> ColumnElement[bool]:
    value, number, instant = columns
    match wanted:
        case Exists():
            return true()
        case In(_, values):
            return value.in_(_storable(values))
        case Prefix(_, prefix):
            return _begins(value, prefix)
        case InRange():
            return _in_range(wanted, number)
        case InPeriod():
            return _in_period(wanted, instant)


def _begins(value: ColumnElement[str], prefix: str) -> ColumnElement[bool]:
    if not _is_storable(prefix):
        return false()
    end = after_prefix(prefix)
    return value >= prefix if end is None else and_(value >= prefix, value < end)


def _in_range(wanted: InRange, number: ColumnElement[float]) -> ColumnElement[bool]:
    tests: list[ColumnElement[bool]] = [number.is_not(None)]
    if wanted.gt is not None:
        tests.append(number > float(wanted.gt))
    if wanted.gte is not None:
        tests.append(number >= float(wanted.gte))
    if wanted.lt is not None:
        tests.append(number < float(wanted.lt))
    if wanted.lte is not None:
        tests.append(number <= float(wanted.lte))
    return and_(*tests)


def _in_period(wanted: InPeriod, instant: ColumnElement[int]) -> ColumnElement[bool]:
    tests: list[ColumnElement[bool]] = [instant.is_not(None)]
    if wanted.start_us is not None:
        tests.append(instant >= wanted.start_us)
    if wanted.end_us is not None:
        tests.append(instant < wanted.end_us)
    return and_(*tests)


def _storable(values: Sequence[str]) -> list[str]:
    return list(filter(_is_storable, values))


def _is_storable(text: str) -> bool:
    """Whether a document may have a text. PostgreSQL cannot store NUL characters."""
    return "\0" not in text


def after_prefix(prefix: str) -> str | None:
    """Return the first text after all texts with a prefix, by code points. None: there is none."""
    while prefix:
        point = ord(prefix[-1]) + 1
        if point == _FIRST_SURROGATE:  # these are no characters
            point = _AFTER_SURROGATES
        if point <= sys.maxunicode:
            return prefix[:-1] + chr(point)
        prefix = prefix[:-1]
    return None
