"""The count of values and the depth agree with a parser's objects."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.access.json_bounds import (
    MAX_NESTING,
    MAX_VALUES,
    check_json,
    json_shape,
    question_max_bytes,
)
from ragcache_core.errors import InvalidInput, TooLarge

texts = st.text(st.sampled_from('a,[]{}":\\ \n\t\u20ac\U0001f600') | st.characters(codec="utf-8"))
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=60
)


def count(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(count, inner))


def depth(value: Any) -> int:
    if not isinstance(value, list | dict):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(depth, inner), default=0)


@given(values, st.booleans(), st.sampled_from([None, 0, 2, "\t"]))
def test_the_shape_is_that_of_the_parsed_value(
    value: Any, is_ascii: bool, indent: int | str | None
) -> None:
    body = json.dumps(value, ensure_ascii=is_ascii, indent=indent).encode()
    expected = (count(value), depth(value))
    assert json_shape(body, expected[0]) == expected
    assert json_shape(body, expected[0] - 1) is None


@given(st.binary() | st.text(st.sampled_from('"\\,[]{}:1 ')).map(str.encode))
def test_a_body_that_is_no_json_has_a_shape_or_none(body: bytes) -> None:
    shape = json_shape(body, 10)
    assert shape is None or shape[0] <= 10


@given(values, st.integers(1, 40))
def test_the_check_refuses_by_the_count_alone(value: Any, most: int) -> None:
    body = json.dumps(value).encode()
    if count(value) > most:
        with pytest.raises(TooLarge, match=f"has over {most} values"):
            check_json(body, max_values=most)
    else:
        check_json(body, max_values=most)


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
def test_deep_json_is_refused_without_a_parser(opening: str) -> None:
    with pytest.raises(InvalidInput, match="metadata: is nested over"):
        check_json(opening.encode() * (MAX_NESTING + 1), "metadata")


def test_nesting_up_to_the_bound_is_accepted() -> None:
    check_json(b"[" * MAX_NESTING + b"]" * MAX_NESTING)
    # A text has no structure.
    check_json(json.dumps("[{,}]" * MAX_VALUES).encode())


def test_a_question_may_have_what_its_model_holds() -> None:
    assert question_max_bytes(131_072) - question_max_bytes(0) == 16 * 131_072
