"""The language of metadata filters: conditions on the fields of a document.

A filter is a tree of And, Or and Not over tests of single fields. Each backend turns it into its
own query language. ``matches`` is the meaning that all of them have to agree with. A field with a
list passes a test if one of its values does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ragcache_core.errors import InvalidInput
from ragcache_core.retrieval.metadata import MetadataValue, instant_of, number_of, texts_of

MAX_DEPTH = 8
MAX_NODES = 256


@dataclass(frozen=True, slots=True)
class And:
    """True if every filter is. Without filters it is true."""

    filters: tuple[Filter, ...]


@dataclass(frozen=True, slots=True)
class Or:
    """True if one of the filters is. Without filters it is false."""

    filters: tuple[Filter, ...]


@dataclass(frozen=True, slots=True)
class Not:
    """True if the filter is not."""

    filter: Filter


@dataclass(frozen=True, slots=True)
class In:
    """True if the document has the field, with one of the values."""

    field: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class InRange:
    """True if the document has the field and its value is a number within the bounds."""

    field: str
    gt: float | None = None
    gte: float | None = None
    lt: float | None = None
    lte: float | None = None


@dataclass(frozen=True, slots=True)
class InPeriod:
    """True if the document has the field and its value is an ISO date within the bounds.

    Bounds are Unix microseconds, the end excluded. None: no bound.
    """

    field: str
    start_us: int | None = None
    end_us: int | None = None


@dataclass(frozen=True, slots=True)
class Exists:
    """True if the document has the field, with at least one value."""

    field: str


@dataclass(frozen=True, slots=True)
class Prefix:
    """True if the document has the field and its value begins with the prefix."""

    field: str
    prefix: str


FieldTest: TypeAlias = In | InRange | InPeriod | Exists | Prefix
Filter: TypeAlias = And | Or | Not | FieldTest


def matches(wanted: Filter, fields: Mapping[str, MetadataValue]) -> bool:
    """Return whether a document with these fields passes the filter."""
    match wanted:
        case And(filters):
            return all(matches(one, fields) for one in filters)
        case Or(filters):
            return any(matches(one, fields) for one in filters)
        case Not(inner):
            return not matches(inner, fields)
        case _:
            values = texts_of(fields.get(wanted.field, []))
            return any(_passes(wanted, value) for value in values)


def simplified(wanted: Filter) -> Filter:
    """Return a filter of the same meaning without repeated conditions.

    And within And becomes one list, and so does Or within Or. Filters that differ in such ways only
    become equal.
    """
    match wanted:
        case And(filters):
            return _joined(And, filters)
        case Or(filters):
            return _joined(Or, filters)
        case Not(inner):
            plain = simplified(inner)
            return plain.filter if isinstance(plain, Not) else Not(plain)
        case In(field, values):
            return In(field, tuple(sorted(set(values))))
        case _:
            return wanted


def _joined(kind: type[And] | type[Or], filters: tuple[Filter, ...]) -> Filter:
    found: dict[Filter, None] = {}
    for one in map(simplified, filters):
        found |= dict.fromkeys(one.filters if isinstance(one, kind) else (one,))
    return next(iter(found)) if len(found) == 1 else kind(tuple(found))


def check_size(wanted: Filter) -> None:
    """Refuse filters whose evaluation would be expensive. Raises InvalidInput."""
    num_nodes = _count(wanted, depth=1)
    if num_nodes > MAX_NODES:
        raise InvalidInput("filter", f"has {num_nodes} conditions", f"use at most {MAX_NODES}")


def _count(wanted: Filter, depth: int) -> int:
    if depth > MAX_DEPTH:
        raise InvalidInput("filter", f"is nested deeper than {MAX_DEPTH}", "flatten it")
    match wanted:
        case And(filters) | Or(filters):
            return 1 + sum(_count(one, depth + 1) for one in filters)
        case Not(inner):
            return 1 + _count(inner, depth + 1)
        case In(_, values):
            return max(1, len(values))
        case _:
            return 1


def _passes(test: FieldTest, value: str) -> bool:
    match test:
        case In(_, values):
            return value in values
        case Prefix(_, prefix):
            return value.startswith(prefix)
        case InRange():
            return _in_range(test, value)
        case InPeriod():
            return _in_period(test, value)
        case Exists():
            return True


def _in_range(wanted: InRange, value: str) -> bool:
    number = number_of(value)
    if number is None:
        return False
    return (
        (wanted.gt is None or number > wanted.gt)
        and (wanted.gte is None or number >= wanted.gte)
        and (wanted.lt is None or number < wanted.lt)
        and (wanted.lte is None or number <= wanted.lte)
    )


def _in_period(wanted: InPeriod, value: str) -> bool:
    instant_us = instant_of(value)
    if instant_us is None:
        return False
    return (wanted.start_us is None or instant_us >= wanted.start_us) and (
        wanted.end_us is None or instant_us < wanted.end_us
    )
