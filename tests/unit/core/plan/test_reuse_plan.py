"""ReusePlan: JSON and back, and every malformed plan is refused by the name of its field."""

from __future__ import annotations

import base64
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.access.reader import Reader
from ragcache_core.errors import InvalidInput
from ragcache_core.plan.reuse_plan import (
    MAX_ALPHA,
    MAX_HANDOFF_WAIT_S,
    MAX_SEGMENTS,
    PLAIN_DOMAIN,
    Action,
    Handoff,
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
    digest = st.binary(min_size=16, max_size=16)
    plan = ReusePlan(
        *(draw(text), domain, tuple(segments), planned_at_ms, share),
        alpha=alpha,
        trial=trial,
        reader=draw(st.builds(Reader, digest, digest, st.booleans())),
        num_head=draw(st.integers(0, 2**16 - 1)),
        own_head=draw(st.booleans()),
    )
    if trial or draw(st.booleans()):
        return plan
    wait_s = draw(st.floats(0, MAX_HANDOFF_WAIT_S))
    return replace(plan, handoff=draw(st.sampled_from(Handoff)), handoff_wait_s=wait_s)


SEGMENTS = (Segment(bytes(16), 0, 4), Segment(bytes(16), 4, 9, Action.COMPUTE, "d/1"))
PLAN = ReusePlan("request-1", "public", SEGMENTS)


@given(plans())
def test_a_plan_round_trips_through_its_text(plan: ReusePlan) -> None:
    assert ReusePlan.decode(plan.encode()) == plan


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
)


@given(anything)
def test_any_other_json_value_is_rejected(value: object) -> None:
    with pytest.raises(InvalidInput, match=r"^ragcache"):
        ReusePlan.decode(value)


@given(st.binary(max_size=300))
def test_any_other_bytes_are_rejected(packed: bytes) -> None:
    with pytest.raises(InvalidInput, match=r"^ragcache"):
        ReusePlan.decode(base64.b64encode(b"\xff" + packed).decode())


@given(plans(), st.data())
def test_changed_bytes_are_another_plan_or_rejected(plan: ReusePlan, data: st.DataObject) -> None:
    packed = bytearray(base64.b64decode(plan.encode()))
    at = data.draw(st.integers(0, len(packed) - 1))
    packed[at] ^= data.draw(st.integers(1, 255))
    text = base64.b64encode(bytes(packed)).decode()
    try:
        other = ReusePlan.decode(text)
    except InvalidInput:
        return
    assert ReusePlan.decode(other.encode()) == other


@given(plans(), st.data())
def test_a_part_of_a_plan_is_rejected(plan: ReusePlan, data: st.DataObject) -> None:
    packed = base64.b64decode(plan.encode())
    length = data.draw(st.integers(0, len(packed) - 1))
    for wrong in (packed[:length], packed + bytes(1)):
        with pytest.raises(InvalidInput, match=r"^ragcache"):
            ReusePlan.decode(base64.b64encode(wrong).decode())


def blamed(plan: ReusePlan) -> str:
    """The field that is refused; the plan's own name when it is taken."""
    try:
        ReusePlan.decode(plan.encode())
    except InvalidInput as error:
        return error.field
    return "ragcache"


@pytest.mark.parametrize(
    ("segment", "named"),
    [
        (Segment(bytes(16), 3, 9), "start"),  # overlaps the segment before
        (Segment(bytes(16), 9, 9), "start"),  # empty
        (Segment(bytes(16), 9, 8), "start"),
    ],
)
def test_a_wrong_segment_is_named(segment: Segment, named: str) -> None:
    plan = replace(PLAN, segments=(SEGMENTS[0], segment))
    assert blamed(plan) == f"ragcache.segments[1].{named}"


@pytest.mark.parametrize(
    ("offset", "value", "named"),
    [(-3, 9, "action"), (-2, 2, "document")],
)
def test_a_wrong_code_in_a_segment_is_named(offset: int, value: int, named: str) -> None:
    packed = bytearray(base64.b64decode(PLAN.encode()))
    packed[offset] = value
    with pytest.raises(InvalidInput) as refused:
        ReusePlan.decode(base64.b64encode(bytes(packed)).decode())
    assert refused.value.field == f"ragcache.segments[1].{named}"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request", ""),
        ("request", "x" * 129),
        ("domain", ""),
        ("planned_at_ms", 1 << 63),
        ("recompute_share", -0.1),
        ("recompute_share", 1.5),
        ("recompute_share", math.nan),
        ("recompute_share", math.inf),
        ("alpha", -0.1),
        ("alpha", math.nan),
        ("alpha", math.inf),
        ("domain", "plain:"),
        ("domain", "plain:tenant"),
        ("segments", tuple(Segment(bytes(16), i, i + 1) for i in range(MAX_SEGMENTS + 1))),
    ],
)
def test_a_wrong_field_is_named(field: str, value: object) -> None:
    assert blamed(replace(PLAN, **{field: value})) == f"ragcache.{field}"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("offset", "value", "named"),
    [(0, 8, "ragcache.v"), (1, 1 | 8, "ragcache.flags")],
)
def test_another_version_and_flags_that_no_plan_has_are_refused(
    offset: int, value: int, named: str
) -> None:
    packed = bytearray(base64.b64decode(PLAN.encode()))
    packed[offset] = value
    with pytest.raises(InvalidInput) as refused:
        ReusePlan.decode(base64.b64encode(bytes(packed)).decode())
    assert refused.value.field == named


def test_a_long_document_name_is_refused() -> None:
    segment = Segment(bytes(16), 0, 1, document="x" * (MAX_NAME_CHARS + 1))
    assert blamed(replace(PLAN, segments=(segment,))) == "ragcache.documents"


@pytest.mark.parametrize("wrong", [{"planned_at_ms": -1}, {"segments": (Segment(b"", -1, 2),)}])
def test_a_plan_out_of_all_bounds_cannot_be_encoded(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot be encoded"):
        replace(PLAN, **wrong).encode()


def test_a_plan_of_the_most_segments_and_names_can_be_decoded() -> None:
    segments = tuple(
        Segment(bytes(16), i, i + 1, document=f"{i:04}".ljust(MAX_NAME_CHARS, "\U0001f600"))
        for i in range(MAX_SEGMENTS)
    )
    plan = replace(PLAN, segments=segments)
    assert ReusePlan.decode(plan.encode()) == plan


@pytest.mark.parametrize("action", Action)
def test_a_plan_blends_if_any_of_its_segments_does(action: Action) -> None:
    segments = (Segment(bytes(16), 0, 4), Segment(bytes(16), 4, 9, action))
    assert ReusePlan("request-1", "public", segments).blends == (action is Action.BLEND)
    assert not ReusePlan("request-1", "public", ()).blends


def test_a_trial_cannot_be_handed_off() -> None:
    assert blamed(replace(PLAN, trial=True, handoff=Handoff.DECODE)) == "ragcache.trial"


names = st.tuples(st.text(max_size=600), st.text(max_size=600))


@given(names, names)
def test_documents_have_distinct_names(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (document_name(*one) == document_name(*other)) == (one == other)
    assert len(document_name(*one)) <= MAX_NAME_CHARS


def test_a_slash_in_a_collection_is_quoted() -> None:
    assert document_name("a", "b/c.md") == "a/b/c.md"
    assert document_name("a/b", "c.md") == "a%2Fb/c.md"
