"""The gain that token counts allow, and which warm-up requests matter to a prefix cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.support.sequences.figures import computed_tokens, useful_warm_up
from bench.support.sequences.requests import Part, PromptPart, SequenceRequest

SHARE = 0.15


def part(role: Part, name: str, length: int) -> PromptPart:
    return PromptPart(name, role, tuple(range(length)))


def request(number: int, passages: str, *, session: int | None = None) -> SequenceRequest:
    """A head of 50 and 10 tokens, passages of 100, a question of 20."""
    changing = f"session {number if session is None else session}"
    return SequenceRequest(
        (
            part(Part.STABLE, "system", 50),
            part(Part.CHANGING, changing, 10),
            *(part(Part.PASSAGE, name, 100) for name in passages),
            part(Part.TAIL, f"question {number}", 20),
        )
    )


sequences = st.lists(
    st.tuples(st.text("abcd", max_size=4), st.integers(0, 2)), min_size=1, max_size=8
).map(
    lambda drawn: [
        request(number, passages, session=session)
        for number, (passages, session) in enumerate(drawn)
    ]
)


def test_a_new_prompt_is_computed_by_all() -> None:
    found = computed_tokens([request(0, "ab")], 0, SHARE)
    assert (found.prompt, found.plain, found.exact, found.blend) == (280, 280, 280, 280)


def test_blend_computes_a_share_of_known_passages_behind_a_changed_head() -> None:
    found = computed_tokens([request(0, "ab"), request(1, "bc")], 1, SHARE)
    assert found.plain == 230
    assert found.blend == pytest.approx(10 + 15 + 100 + 20)
    assert found.caps()["blend"] == pytest.approx(230 / 145)
    assert found.caps()["exact"] == 1


def test_a_known_prefix_costs_nothing() -> None:
    found = computed_tokens([request(0, "ab", session=7), request(1, "ac", session=7)], 1, SHARE)
    assert (found.plain, found.blend) == (120, 120)


def test_the_last_token_of_a_known_prompt_is_computed() -> None:
    found = computed_tokens([request(0, "ab"), request(0, "ab")], 1, SHARE)
    assert (found.plain, found.exact, found.blend) == (1, 1, 1)


def test_only_measured_requests_count() -> None:
    assert computed_tokens([request(0, "a"), request(1, "b")], 1, SHARE).prompt == 180


def test_passages_computed_ahead_are_known_to_blend_only() -> None:
    ahead = [SequenceRequest((part(Part.STABLE, "system", 50), part(Part.PASSAGE, "a", 100)))]
    found = computed_tokens([request(0, "a")], 0, SHARE, ahead)
    assert found.plain == 180
    assert found.exact == 130  # the head alone
    assert found.blend == pytest.approx(10 + 15 + 20)


@given(sequences, st.floats(0, 1))
def test_blend_computes_no_more_than_plain(sequence: list[SequenceRequest], share: float) -> None:
    found = computed_tokens(sequence, 0, share)
    assert found.blend <= found.exact == found.plain <= found.prompt


@given(sequences, st.data())
def test_the_useful_warm_up_leaves_prefix_caches_as_warm_as_all_of_it(
    sequence: list[SequenceRequest], data: st.DataObject
) -> None:
    measured_from = data.draw(st.integers(0, len(sequence) - 1))
    useful = useful_warm_up(sequence, measured_from)
    reduced = [sequence[index] for index in useful]
    everything = computed_tokens(sequence, measured_from, SHARE)
    less = computed_tokens([*reduced, *sequence[measured_from:]], len(reduced), SHARE)
    assert less.plain == everything.plain
