"""Metadata of documents in the REST API, and values of filters."""

from __future__ import annotations

import math
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, Tag, WithJsonSchema

from ragcache_core.retrieval.metadata import MAX_LIST_VALUES, SCALARS, MetadataValue, name_of
from ragcache_wire.rest_fields.fields import Text, union_by, validation_error


def _finite(value: int | float) -> int | float:
    if isinstance(value, float) and not math.isfinite(value):
        raise validation_error("is not a finite number", f"send {SCALARS}")
    return value


_Number: TypeAlias = Annotated[
    Any, AfterValidator(_finite), WithJsonSchema({"type": "number"}), Tag("~number")
]
"""An integer or a float, which stays what it is."""


def _scalar_tag(value: object) -> str | None:
    match value:
        case bool():
            return "~bool"
        case int() | float():
            return "~number"
        case str():
            return "~text"
    return None


def _value_tag(value: object) -> str | None:
    return "~list" if isinstance(value, list) else _scalar_tag(value)


ScalarIn: TypeAlias = Annotated[
    Annotated[bool, Tag("~bool")] | _Number | Annotated[Text, Tag("~text")],
    union_by(_scalar_tag, SCALARS),
]
"""A text, a number or a truth value."""

_ValueIn: TypeAlias = Annotated[
    Annotated[bool, Tag("~bool")]
    | _Number
    | Annotated[Text, Tag("~text")]
    | Annotated[list[ScalarIn | None], Field(max_length=MAX_LIST_VALUES), Tag("~list")],
    union_by(
        _value_tag, f"{SCALARS}, or a list of these; write the members of an object as own fields"
    ),
]


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [one for one in value if one is not None] if isinstance(value, list) else value
        for name, value in fields.items()
        if value is not None
    }


MetadataIn: TypeAlias = Annotated[dict[Text, _ValueIn | None], AfterValidator(_without_nulls)]
"""Metadata of a request. Nulls are left out."""

MetadataOut: TypeAlias = dict[str, MetadataValue]
"""Metadata of a reply."""


def _name(value: object) -> object:
    name = name_of(value)
    return value if name is None else name


Name: TypeAlias = Annotated[
    Text,
    BeforeValidator(_name),
    WithJsonSchema({"anyOf": [{"type": "string", "pattern": r"^[^\u0000]*$"}, {"type": "number"}]}),
]
"""A text for which clients also send a number, such as an id."""
