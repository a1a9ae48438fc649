"""A filter means the same as the boolean formula that it spells."""

from __future__ import annotations

import math
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.errors import InvalidInput
from ragcache_core.retrieval.filters import (
    MAX_DEPTH,
    MAX_NODES,
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
    check_size,
    matches,
    simplified,
)
from ragcache_core.retrieval.metadata import MetadataValue, Scalar, instant_of, texts_of

Fields: TypeAlias = dict[str, MetadataValue]

names = st.sampled_from(["team", "year", "path"])
values = st.sampled_from(
    ["", "a", "ab", "b", "7", "-1.5", "1e3", "nan", "inf", "ten", "true", "2024-02-20"]
)
scalars: st.SearchStrategy[Scalar] = values | st.sampled_from([7, -1.5, True, False])
documents: st.SearchStrategy[Fields] = st.dictionaries(
    names, scalars | st.lists(scalars, max_size=3)
)
bounds = st.none() | st.sampled_from([-math.inf, -1.5, 0.0, 7.0, 1000.0])
instants = st.none() | st.sampled_from([0, instant_of("2024-02-20"), 2**60])
tests = (
    st.builds(In, names, st.lists(values, max_size=3).map(tuple))
    | st.builds(InRange, names, bounds, bounds, bounds, bounds)
    | st.builds(InPeriod, names, instants, instants)
    | st.builds(Exists, names)
    | st.builds(Prefix, names, values)
)
filters: st.SearchStrategy[Filter] = st.recursive(
    tests,
    lambda inner: (
        st.builds(And, st.lists(inner, max_size=3).map(tuple))
        | st.builds(Or, st.lists(inner, max_size=3).map(tuple))
        | st.builds(Not, inner)
    ),
    max_leaves=8,
)


@given(filters, documents)
def test_a_simplified_filter_means_the_same(one: Filter, fields: Fields) -> None:
    plain = simplified(one)
    assert matches(plain, fields) == matches(one, fields)
    assert simplified(plain) == plain


def test_repeated_conditions_are_dropped() -> None:
    a, b = Exists("a"), In("b", ("x", "y"))
    repeated = In("b", ("y", "x", "y"))
    assert simplified(And((a, And((a, repeated)), b, a))) == And((a, b))
    assert simplified(Or((a, Or((a,)), Not(Not(a))))) == a
    assert simplified(And((Or((a, b)), a))) == And((Or((a, b)), a))


@given(filters, documents)
def test_not_is_the_opposite(one: Filter, fields: Fields) -> None:
    assert matches(Not(one), fields) != matches(one, fields)


@given(st.lists(filters, max_size=3).map(tuple), documents)
def test_and_is_not_or_of_opposites(some: tuple[Filter, ...], fields: Fields) -> None:
    opposites = Or(tuple(Not(one) for one in some))
    assert matches(And(some), fields) == matches(Not(opposites), fields)
    assert matches(And(some), fields) == all(matches(one, fields) for one in some)


@given(tests, documents)
def test_a_test_of_a_missing_field_fails(one: Filter, fields: Fields) -> None:
    assert isinstance(one, FieldTest)
    fields.pop(one.field, None)
    assert not matches(one, fields)


@given(names, st.lists(values, max_size=3).map(tuple), documents)
def test_in_is_or_of_its_values(name: str, wanted: tuple[str, ...], fields: Fields) -> None:
    each = Or(tuple(In(name, (value,)) for value in wanted))
    assert matches(In(name, wanted), fields) == matches(each, fields)


@given(names, documents)
def test_every_value_has_the_empty_prefix(name: str, fields: Fields) -> None:
    assert matches(Prefix(name, ""), fields) == matches(Exists(name), fields)


@given(names, values, documents)
def test_a_prefix_of_a_value_is_what_it_begins_with(name: str, prefix: str, fields: Fields) -> None:
    found = [text[: len(prefix)] for text in texts_of(fields.get(name, []))]
    assert matches(Prefix(name, prefix), fields) == (prefix in found)


@given(st.builds(InRange, names, bounds, bounds, bounds, bounds), st.dictionaries(names, scalars))
def test_a_range_holds_if_each_of_its_bounds_does(wanted: InRange, fields: Fields) -> None:
    each = And(
        (
            InRange(wanted.field),
            InRange(wanted.field, gt=wanted.gt),
            InRange(wanted.field, gte=wanted.gte),
            InRange(wanted.field, lt=wanted.lt),
            InRange(wanted.field, lte=wanted.lte),
        )
    )
    assert matches(wanted, fields) == matches(each, fields)


@given(st.floats(allow_nan=False))
def test_a_number_lies_between_itself(number: float) -> None:
    fields = {"n": repr(number)}
    assert matches(InRange("n", gte=number, lte=number), fields)
    assert not matches(InRange("n", gt=number), fields)
    assert not matches(InRange("n", lt=number), fields)


@pytest.mark.parametrize("value", ["nan", "ten", "", "1,5", True, "2024-02-20", [], ["ten"]])
def test_what_is_no_number_is_in_no_range(value: MetadataValue) -> None:
    assert not matches(InRange("n"), {"n": value})


@given(scalars, scalars, tests)
def test_a_list_passes_a_test_if_one_of_its_values_does(
    first: str, second: str, test: FieldTest
) -> None:
    each = [matches(test, {test.field: value}) for value in (first, second)]
    assert matches(test, {test.field: [first, second]}) == any(each)


def test_bounds_hold_for_the_same_value_of_a_list() -> None:
    assert not matches(InRange("n", gte=2, lte=3), {"n": [1, 4]})


def test_an_empty_list_is_no_value() -> None:
    assert not matches(Exists("tags"), {"tags": []})


def test_a_period_includes_its_start_and_excludes_its_end() -> None:
    day = instant_of("2024-02-20")
    assert day is not None
    fields: Fields = {"date": "2024-02-20T00:00:00Z"}
    assert matches(InPeriod("date", day), fields)
    assert not matches(InPeriod("date", None, day), fields)
    assert matches(InPeriod("date", day, day + 1), fields)


@pytest.mark.parametrize("value", [20240220, "20 February 2024", "2024", "2024-13-01", True])
def test_what_is_no_date_is_in_no_period(value: MetadataValue) -> None:
    assert not matches(InPeriod("date"), {"date": value})


def _size(one: Filter) -> int:
    if isinstance(one, And | Or):
        return 1 + sum(_size(inner) for inner in one.filters)
    if isinstance(one, Not):
        return 1 + _size(one.filter)
    return max(1, len(one.values)) if isinstance(one, In) else 1


def _depth(one: Filter) -> int:
    if isinstance(one, And | Or):
        return 1 + max((_depth(inner) for inner in one.filters), default=0)
    return 1 + _depth(one.filter) if isinstance(one, Not) else 1


@given(filters, st.integers(0, 2 * MAX_NODES), st.integers(0, 2 * MAX_DEPTH))
def test_a_filter_is_refused_if_it_is_too_large_or_too_deep(
    one: Filter, num_values: int, num_nots: int
) -> None:
    wanted: Filter = And((one, In("team", tuple(map(str, range(num_values))))))
    for _ in range(num_nots):
        wanted = Not(wanted)
    if _size(wanted) <= MAX_NODES and _depth(wanted) <= MAX_DEPTH:
        check_size(wanted)
        return
    with pytest.raises(InvalidInput) as caught:
        check_size(wanted)
    assert caught.value.field == "filter"
