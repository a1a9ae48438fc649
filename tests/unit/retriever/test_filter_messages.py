"""A filter message becomes the filter that it means, or an error that names its wrong part."""

from __future__ import annotations

import math

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.errors import InvalidInput
from ragcache_core.retrieval.filters import (
    MAX_DEPTH,
    And,
    Exists,
    Filter,
    In,
    InPeriod,
    InRange,
    Not,
    Or,
    Prefix,
)
from ragcache_retriever.messages.requests import MAX_FIELD_CHARS, filter_of
from ragcache_wire.v1 import retriever_pb2 as pb


def parsed(text: str) -> pb.Filter:
    return text_format.Parse(text, pb.Filter())


def test_every_kind_of_condition() -> None:
    message = parsed("""
        all {
          filters { field { name: "team" one_of { values: "a" values: "b" } } }
          filters { field { name: "year" range { gte: 2020 lt: 2024.5 } } }
          filters { any {
            filters { field { name: "path" prefix: "docs/" } }
            filters { field { name: "draft" exists: false } }
          } }
          filters { none { field { name: "secret" exists: true } } }
        }
    """)
    assert filter_of(message) == And(
        (
            In("team", ("a", "b")),
            InRange("year", gte=2020.0, lt=2024.5),
            Or((Prefix("path", "docs/"), Not(Exists("draft")))),
            Not(Exists("secret")),
        )
    )


def test_a_bound_of_zero_is_a_bound() -> None:
    message = parsed('field { name: "n" range { gt: 0 } }')
    assert filter_of(message) == InRange("n", gt=0.0)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("", "filter"),
        ("all {}", "filter.all"),
        ("any {}", "filter.any"),
        ("none {}", "filter.none"),
        ('all { filters { field { name: "a" exists: true } } filters {} }', "filter.all[1]"),
        ("field { exists: true }", "filter.field.name"),
        ('field { name: "a" }', "filter.field"),
        ('field { name: "a" one_of {} }', "filter.field.one_of"),
        (
            'all { filters { field { name: "a" exists: true } }'
            ' filters { field { name: "b" range {} } } }',
            "filter.all[1].field.range",
        ),
        ('field { name: "a" period {} }', "filter.field.period"),
        ('none { any { filters { field { name: "a" } } } }', "filter.none.any[0].field"),
    ],
)
def test_an_incomplete_filter_names_its_path(text: str, path: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        filter_of(parsed(text))
    assert caught.value.field == path


def test_a_bound_is_a_number() -> None:
    message = pb.Filter(field=pb.FieldFilter(name="n", range=pb.Range(lte=math.nan)))
    with pytest.raises(InvalidInput) as caught:
        filter_of(message)
    assert caught.value.field == "filter.field.range.lte"


def test_a_long_field_name_is_refused() -> None:
    message = pb.Filter(field=pb.FieldFilter(name="n" * (MAX_FIELD_CHARS + 1), exists=True))
    with pytest.raises(InvalidInput) as caught:
        filter_of(message)
    assert caught.value.field == "filter.field.name"


def test_depth_and_size_are_bounded() -> None:
    deep = pb.Filter(field=pb.FieldFilter(name="n", exists=True))
    for _ in range(MAX_DEPTH):
        deep = pb.Filter(none=deep)
    with pytest.raises(InvalidInput) as caught:
        filter_of(deep)
    assert caught.value.field == "filter" + MAX_DEPTH * ".none"
    wide = pb.Filter(field=pb.FieldFilter(name="n", one_of=pb.TextList(values=["v"] * 1000)))
    with pytest.raises(InvalidInput):
        filter_of(wide)


names = st.text(min_size=1, max_size=8)
numbers = st.floats(allow_nan=False)
instants = st.integers(-(2**63), 2**63 - 1)
wanted_filters: st.SearchStrategy[Filter] = st.recursive(
    st.builds(In, names, st.lists(st.text(max_size=4), min_size=1, max_size=3).map(tuple))
    | st.builds(Exists, names)
    | st.builds(Prefix, names, st.text(max_size=4))
    | st.builds(InRange, names, numbers, st.none() | numbers, st.none() | numbers)
    | st.builds(InPeriod, names, instants, st.none() | instants),
    lambda inner: (
        st.builds(And, st.lists(inner, min_size=1, max_size=3).map(tuple))
        | st.builds(Or, st.lists(inner, min_size=1, max_size=3).map(tuple))
        | st.builds(Not, inner)
    ),
    max_leaves=6,
)


def message_of(wanted: Filter) -> pb.Filter:
    match wanted:
        case And(filters):
            return pb.Filter(all=pb.Filters(filters=map(message_of, filters)))
        case Or(filters):
            return pb.Filter(any=pb.Filters(filters=map(message_of, filters)))
        case Not(inner):
            return pb.Filter(none=message_of(inner))
    test = pb.FieldFilter(name=wanted.field)
    match wanted:
        case In(_, values):
            test.one_of.values.extend(values)
        case Exists():
            test.exists = True
        case Prefix(_, prefix):
            test.prefix = prefix
        case InRange(_, gt, gte, lt, lte):
            test.range.CopyFrom(pb.Range(gt=gt, gte=gte, lt=lt, lte=lte))
        case InPeriod(_, start_us, end_us):
            test.period.CopyFrom(pb.Period(start_us=start_us, end_us=end_us))
    return pb.Filter(field=test)


@given(wanted_filters)
def test_a_message_means_the_filter_that_it_was_made_from(wanted: Filter) -> None:
    assert filter_of(message_of(wanted)) == wanted
