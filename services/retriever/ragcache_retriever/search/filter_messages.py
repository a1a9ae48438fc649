"""Translates the filter of a request, and names the path of a wrong part."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ragcache_core.errors import InvalidInput
from ragcache_core.retrieval.filters import (
    MAX_DEPTH,
    And,
    Exists,
    Filter,
    In,
    InRange,
    Not,
    Or,
    Prefix,
    check_size,
)
from ragcache_wire.v1 import retriever_pb2 as pb

MAX_FIELD_CHARS = 256


def filter_of(message: pb.Filter) -> Filter:
    """Return the filter that a message means.

    Raises:
        InvalidInput: It is incomplete, too large or too deep. The error names the path of the wrong
            part, such as ``filter.all[1].field.range``.
    """
    found = _filter(message, "filter", depth=1)
    check_size(found)
    return found


def _filter(message: pb.Filter, path: str, depth: int) -> Filter:
    if depth > MAX_DEPTH:
        raise InvalidInput(path, f"is nested deeper than {MAX_DEPTH}", "flatten the filter")
    match message.WhichOneof("condition"):
        case "all":
            return And(_filters(message.all.filters, f"{path}.all", depth))
        case "any":
            return Or(_filters(message.any.filters, f"{path}.any", depth))
        case "none":
            return Not(_filter(message.none, f"{path}.none", depth + 1))
        case "field":
            return _test(message.field, f"{path}.field")
        case _:
            raise InvalidInput(path, "has no condition", "set one of all, any, none and field")


def _filters(messages: Sequence[pb.Filter], path: str, depth: int) -> tuple[Filter, ...]:
    if not messages:
        raise InvalidInput(path, "is empty", "name at least one condition")
    return tuple(_filter(one, f"{path}[{i}]", depth + 1) for i, one in enumerate(messages))


def _test(message: pb.FieldFilter, path: str) -> Filter:
    name = message.name
    if not 1 <= len(name) <= MAX_FIELD_CHARS:
        raise InvalidInput(
            f"{path}.name",
            f"has {len(name)} characters",
            f"name a metadata field in 1 to {MAX_FIELD_CHARS}",
        )
    match message.WhichOneof("test"):
        case "one_of":
            if not message.one_of.values:
                raise InvalidInput(f"{path}.one_of", "is empty", "list at least one value")
            return In(name, tuple(message.one_of.values))
        case "range":
            return _range(name, message.range, f"{path}.range")
        case "exists":
            return Exists(name) if message.exists else Not(Exists(name))
        case "prefix":
            return Prefix(name, message.prefix)
        case _:
            raise InvalidInput(path, "has no test", "set one of one_of, range, exists and prefix")


def _range(name: str, message: pb.Range, path: str) -> InRange:
    bounds: dict[str, float] = {}
    for descriptor, value in message.ListFields():
        bounds[descriptor.name] = value
    if not bounds:
        raise InvalidInput(path, "has no bound", "set gt, gte, lt or lte")
    for bound, value in bounds.items():
        if math.isnan(value):
            raise InvalidInput(f"{path}.{bound}", "is not a number", "send a number")
    return InRange(name, **bounds)
