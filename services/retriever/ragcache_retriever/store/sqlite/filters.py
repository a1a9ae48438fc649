"""Turns metadata filters into SQL conditions on documents."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ragcache_core.retrieval.filters import (
    And,
    Exists,
    Filter,
    In,
    InRange,
    Not,
    Or,
    Prefix,
)
from ragcache_retriever.store.sqlite.database import Value

_OWN_FIELDS = {
    "id": "documents.id",
    "title": "documents.title",
    "updated_unix_ms": "CAST(documents.updated_unix_ms AS TEXT)",
}
"""Fields of the document itself, which no metadata can hide."""

_FIRST_SURROGATE, _AFTER_SURROGATES = 0xD800, 0xE000


class FilterSql:
    """The SQL condition of a filter on the table ``documents``, and its parameters.

    Args:
        collection: Row of the collection, whose fields have an index.
    """

    def __init__(self, wanted: Filter, collection: int) -> None:
        self._collection = collection
        self.parameters: list[Value] = []
        self.condition = self._condition(wanted)

    def _condition(self, wanted: Filter) -> str:
        match wanted:
            case And(filters):
                return self._joined(filters, " AND ", "1")
            case Or(filters):
                return self._joined(filters, " OR ", "0")
            case Not(inner):
                return f"NOT {self._condition(inner)}"
            case In() | InRange() | Exists() | Prefix():
                return self._test_of_field(wanted)

    def _joined(self, filters: Sequence[Filter], operator: str, empty: str) -> str:
        if not filters:
            return empty
        return f"({operator.join(map(self._condition, filters))})"

    def _test_of_field(self, wanted: In | InRange | Exists | Prefix) -> str:
        own = _OWN_FIELDS.get(wanted.field)
        if own is not None:
            # Never NULL, so that NOT inverts it.
            return f"coalesce({self._test(wanted, own, f'number_of({own})')}, 0)"
        self.parameters += (self._collection, wanted.field)
        test = self._test(wanted, "value", "number")
        return (
            "documents.row IN (SELECT document FROM document_fields"
            f" WHERE collection = ? AND name = ? AND {test})"
        )

    def _test(self, wanted: In | InRange | Exists | Prefix, value: str, number: str) -> str:
        match wanted:
            case Exists():
                return "1"
            case In(_, values):
                self.parameters += values
                return f"{value} IN ({', '.join('?' * len(values))})"
            case Prefix(_, prefix):
                return self._within(value, prefix, after_prefix(prefix))
            case InRange():
                return self._in_range(wanted, number)

    def _within(self, value: str, first: str, end: str | None) -> str:
        self.parameters.append(first)
        if end is None:
            return f"{value} >= ?"
        self.parameters.append(end)
        return f"({value} >= ? AND {value} < ?)"

    def _in_range(self, wanted: InRange, number: str) -> str:
        tests = [f"{number} IS NOT NULL"]
        for operator, bound in (
            (">", wanted.gt),
            (">=", wanted.gte),
            ("<", wanted.lt),
            ("<=", wanted.lte),
        ):
            if bound is not None:
                self.parameters.append(bound)
                tests.append(f"{number} {operator} ?")
        return f"({' AND '.join(tests)})"


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
