"""The part of a template that prompts have in common is split off."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.plan.stable_prefix import (
    MAX_HEADS,
    MIN_TOKENS,
    NUM_CHANGES,
    StablePrefixes,
)

INSTRUCTIONS = list(range(1000, 1100))


def test_the_first_head_is_one_segment() -> None:
    assert StablePrefixes().split([1, 2, 3]) == 3
    assert StablePrefixes().split([]) == 0


def test_heads_that_begin_alike_are_split_after_what_they_share() -> None:
    prefixes = StablePrefixes()
    heads = [[*INSTRUCTIONS, user, user + 1] for user in (1, 3, 5, 7)]
    assert [prefixes.split(head) for head in heads] == [102, 100, 100, 100]


def test_names_that_begin_alike_do_not_move_the_split() -> None:
    prefixes = StablePrefixes()
    heads = [[*INSTRUCTIONS, 9, user] for user in range(3)]
    prefixes.split([*INSTRUCTIONS, 5])
    assert [prefixes.split(head) for head in heads] == [100, 100, 100]


def test_a_longer_common_part_moves_the_split() -> None:
    """Such as the instructions of one of several applications."""
    prefixes = StablePrefixes()
    own = list(range(MIN_TOKENS))
    prefixes.split([*INSTRUCTIONS, 5])
    assert prefixes.split([*INSTRUCTIONS, *own, 1]) == 100
    assert prefixes.split([*INSTRUCTIONS, *own, 2]) == 100 + MIN_TOKENS
    assert prefixes.split([*INSTRUCTIONS, *own, 3]) == 100 + MIN_TOKENS
    assert prefixes.split([*INSTRUCTIONS, 6]) == 100


def test_a_short_common_part_is_no_reason_to_split() -> None:
    """Every head begins with the same tokens of the chat template."""
    prefixes = StablePrefixes()
    assert prefixes.split([1, 2, 3, 4]) == 4
    assert prefixes.split([1, 2, 3, 5]) == 4


def test_a_domain_does_not_learn_what_others_ask() -> None:
    prefixes = StablePrefixes()
    prefixes.split([*INSTRUCTIONS, 1], "tenant-a")
    assert prefixes.split([*INSTRUCTIONS, 2], "tenant-b") == 101
    assert prefixes.split([*INSTRUCTIONS, 3], "tenant-b") == 100


def test_a_head_with_a_time_is_expected_once() -> None:
    prefixes = StablePrefixes()
    times = [[minute, *INSTRUCTIONS] for minute in range(NUM_CHANGES + 2)]
    found = []
    for head in times:
        prefixes.split(head)
        found.append(prefixes.comes_once(head))
    assert found == [False] * NUM_CHANGES + [True, True]
    prefixes.split(times[-1])
    assert not prefixes.comes_once(times[-1]), "it came again"
    prefixes.split([99, *INSTRUCTIONS])
    assert not prefixes.comes_once([99, *INSTRUCTIONS]), "one of the latest came again"


def test_prompts_before_the_end_of_a_search_are_no_repetition() -> None:
    prefixes = StablePrefixes()
    found = []
    for head in [[minute, *INSTRUCTIONS] for minute in range(NUM_CHANGES + 1)]:
        for is_early in (True, True, False):
            prefixes.split(head, is_early=is_early)
            found.append(prefixes.comes_once(head))
    assert found == [False] * 3 * NUM_CHANGES + [True] * 3


def test_heads_of_other_domains_do_not_make_one_come_once() -> None:
    prefixes = StablePrefixes()
    for minute in range(NUM_CHANGES + 1):
        prefixes.split([minute, *INSTRUCTIONS], "tenant-a")
    prefixes.split(INSTRUCTIONS, "tenant-b")
    assert not prefixes.comes_once(INSTRUCTIONS, "tenant-b")


small_heads = st.lists(st.integers(0, 1), max_size=3 * MIN_TOKENS)


@given(st.lists(small_heads, max_size=MAX_HEADS))
def test_a_head_is_always_split_alike(heads: list[list[int]]) -> None:
    prefixes = StablePrefixes()
    lengths = [prefixes.split(head) for head in heads]
    assert all(0 <= length <= len(head) for length, head in zip(lengths, heads, strict=True))
    by_head: dict[tuple[int, ...], set[int]] = {}
    for head, length in zip(heads, lengths, strict=True):
        by_head.setdefault(tuple(head), set()).add(length)
    assert all(len(splits) == 1 for splits in by_head.values())


def test_memory_is_bounded() -> None:
    prefixes = StablePrefixes()
    for user in range(2 * MAX_HEADS):
        prefixes.split([*INSTRUCTIONS, user])
        prefixes.split([*INSTRUCTIONS, user])
    assert len(prefixes._splits) <= MAX_HEADS
    assert len(prefixes._prefixes) <= MAX_HEADS
    assert len(prefixes._repeated) <= MAX_HEADS
