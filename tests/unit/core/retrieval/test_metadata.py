"""Values of metadata have one text, and perhaps one number or one instant."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.errors import InvalidInput
from ragcache_core.retrieval.metadata import (
    MAX_LIST_VALUES,
    Scalar,
    checked_metadata,
    end_of,
    instant_of,
    name_of,
    number_of,
    text_of,
)

HOUR_US = 3_600_000_000


@pytest.mark.parametrize(
    ("value", "text"),
    [("007", "007"), (7, "7"), (7.0, "7"), (-0.5, "-0.5"), (True, "true"), (1e300, "1e+300")],
)
def test_filters_compare_the_json_form(value: Scalar, text: str) -> None:
    assert text_of(value) == text


@given(st.floats(allow_nan=False))
def test_the_text_of_a_number_spells_it(number: float) -> None:
    assert number_of(text_of(number)) == number


@pytest.mark.parametrize("text", ["nan", "ten", "", "1,5", "true"])
def test_other_texts_are_no_numbers(text: str) -> None:
    assert number_of(text) is None


@pytest.mark.parametrize(("value", "name"), [(1001, "1001"), (2.5, "2.5"), ("a", "a")])
def test_a_name_may_be_a_number(value: object, name: str) -> None:
    assert name_of(value) == name


@pytest.mark.parametrize("value", [True, None, ["a"], {"a": 1}])
def test_a_name_is_of_no_other_type(value: object) -> None:
    assert name_of(value) is None


@given(st.datetimes(timezones=st.timezones()))
def test_a_date_time_with_a_zone_is_its_instant(time: datetime) -> None:
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    offset = time.utcoffset()
    # ISO 8601 has no offsets with seconds, which some zones had long ago.
    if offset is None or offset.total_seconds() % 60:
        return
    wanted_us = round((time.replace(tzinfo=UTC) - epoch - offset).total_seconds() * 1e6)
    found_us = instant_of(time.isoformat())
    assert found_us is not None
    assert abs(found_us - wanted_us) <= 64, "float seconds of far years are that coarse"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2024-09-01", "2024-09-01T00:00:00Z"),
        ("2024-09-01T10:00", "2024-09-01T10:00:00Z"),
        ("2024-09-01 10:00:00", "2024-09-01t10:00:00z"),
        ("2024-09-01T12:00:00+02:00", "2024-09-01T10:00:00Z"),
        ("2024-09-01T10:00:00.250000900Z", "2024-09-01T10:00:00,25"),
        (" 2024-09-01 ", "2024-09-01"),
    ],
)
def test_one_instant_has_several_forms(one: str, other: str) -> None:
    assert instant_of(one) == instant_of(other) is not None


@pytest.mark.parametrize(
    "text",
    ["2024", "2024-02", "20240220", "2024-02-30", "2024-2-3", "1 May 2024", "2024-W05-1", "",
     "2024-02-20T25:00", "2024-02-20T10", "v2024-02-20", "2024-02-20T10:00:00 Europe/Berlin"],
)  # fmt: skip
def test_other_texts_are_no_dates(text: str) -> None:
    assert instant_of(text) is None
    assert end_of(text) is None


def test_a_date_ends_with_its_day_and_a_time_at_once() -> None:
    day_us = instant_of("2024-02-20")
    assert day_us is not None
    assert end_of("2024-02-20") == day_us + 24 * HOUR_US
    assert end_of("2024-02-20T00:00:00Z") == day_us + 1


def test_the_first_and_the_last_year_have_zones() -> None:
    first, last = instant_of("0001-01-01T00:00:00+14:00"), instant_of("9999-12-31T23:00:00-12:00")
    assert first is not None
    assert last is not None
    assert -(2**63) < first < 0 < last < 2**63


def test_nulls_are_left_out() -> None:
    found = checked_metadata("m", {"a": None, "b": 1, "c": ["x", None, True], "d": []})
    assert found == {"b": 1, "c": ["x", True], "d": []}


@pytest.mark.parametrize(
    ("value", "path", "fix"),
    [
        ({"city": "Bern"}, "m.k", "k.NAME"),
        ([["a"]], "m.k[0]", "a text, a number"),
        ([1, {"a": 1}], "m.k[1]", "fields of their own"),
        (math.nan, "m.k", "a text, a number"),
        ([math.inf], "m.k[0]", "a text, a number"),
        ([1] * (MAX_LIST_VALUES + 1), "m.k", str(MAX_LIST_VALUES)),
    ],
)
def test_other_values_are_refused_with_their_path(value: Any, path: str, fix: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        checked_metadata("m", {"first": 1, "k": value})
    assert caught.value.field == path
    assert fix in caught.value.fix
