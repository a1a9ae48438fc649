"""Metadata in requests: typed values, nulls left out, and errors that name the field."""

from __future__ import annotations

import math
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import TypeAdapter, ValidationError

from ragcache_core.errors import InvalidInput
from ragcache_core.retrieval.metadata import MAX_LIST_VALUES
from ragcache_gateway.http.errors import from_validation
from ragcache_wire.rest_fields.metadata import MetadataIn, Name

METADATA: TypeAdapter[dict[str, Any]] = TypeAdapter(MetadataIn)
NAME: TypeAdapter[str] = TypeAdapter(Name)
SCHEMA = Draft202012Validator(METADATA.json_schema())


def test_values_keep_their_types() -> None:
    fields = {"a": "007", "b": 7, "c": 7.5, "d": True, "e": ["x", 1, 0.5, False], "f": []}
    found = METADATA.validate_python(fields)
    assert found == fields
    assert [type(value) for value in found.values()] == [str, int, float, bool, list, list]
    assert SCHEMA.is_valid(fields)


def test_nulls_are_left_out() -> None:
    fields = {"a": None, "b": [None, "x", None]}
    assert METADATA.validate_python(fields) == {"b": ["x"]}
    assert SCHEMA.is_valid(fields)


@pytest.mark.parametrize(
    ("value", "field", "fix"),
    [
        ({"city": "Bern"}, "k", "write the members of an object as own fields"),
        ([["x"]], "k[0]", "send a text, a number, true or false"),
        ([{"a": 1}], "k[0]", "send a text, a number, true or false"),
        ("a\0", "k", "send text"),
        (math.inf, "k", "finite"),
        ([0] * (MAX_LIST_VALUES + 1), "k", str(MAX_LIST_VALUES)),
    ],
)
def test_other_values_are_refused_with_their_path(value: Any, field: str, fix: str) -> None:
    with pytest.raises(ValidationError) as caught:
        METADATA.validate_python({"first": 1, "k": value})
    error = from_validation([dict(one) for one in caught.value.errors()])
    assert isinstance(error, InvalidInput)
    assert error.field == field
    assert fix in str(error)
    if value != math.inf:  # JSON has no such number
        assert not SCHEMA.is_valid({"k": value})


def test_a_name_may_be_a_number() -> None:
    assert [NAME.validate_python(one) for one in ("a", 1001, 2.5)] == ["a", "1001", "2.5"]


@pytest.mark.parametrize("value", [True, None, ["a"], {}])
def test_a_name_is_of_no_other_type(value: Any) -> None:
    with pytest.raises(ValidationError):
        NAME.validate_python(value)
