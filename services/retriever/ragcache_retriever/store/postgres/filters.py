"""Turns metadata filters into SQL conditions on documents in PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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

INDEXED_CHARACTERS = 64
"""Of a value, which ``fields_by_value`` has."""

_OWN_FIELDS = {
    "id": ("documents.id", "documents.id_number"),
    "title": ("documents.title", "documents.title_number"),
    "updated_unix_ms": (
        "documents.updated_unix_ms::text",
        "documents.updated_unix_ms::double precision",
    ),
}
"""Fields of the document itself, which no metadata can hide: their values and numbers."""


class PostgresFilter:
    """The SQL condition of a filter on the table ``documents``, and its parameters.

    Args:
        collection: Row of the collection, whose fields have an index.
    """

    def __init__(self, wanted: Filter, collection: int) -> None:
        self._collection = collection
        self.parameters: list[Any] = []
        self.condition = self._condition(wanted)

    def _condition(self, wanted: Filter) -> str:
        match wanted:
            case And(filters):
                return self._joined(filters, " AND ", "true")
            case Or(filters):
                return self._joined(filters, " OR ", "false")
            case Not(inner):
                return f"NOT {self._condition(inner)}"
            case In() | InRange() | Exists() | Prefix():
                return self._test_of_field(wanted)

    def _joined(self, filters: Sequence[Filter], operator: str, empty: str) -> str:
        if not filters:
            return empty
        return f"({operator.join(map(self._condition, filters))})"

    def _test_of_field(self, wanted: In | InRange | Exists | Prefix) -> str:
        if "\0" in wanted.field or (isinstance(wanted, Prefix) and "\0" in wanted.prefix):
            return "false"  # PostgreSQL stores no text with this character
        own = _OWN_FIELDS.get(wanted.field)
        if own is not None:
            # Never NULL, so that NOT inverts it.
            return f"coalesce({self._test(wanted, *own)}, false)"
        self.parameters += (self._collection, wanted.field)
        test = self._indexed(wanted) + self._test(wanted, "value", "number")
        return (
            "documents.row IN (SELECT document FROM document_fields"
            f" WHERE document_fields.collection = %s AND name = %s AND {test})"
        )

    def _indexed(self, wanted: In | InRange | Exists | Prefix) -> str:
        """Return a condition on the index that every value has to pass."""
        match wanted:
            case In(_, values):
                self.parameters.append([value[:INDEXED_CHARACTERS] for value in _storable(values)])
                return f"left(value, {INDEXED_CHARACTERS}) = ANY(%s) AND "
            case Prefix(_, prefix):
                self.parameters.append(prefix[:INDEXED_CHARACTERS])
                return f"starts_with(left(value, {INDEXED_CHARACTERS}), %s) AND "
            case _:
                return ""

    def _test(self, wanted: In | InRange | Exists | Prefix, value: str, number: str) -> str:
        match wanted:
            case Exists():
                return "true"
            case In(_, values):
                self.parameters.append(_storable(values))
                return f"{value} = ANY(%s)"
            case Prefix(_, prefix):
                self.parameters.append(prefix)
                return f"starts_with({value}, %s)"
            case InRange():
                return self._in_range(wanted, number)

    def _in_range(self, wanted: InRange, number: str) -> str:
        tests = [f"{number} IS NOT NULL"]
        for operator, bound in (
            (">", wanted.gt),
            (">=", wanted.gte),
            ("<", wanted.lt),
            ("<=", wanted.lte),
        ):
            if bound is not None:
                self.parameters.append(float(bound))
                tests.append(f"{number} {operator} %s")
        return f"({' AND '.join(tests)})"


def _storable(values: Sequence[str]) -> list[str]:
    return [value for value in values if "\0" not in value]
