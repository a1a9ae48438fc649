"""ReusePlan: JSON and back, and every malformed plan is refused by the name of its field."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.errors import InvalidInput
from ragcache_core.plan.reuse_plan import (
    MAX_ALPHA,
    MAX_SEGMENTS,
    PLAIN_DOMAIN,
    Action,
    ReusePlan,
    Segment,
    document_name,
)
from ragcache_core.store_api import MAX_NAME_CHARS


@st.composite
def plans(draw: st.DrawFn) -> ReusePlan:
    segments = []
    position = 0
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=6)):
        start = position + gap
        position = start + length
        chunk = draw(st.binary(min_size=16, max_size=16))
        action, document = draw(st.sampled_from(Action)), draw(st.text(max_size=8))
        segments.append(Segment(chunk, start, position, action, document))
    text = st.text(min_size=1, max_size=128)
    planned_at_ms = draw(st.integers(0, 2**63 - 1))
    share = draw(st.floats(0, 1))
    domain = draw(text.filter(lambda name: not name.startswith(PLAIN_DOMAIN)))
    alpha, trial = draw(st.none() | st.floats(0, MAX_ALPHA)), draw(st.booleans())
    plan = ReusePlan(
        draw(text), domain, tuple(segments), planned_at_ms, share, alpha=alpha, trial=trial
    )
    return replace(plan, handoff=not (plan.blends or trial) and draw(st.booleans()))


def valid() -> dict[str, Any]:
    segments = (Segment(bytes(16), 0, 4), Segment(bytes(16), 4, 9, Action.COMPUTE))
    return ReusePlan("request-1", "public", segments).to_json()


@given(plans())
def test_a_plan_round_trips_through_json(plan: ReusePlan) -> None:
    assert ReusePlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
)


@given(anything)
def test_any_other_json_value_is_rejected(value: object) -> None:
    with pytest.raises(InvalidInput, match=r"^ragcache"):
        ReusePlan.from_json(value)


def blamed(plan: object) -> str:
    """The field that is refused; the plan's own name when it is taken."""
    try:
        ReusePlan.from_json(plan)
    except InvalidInput as error:
        return error.field
    return "ragcache"


FIELDS = [
    "v",
    "request",
    "domain",
    "segments",
    "planned_at_ms",
    "recompute_share",
    "handoff",
    "alpha",
    "trial",
]


@given(st.sampled_from(FIELDS), anything)
def test_no_value_of_a_field_breaks_the_parser(field: str, value: object) -> None:
    assert blamed(valid() | {field: value}).startswith("ragcache")


@given(st.sampled_from(["chunk", "start", "end", "action", "document"]), anything)
def test_no_value_in_a_segment_breaks_the_parser(field: str, value: object) -> None:
    plan = valid()
    plan["segments"][1][field] = value
    assert blamed(plan).startswith("ragcache")


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("start", 3, "ragcache.segments[1].start"),  # overlaps the segment before
        ("start", 9, "ragcache.segments[1].start"),  # empty
        ("start", -1, "ragcache.segments[1].start"),
        ("start", True, "ragcache.segments[1].start"),
        ("end", 9.0, "ragcache.segments[1].start"),
        ("chunk", "00", "ragcache.segments[1].chunk"),
        ("chunk", "no hex", "ragcache.segments[1].chunk"),
        ("chunk", None, "ragcache.segments[1].chunk"),
        ("action", "guess", "ragcache.segments[1].action"),
        ("action", None, "ragcache.segments[1].action"),
        ("document", 7, "ragcache.segments[1].document"),
        ("document", "x" * (MAX_NAME_CHARS + 1), "ragcache.segments[1].document"),
    ],
)
def test_a_wrong_segment_is_named(field: str, value: object, named: str) -> None:
    plan = valid()
    plan["segments"][1][field] = value
    with pytest.raises(InvalidInput) as refused:
        ReusePlan.from_json(plan)
    assert refused.value.field == named


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("v", 3),
        ("v", None),
        ("request", ""),
        ("request", "x" * 129),
        ("domain", 7),
        ("domain", None),
        ("planned_at_ms", -1),
        ("planned_at_ms", 1 << 63),
        ("planned_at_ms", None),
        ("planned_at_ms", True),
        ("recompute_share", -0.1),
        ("recompute_share", 1.5),
        ("recompute_share", math.nan),
        ("recompute_share", math.inf),
        ("recompute_share", 10**400),
        ("recompute_share", True),
        ("recompute_share", "x"),
        ("recompute_share", "0.5"),
        ("recompute_share", None),
        ("alpha", -0.1),
        ("alpha", math.nan),
        ("alpha", math.inf),
        ("alpha", 10**400),
        ("alpha", True),
        ("alpha", "3"),
        ("trial", 1),
        ("trial", None),
        ("handoff", 1),
        ("handoff", None),
        ("domain", "plain:"),
        ("domain", "plain:tenant"),
        ("segments", None),
        ("segments", "text"),
        ("segments", [valid()["segments"][0]] * (MAX_SEGMENTS + 1)),
    ],
)
def test_a_wrong_field_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidInput) as refused:
        ReusePlan.from_json(valid() | {field: value})
    assert refused.value.field == f"ragcache.{field}"


def test_fields_of_later_versions_are_ignored() -> None:
    assert ReusePlan.from_json(valid() | {"salt": "x"}) == ReusePlan.from_json(valid())


@pytest.mark.parametrize("value", [0, 1])
def test_a_share_may_be_0_or_1(value: int) -> None:
    share = ReusePlan.from_json(valid() | {"recompute_share": value}).recompute_share
    assert share == value
    assert type(share) is float


def test_a_plan_without_a_share_has_0() -> None:
    plan = valid()
    del plan["recompute_share"]
    assert ReusePlan.from_json(plan).recompute_share == 0.0


@pytest.mark.parametrize("action", Action)
def test_a_plan_blends_if_any_of_its_segments_does(action: Action) -> None:
    segments = (Segment(bytes(16), 0, 4), Segment(bytes(16), 4, 9, action))
    assert ReusePlan("request-1", "public", segments).blends == (action is Action.BLEND)
    assert not ReusePlan("request-1", "public", ()).blends


def test_a_blended_plan_cannot_be_handed_off() -> None:
    segments = (Segment(bytes(16), 0, 4), Segment(bytes(16), 4, 9, Action.BLEND))
    plan = ReusePlan("request-1", "public", segments, handoff=True).to_json()
    assert blamed(plan) == "ragcache.handoff"


def test_a_trial_cannot_be_handed_off() -> None:
    assert blamed(valid() | {"trial": True, "handoff": True}) == "ragcache.trial"


def test_a_plan_without_an_alpha_leaves_it_to_the_engine() -> None:
    assert "alpha" not in valid()
    assert ReusePlan.from_json(valid()).alpha is None
    assert ReusePlan.from_json(valid() | {"alpha": 0}).alpha == 0.0


def test_handoff_is_off_by_default() -> None:
    plan = valid()
    del plan["handoff"]
    assert not ReusePlan.from_json(plan).handoff
    assert ReusePlan.from_json(plan | {"handoff": True}).handoff


names = st.tuples(st.text(max_size=600), st.text(max_size=600))


@given(names, names)
def test_documents_have_distinct_names(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (document_name(*one) == document_name(*other)) == (one == other)
    assert len(document_name(*one)) <= MAX_NAME_CHARS


def test_a_slash_in_a_collection_is_quoted() -> None:
    assert document_name("a", "b/c.md") == "a/b/c.md"
    assert document_name("a/b", "c.md") == "a%2Fb/c.md"
