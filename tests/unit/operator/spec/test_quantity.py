"""Parsing and formatting of Kubernetes quantities."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_operator.spec.quantity import format_bytes, parse_millis, parse_quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("128974848", 128974848),
        ("129e6", 129_000_000),
        ("129M", 129_000_000),
        ("123Mi", 123 << 20),
        ("1.5Gi", 3 << 29),
        (".5Ki", 512),
        ("2.", 2),
        ("1E", 10**18),
        ("1Ei", 1 << 60),
        ("1E3", 1000),
        ("1e-3", 1),
        ("1500m", 2),
        ("1n", 1),
        ("-1k", -1000),
        ("+2u", 1),
    ],
)
def test_values(text: str, value: int) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize(
    ("text", "millis"),
    [("250m", 250), ("2", 2000), ("0.1", 100), ("1500u", 2), ("1k", 1_000_000), ("1e1", 10_000)],
)
def test_thousandths_count_cores(text: str, millis: int) -> None:
    assert parse_millis(text) == millis


@pytest.mark.parametrize(
    "text",
    [
        *("", " 1", "1 Gi", "1GB", "1gi", "Gi", "1.2.3", "1e", "1ee3", "0x10", "1_000", "nan"),
        *("8Ei", "1e99", "1" * 65, "\u0661Gi"),
    ],
)
def test_text_that_kubernetes_rejects(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a quantity|needs more than 63 bits"):
        parse_quantity(text)


@given(st.integers(0, 2**63 - 1))
def test_formatting_loses_nothing(num_bytes: int) -> None:
    assert parse_quantity(format_bytes(num_bytes)) == num_bytes


@given(st.text(max_size=70))
def test_any_text_is_a_value_or_a_value_error(text: str) -> None:
    try:
        value = parse_quantity(text)
    except ValueError:
        return
    assert isinstance(value, int)


@given(st.integers(1, 2**40), st.sampled_from(["", "k", "M", "Ki", "Mi"]))
def test_values_are_proportional(number: int, suffix: str) -> None:
    unit = parse_quantity(f"1{suffix}")
    assert parse_quantity(f"{number}{suffix}") == number * unit
