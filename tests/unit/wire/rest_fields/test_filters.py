"""Filters of the REST API mean what the filter language says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import TypeAdapter, ValidationError

from ragcache_core.errors import InvalidInput
from ragcache_core.retrieval.filters import MAX_DEPTH, matches
from ragcache_gateway.http.errors import from_validation
from ragcache_wire.rest_fields.filters import FilterField, FilterIn, filter_message

ADAPTER: TypeAdapter[FilterIn] = TypeAdapter(FilterField)
SCHEMA = Draft202012Validator(ADAPTER.json_schema())

KEYS = ("team", "year")
VALUES = ("core", "web", "7", "2024", "x")


def parsed(value: Any) -> FilterIn:
    try:
        return ADAPTER.validate_python(value)
    except ValidationError as error:
        raise from_validation([dict(one) for one in error.errors()]) from error


def passes(wanted: Any, fields: dict[str, str]) -> bool:
    """Evaluate the JSON of a filter without the filter language."""
    if "key" in wanted:
        return condition_passes(wanted, fields.get(wanted["key"]))
    return (
        all(passes(one, fields) for one in wanted.get("must", []))
        and ("should" not in wanted or any(passes(one, fields) for one in wanted["should"]))
        and not any(passes(one, fields) for one in wanted.get("must_not", []))
    )


def condition_passes(wanted: Any, value: str | None) -> bool:
    if "exists" in wanted:
        return (value is not None) == wanted["exists"]
    if value is None:
        return False
    if "prefix" in wanted:
        return value.startswith(wanted["prefix"])
    if "match" in wanted:
        match = wanted["match"]
        return value in (match["any"] if "any" in match else [match["value"]])
    return value.isdigit() and int(value) >= wanted["range"]["gte"]


KEY = st.sampled_from(KEYS)
CONDITION = st.one_of(
    st.builds(
        lambda key, value: {"key": key, "match": {"value": value}}, KEY, st.sampled_from(VALUES)
    ),
    st.builds(
        lambda key, values: {"key": key, "match": {"any": values}},
        KEY,
        st.lists(st.sampled_from(VALUES), min_size=1, max_size=3),
    ),
    st.builds(lambda key, bound: {"key": key, "range": {"gte": bound}}, KEY, st.integers(0, 3000)),
    st.builds(lambda key, prefix: {"key": key, "prefix": prefix}, KEY, st.sampled_from("cw2")),
    st.builds(lambda key, there: {"key": key, "exists": there}, KEY, st.booleans()),
)


def with_lists(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    conditions = st.lists(inner, min_size=1, max_size=2)
    lists = st.fixed_dictionaries(
        {}, optional={"must": conditions, "should": conditions, "must_not": conditions}
    )
    return lists.filter(bool)


FILTERS = with_lists(st.recursive(CONDITION, with_lists, max_leaves=6))
FIELDS = st.dictionaries(KEY, st.sampled_from(VALUES))


@given(wanted=FILTERS, fields=FIELDS)
def test_a_filter_keeps_its_meaning(wanted: Any, fields: dict[str, str]) -> None:
    assert matches(parsed(wanted).to_filter(), fields) == passes(wanted, fields)


def test_a_number_or_a_boolean_matches_the_text_of_its_json_form() -> None:
    wanted = parsed({"must": [{"key": "year", "match": {"value": 2024}}]}).to_filter()
    assert matches(wanted, {"year": "2024"})
    wanted = parsed({"must": [{"key": "draft", "match": {"any": [True]}}]}).to_filter()
    assert matches(wanted, {"draft": "true"})
    wanted = parsed({"must": [{"key": "year", "match": {"value": 2024.0}}]}).to_filter()
    assert matches(wanted, {"year": "2024"})
    wanted = parsed({"must": [{"key": "version", "match": {"value": 1.5}}]}).to_filter()
    assert matches(wanted, {"version": [1.5]})


def documents_in(bounds: dict[str, Any], key: str = "date") -> str:
    """Return which of four documents are within bounds."""
    fields = {
        "a": "2023-11-02",
        "b": "2024-02-20",
        "c": "2024-02-20T10:00:00Z",
        "d": "2024-02-21T00:30:00+01:00",
        "e": "soon",
    }
    wanted = parsed({"must": [{"key": key, "range": bounds}]}).to_filter()
    return "".join(name for name, value in fields.items() if matches(wanted, {"date": value}))


@pytest.mark.parametrize(
    ("bounds", "found"),
    [
        ({"gte": "2024-02-20"}, "bcd"),
        ({"gt": "2024-02-20"}, ""),
        ({"lt": "2024-02-20"}, "a"),
        ({"lte": "2024-02-20"}, "abcd"),
        ({"gt": "2024-02-19", "lt": "2024-02-21"}, "bcd"),
        ({"gt": "2024-02-20T00:00:00Z"}, "cd"),
        ({"lte": "2024-02-20T10:00"}, "abc"),
        ({"gte": "2024-02-20T11:00:00+01:00", "lt": "2024-02-20 23:30"}, "c"),
        ({"gte": "2024-02-20", "gt": "2023-01-01"}, "bcd"),
    ],
)
def test_bounds_may_be_dates(bounds: dict[str, str], found: str) -> None:
    assert documents_in(bounds) == found


def test_dates_bound_the_time_of_the_last_change() -> None:
    condition = {"key": "updated_unix_ms", "range": {"gte": "1970-01-02", "lte": "1970-01-02"}}
    wanted = parsed({"must": [condition]}).to_filter()
    day_ms = 86_400_000
    found = [ms for ms in (day_ms - 1, day_ms, 2 * day_ms - 1, 2 * day_ms)
             if matches(wanted, {"updated_unix_ms": ms})]  # fmt: skip
    assert found == [day_ms, 2 * day_ms - 1]


@pytest.mark.parametrize(
    ("bounds", "field", "problem"),
    [
        ({"gte": "2024"}, "must[0].range.gte", "send a number, or an ISO date such as"),
        ({"lt": "yesterday"}, "must[0].range.lt", "send a number, or an ISO date such as"),
        ({"lt": "2024-02-30"}, "must[0].range.lt", "send a number, or an ISO date such as"),
        ({"gte": 2024, "lt": "2025-01-01"}, "must[0].range", "a number and a date"),
    ],
)
def test_other_bounds_are_refused(bounds: dict[str, Any], field: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem) as raised:
        documents_in(bounds)
    assert raised.value.field == field


def test_a_filter_becomes_the_retrievers_message() -> None:
    wanted = parsed(
        {
            "must": [{"key": "team", "match": {"value": "core"}}],
            "should": [{"key": "year", "range": {"gte": 2024, "lt": 2026}}],
            "must_not": [{"key": "id", "prefix": "drafts/"}, {"key": "old", "exists": True}],
        }
    )
    message = filter_message(wanted.checked("filter"))
    team, year, draft, old = message.all.filters
    assert list(team.field.one_of.values) == ["core"]
    bounds = year.field.range
    assert (bounds.gte, bounds.lt, bounds.HasField("gt")) == (2024, 2026, False)
    assert draft.none.field.prefix == "drafts/"
    assert old.none.field.exists


WRONG: tuple[tuple[Any, str], ...] = (
    ({}, "body"),
    ({"must": []}, "must"),
    ({"must": [{"key": "a"}]}, "must[0]"),
    ({"must": [{"key": "", "exists": True}]}, "must[0].key"),
    ({"must": [{"key": "a", "exists": True, "prefix": "b"}]}, "must[0]"),
    ({"must": [{"key": "a", "match": {}}]}, "must[0].match"),
    ({"must": [{"key": "a", "match": {"any": []}}]}, "must[0].match.any"),
    ({"must": [{"key": "a", "range": {}}]}, "must[0].range"),
    ({"must": [{"key": "a", "range": {"gt": float("nan")}}]}, "must[0].range.gt"),
    ({"must": [{"should": [{"key": "a"}]}]}, "must[0].should[0]"),
    ({"must": [{"key": "a", "match": {"value": float("nan")}}]}, "must[0].match.value"),
    ({"must": [{"key": "a", "match": {"value": ["b"]}}]}, "must[0].match.value"),
    ({"must": [{"key": "a", "range": {"gt": True}}]}, "must[0].range.gt"),
    ({"must": [{"key": "a", "match": {"any": ["b", "\0"]}}]}, "must[0].match.any[1]"),
    ({"must": [{"key": "a", "match": {"value": 1, "any": [1]}}]}, "must[0].match"),
    ({"and": []}, "and"),
)


@pytest.mark.parametrize(("wanted", "field"), WRONG)
def test_a_wrong_filter_names_the_path(wanted: Any, field: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        parsed(wanted)
    assert raised.value.field == field


@pytest.mark.parametrize("wanted", [wanted for wanted, _ in WRONG])
def test_the_schema_does_not_allow_a_wrong_filter(wanted: Any) -> None:
    # JSON has no such number.
    if "nan" not in repr(wanted):
        assert not SCHEMA.is_valid(wanted)


@given(wanted=FILTERS)
def test_the_schema_allows_filters(wanted: Any) -> None:
    assert SCHEMA.is_valid(wanted)


def test_a_filter_that_is_too_deep_is_refused() -> None:
    wanted: Any = {"key": "a", "exists": True}
    for _ in range(5000):
        wanted = {"must": [wanted]}
    with pytest.raises(InvalidInput, match="too deeply"):
        parsed(wanted)
    wanted = {"key": "a", "exists": True}
    for _ in range(MAX_DEPTH + 1):
        wanted = {"must_not": [wanted]}
    with pytest.raises(InvalidInput, match=r"ragcache\.filter: is nested deeper"):
        parsed(wanted).checked("ragcache.filter")


def test_a_filter_with_too_many_values_is_refused() -> None:
    wanted = parsed({"must": [{"key": "a", "match": {"any": list(map(str, range(300)))}}]})
    with pytest.raises(InvalidInput, match="filter: has 300 conditions"):
        wanted.checked("filter")
