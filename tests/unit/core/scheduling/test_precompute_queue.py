"""The precompute queue: what is worth most comes first, and what is worth least is dropped."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ragcache_core.scheduling.precompute_queue import (
    MAX_AGE_MS,
    MISSED_BEFORE,
    PATIENCE,
    PrecomputeQueue,
    Prefill,
)

HALF_LIFE_S = 100.0
TOKENS = 10
NOW_MS = 1000


def chunk(text: str, *documents: str, at_ms: int = NOW_MS) -> Prefill:
    return Prefill((text,), documents or ("a.md",), at_ms)


def queue(most_chunks: int = 1000, **more: int) -> PrecomputeQueue:
    """Of chunks that are one letter long."""
    most_bytes = most_chunks * chunk("a").num_bytes
    return PrecomputeQueue(most_bytes=most_bytes, half_life_s=HALF_LIFE_S, **more)


def miss(
    waiting: PrecomputeQueue, prefill: Prefill, now: float = 0.0, saved_s: float = 1.0
) -> None:
    waiting.ask(prefill, now, num_tokens=TOKENS, saved_s=saved_s)


def drained(waiting: PrecomputeQueue) -> list[str]:
    return drained_at(waiting, NOW_MS)


def drained_at(waiting: PrecomputeQueue, now_ms: int) -> list[str]:
    texts = []
    while (one := waiting.first(now_ms)) is not None:
        waiting.remove(one.prefill)
        texts.append("|".join(one.prefill.texts))
    return texts


def test_what_was_written_comes_in_the_order_of_writing() -> None:
    waiting = queue()
    for text in ("b", "a", "c", "a"):
        waiting.write(chunk(text))
    assert drained(waiting) == ["b", "a", "c"]


def test_a_first_miss_is_left_to_the_engine_that_computed_it() -> None:
    waiting = queue()
    miss(waiting, chunk("a"))
    assert waiting.first(NOW_MS) is None
    miss(waiting, chunk("a"))
    assert waiting.first(NOW_MS) is not None


def test_a_miss_counts_for_a_half_life() -> None:
    for later, queued in ((HALF_LIFE_S, True), (HALF_LIFE_S + 1, False)):
        waiting = queue()
        miss(waiting, chunk("a"), 1000.0)
        miss(waiting, chunk("a"), 1000.0 + later)
        assert (waiting.first(NOW_MS) is not None) is queued


def test_what_is_found_is_not_queued_however_often_it_is_asked_for() -> None:
    waiting = queue()
    for now in range(100):
        miss(waiting, chunk("a"), float(now), saved_s=0.0)
    assert waiting.first(NOW_MS) is None


def test_what_questions_missed_comes_before_what_was_only_written() -> None:
    waiting = queue()
    waiting.write(chunk("written"))
    for _ in range(2):
        miss(waiting, chunk("missed"))
    assert [one.source for one in [waiting.first(NOW_MS)] if one] == ["asked"]
    assert drained(waiting) == ["missed", "written"]


def test_one_that_waits_is_moved_up_by_a_single_miss() -> None:
    waiting = queue()
    waiting.write(chunk("a"))
    waiting.write(chunk("b"))
    miss(waiting, chunk("b"))
    assert drained(waiting) == ["b", "a"]


def test_uses_that_found_it_count_once_it_is_gone() -> None:
    waiting = queue()
    for _ in range(5):
        miss(waiting, chunk("hot"), saved_s=0.0)
    for _ in range(2):
        miss(waiting, chunk("cold"))
        miss(waiting, chunk("hot"))
    assert drained(waiting) == ["hot", "cold"]


def test_of_equal_uses_that_which_costs_questions_more_by_token_comes_first() -> None:
    waiting = queue()
    for _ in range(2):
        waiting.ask(chunk("long"), 0.0, num_tokens=100, saved_s=2.0)
        waiting.ask(chunk("dear"), 0.0, num_tokens=10, saved_s=1.0)
    assert drained(waiting) == ["dear", "long"]


def test_what_does_not_stay_is_computed_less_and_less_often() -> None:
    waiting = queue()
    computed = []
    for visit in range(200):
        miss(waiting, chunk("a"))
        if drained(waiting):
            computed.append(visit)
    assert computed[0] == 1
    gaps = [later - earlier for earlier, later in pairwise(computed)]
    assert len(gaps) > 2
    assert all(later >= 2 * earlier for earlier, later in pairwise(gaps))


def test_old_uses_fade() -> None:
    waiting = queue()
    for _ in range(4):
        miss(waiting, chunk("old"), 0.0)
    for _ in range(2):
        miss(waiting, chunk("new"), 2 * HALF_LIFE_S)
    assert drained(waiting) == ["new", "old"]


def test_the_least_worth_is_dropped_and_said() -> None:
    waiting = queue(most_chunks=2)
    assert waiting.write(chunk("a")) == []
    assert waiting.write(chunk("b")) == []
    [dropped] = waiting.write(chunk("c"))
    assert dropped.prefill.texts == ("c",)
    miss(waiting, chunk("d"))
    [dropped] = waiting.ask(chunk("d"), 0.0, num_tokens=TOKENS, saved_s=1.0)
    assert dropped.prefill.texts == ("b",)
    assert drained(waiting) == ["d", "a"]


def test_the_same_chunks_in_another_order_are_another_prefill() -> None:
    several = (("a", "b"), ("b", "a"), ("ab",), ("a",))
    names = {Prefill(texts, ("a.md",) * len(texts), 0).name for texts in several}
    assert len(names) == 4


def test_the_same_chunks_for_questions_of_another_mode_are_another_prefill() -> None:
    exact, blend = Prefill(("a",), ("a.md",), 0, "exact"), Prefill(("a",), ("a.md",), 0, "blend")
    assert exact.name != blend.name


def test_the_later_write_stands_so_that_an_earlier_delete_does_not_refuse_it() -> None:
    waiting = queue()
    waiting.write(chunk("a", at_ms=1))
    waiting.write(chunk("a", at_ms=2))
    one = waiting.first(NOW_MS)
    assert one is not None
    assert one.prefill.planned_at_ms == 2


def test_a_document_that_is_gone_takes_its_chunks_along() -> None:
    waiting = queue()
    for text in ("a", "b"):
        waiting.write(chunk(text, "gone.md"))
    waiting.write(chunk("c", "kept.md"))
    assert waiting.forget("gone.md", NOW_MS) == 2
    assert waiting.forget("gone.md", NOW_MS) == 0
    assert drained(waiting) == ["c"]


def test_a_question_that_was_under_way_brings_nothing_back_of_what_is_gone() -> None:
    waiting = queue()
    miss(waiting, chunk("a"))
    waiting.forget("a.md", NOW_MS)
    for _ in range(3):
        miss(waiting, chunk("a"))
    assert waiting.first(NOW_MS) is None
    for _ in range(2):  # it has been written anew
        miss(waiting, chunk("a", at_ms=NOW_MS + 1))
    assert waiting.first(NOW_MS) is not None


def test_what_has_waited_for_too_long_is_let_go() -> None:
    waiting = queue()
    waiting.write(chunk("a", at_ms=0))
    waiting.write(chunk("b", at_ms=1))
    assert drained_at(waiting, MAX_AGE_MS + 1) == ["b"]
    assert len(waiting) == 0


def test_what_is_put_off_comes_after_all_others_until_it_is_missed_again() -> None:
    waiting = queue()
    for _ in range(2):
        miss(waiting, chunk("hot"))
    for text in "ab":
        waiting.write(chunk(text))
    waiting.postpone(chunk("hot"))
    first = waiting.first(NOW_MS)
    assert first is not None
    assert first.prefill.texts == ("a",)
    miss(waiting, chunk("hot"))
    assert drained(waiting) == ["hot", "a", "b"]
    waiting.postpone(chunk("hot"))
    assert len(waiting) == 0


@given(
    uses=st.lists(st.floats(0, 1e6), min_size=1, max_size=30),
    later_s=st.floats(0, 1e6),
    saved_s=st.floats(1e-6, 1e3),
)
def test_one_more_use_puts_it_in_front(uses: list[float], later_s: float, saved_s: float) -> None:
    waiting = queue()
    for text in ("less", "more"):
        waiting.write(chunk(text))
    for now in sorted(uses):
        for text in ("less", "more"):
            miss(waiting, chunk(text), now, saved_s)
    miss(waiting, chunk("more"), max(uses) + later_s, saved_s)
    assert drained(waiting) == ["more", "less"]


class Shaken(RuleBasedStateMachine):
    """Against a model that computes each worth anew from all uses."""

    TEXTS = st.sampled_from("abcdefgh")
    DOCUMENTS = st.sampled_from(["a.md", "b.md"])
    SETS = st.sampled_from([("a.md",), ("b.md",), ("a.md", "b.md"), ("b.md", "a.md", "b.md")])
    MOST_CHUNKS = 5

    def __init__(self) -> None:
        super().__init__()
        self.queue = queue(self.MOST_CHUNKS)
        self.now = 0.0
        self.now_ms = 1
        self.came = 0
        self.waiting: dict[str, tuple[int, tuple[str, ...]]] = {}
        self.uses: dict[str, list[float]] = defaultdict(list)
        self.misses: dict[str, list[float]] = defaultdict(list)
        self.times: dict[str, int] = defaultdict(int)
        self.saved_s: dict[str, float] = {}

    def decayed(self, times: list[float]) -> float:
        return sum(2.0 ** ((at - self.now) / HALF_LIFE_S) for at in times)

    def sort_key(self, text: str) -> tuple[float, int]:
        worth = self.decayed(self.uses[text]) * self.saved_s.get(text, 0.0) / TOKENS
        return (-worth, self.waiting[text][0])

    def put(self, text: str, documents: tuple[str, ...]) -> None:
        self.came += 1
        self.waiting[text] = (self.waiting.get(text, (self.came, ()))[0], documents)
        while len(self.waiting) > self.MOST_CHUNKS:
            del self.waiting[max(self.waiting, key=self.sort_key)]

    @rule(seconds=st.sampled_from([0.0, 1.0, 7.0, 1000.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(text=TEXTS, documents=SETS)
    def write(self, text: str, documents: tuple[str, ...]) -> None:
        self.queue.write(chunk(text, *documents, at_ms=self.now_ms))
        self.put(text, documents)

    @rule(text=TEXTS, documents=SETS, saved_s=st.sampled_from([0.0, 1.0, 3.1]))
    def ask(self, text: str, documents: tuple[str, ...], saved_s: float) -> None:
        # No two are worth the same: what is missed by rounding would decide between them.
        saved_s *= 1 + ord(text) / 1000
        one = chunk(text, *documents, at_ms=self.now_ms)
        self.queue.ask(one, self.now, num_tokens=TOKENS, saved_s=saved_s)
        missed_before = self.decayed(self.misses[text])
        self.uses[text].append(self.now)
        if saved_s:
            self.misses[text].append(self.now)
            self.saved_s[text] = saved_s
        wanted = MISSED_BEFORE * PATIENCE ** self.times[text]
        if text in self.waiting or (saved_s and missed_before >= wanted):
            self.put(text, documents)

    @rule()
    def compute(self) -> None:
        one = self.queue.first(self.now_ms)
        assert (one is None) is (not self.waiting)
        if one is not None:
            best = min(self.waiting, key=self.sort_key)
            assert one.prefill.texts == (best,)
            self.queue.remove(one.prefill)
            del self.waiting[best]
            if self.uses[best]:
                self.misses[best] = []
                self.times[best] += 1

    @rule(document=DOCUMENTS)
    def forget(self, document: str) -> None:
        gone = [text for text, (_, of) in self.waiting.items() if document in of]
        assert self.queue.forget(document, self.now_ms) == len(gone)
        self.now_ms += 1
        for text in gone:
            del self.waiting[text]
            self.uses.pop(text, None)
            self.misses.pop(text, None)
            self.saved_s.pop(text, None)
            self.times.pop(text, None)

    @invariant()
    def books_agree(self) -> None:
        self.queue.check()
        assert len(self.queue) == len(self.waiting)


TestShaken = Shaken.TestCase


@pytest.mark.parametrize("most_known", [1, 3])
def test_what_is_known_of_demand_is_bounded(most_known: int) -> None:
    waiting = queue(most_known=most_known)
    for text in "abcdef":
        miss(waiting, chunk(text))
    waiting.check()
    miss(waiting, chunk("a"))
    assert waiting.first(NOW_MS) is None, "its first miss is long forgotten"
