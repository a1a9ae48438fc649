"""The generated sequence."""

from __future__ import annotations

from collections import Counter

from bench.support.sequences.requests import (
    PASSAGES,
    Part,
    SequenceRequest,
    Vocabulary,
    generate,
    topics,
)

WORDS = Vocabulary(50_000, seed=1)


def sequence(count: int = 100, seed: int = 1) -> list[SequenceRequest]:
    return generate(count, WORDS, seed)


def test_equal_seeds_generate_equal_sequences() -> None:
    assert sequence() == sequence()
    assert sequence() != sequence(seed=2)


def test_a_longer_sequence_begins_with_the_shorter_one() -> None:
    assert sequence(100)[:10] == sequence(10)


def test_heads_share_their_stable_part_alone() -> None:
    heads = {request.parts[:2] for request in sequence()}
    assert len(heads) == 100
    assert len({stable for stable, _ in heads}) == 1
    assert {changing.part for _, changing in heads} == {Part.CHANGING}


def test_no_request_has_a_passage_twice() -> None:
    for request in sequence():
        names = [passage.name for passage in request.passages]
        assert len(set(names)) == len(names) == PASSAGES


def test_few_passages_take_many_accesses() -> None:
    uses = Counter(passage.name for request in sequence() for passage in request.passages)
    hottest = sum(count for _, count in uses.most_common(len(topics()) // 10))
    assert hottest > 0.25 * uses.total()
    assert set(uses) <= set(topics())
