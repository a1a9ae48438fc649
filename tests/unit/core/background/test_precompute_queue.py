"""The precompute queue: highest priority first, lowest priority dropped."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ragcache_core.background.precompute_queue import (
    MAX_AGE_MS,
    MISS_GROWTH,
    MISSED_BEFORE,
    PrecomputeQueue,
    Prefill,
)

HALF_LIFE_S = 100.0
TOKENS = 10
NOW_MS = 1000


def chunk(text: str, *documents: str, at_ms: int = NOW_MS) -> Prefill:
    return Prefill((text,), documents or ("a.md",), at_ms)


def queue(max_chunks: int = 1000, **more: int) -> PrecomputeQueue:
    """A queue with room for max_chunks chunks of one letter."""
    max_bytes = max_chunks * chunk("a").num_bytes
    return PrecomputeQueue(max_bytes=max_bytes, half_life_s=HALF_LIFE_S, **more)


def miss(
    pending: PrecomputeQueue, prefill: Prefill, now: float = 0.0, saved_s: float = 1.0
) -> None:
    pending.record_question(prefill, now, num_tokens=TOKENS, saved_s=saved_s)


def drained(pending: PrecomputeQueue) -> list[str]:
    return drained_at(pending, NOW_MS)


def drained_at(pending: PrecomputeQueue, now_ms: int) -> list[str]:
    texts = []
    while (one := pending.advance_to_first(now_ms)) is not None:
        pending.mark_done(one.prefill)
        texts.append("|".join(one.prefill.texts))
    return texts


def test_written_chunks_come_in_the_order_of_writing() -> None:
    pending = queue()
    for text in ("b", "a", "c", "a"):
        pending.add_written(chunk(text))
    assert drained(pending) == ["b", "a", "c"]


def test_a_first_miss_does_not_queue_a_prefill() -> None:
    pending = queue()
    miss(pending, chunk("a"))
    assert pending.advance_to_first(NOW_MS) is None
    miss(pending, chunk("a"))
    assert pending.advance_to_first(NOW_MS) is not None


def test_a_miss_counts_for_one_half_life() -> None:
    for later, queued in ((HALF_LIFE_S, True), (HALF_LIFE_S + 1, False)):
        pending = queue()
        miss(pending, chunk("a"), 1000.0)
        miss(pending, chunk("a"), 1000.0 + later)
        assert (pending.advance_to_first(NOW_MS) is not None) is queued


def test_a_stored_prefill_is_never_queued() -> None:
    pending = queue()
    for now in range(100):
        miss(pending, chunk("a"), float(now), saved_s=0.0)
    assert pending.advance_to_first(NOW_MS) is None


def test_missed_prefills_come_before_written_ones() -> None:
    pending = queue()
    pending.add_written(chunk("written"))
    for _ in range(2):
        miss(pending, chunk("missed"))
    assert [one.source for one in [pending.advance_to_first(NOW_MS)] if one] == ["asked"]
    assert drained(pending) == ["missed", "written"]


def test_a_single_miss_moves_a_queued_prefill_forward() -> None:
    pending = queue()
    pending.add_written(chunk("a"))
    pending.add_written(chunk("b"))
    miss(pending, chunk("b"))
    assert drained(pending) == ["b", "a"]


def test_uses_of_a_stored_prefill_count_after_its_eviction() -> None:
    pending = queue()
    for _ in range(5):
        miss(pending, chunk("hot"), saved_s=0.0)
    for _ in range(2):
        miss(pending, chunk("cold"))
        miss(pending, chunk("hot"))
    assert drained(pending) == ["hot", "cold"]


def test_with_equal_uses_the_higher_cost_per_token_comes_first() -> None:
    pending = queue()
    for _ in range(2):
        pending.record_question(chunk("long"), 0.0, num_tokens=100, saved_s=2.0)
        pending.record_question(chunk("dear"), 0.0, num_tokens=10, saved_s=1.0)
    assert drained(pending) == ["dear", "long"]


def test_a_prefill_that_is_evicted_is_computed_less_and_less_often() -> None:
    pending = queue()
    computed = []
    for visit in range(200):
        miss(pending, chunk("a"))
        if drained(pending):
            computed.append(visit)
    assert computed[0] == 1
    gaps = [later - earlier for earlier, later in pairwise(computed)]
    assert len(gaps) > 2
    assert all(later >= 2 * earlier for earlier, later in pairwise(gaps))


def test_old_uses_decay() -> None:
    pending = queue()
    for _ in range(4):
        miss(pending, chunk("old"), 0.0)
    for _ in range(2):
        miss(pending, chunk("new"), 2 * HALF_LIFE_S)
    assert drained(pending) == ["new", "old"]


def test_the_lowest_priority_is_dropped_and_returned() -> None:
    pending = queue(max_chunks=2)
    assert pending.add_written(chunk("a")) == []
    assert pending.add_written(chunk("b")) == []
    [dropped] = pending.add_written(chunk("c"))
    assert dropped.prefill.texts == ("c",)
    miss(pending, chunk("d"))
    [dropped] = pending.record_question(chunk("d"), 0.0, num_tokens=TOKENS, saved_s=1.0)
    assert dropped.prefill.texts == ("b",)
    assert drained(pending) == ["d", "a"]


def test_another_order_of_chunks_is_another_prefill() -> None:
    several = (("a", "b"), ("b", "a"), ("ab",), ("a",))
    names = {Prefill(texts, ("a.md",) * len(texts), 0).name for texts in several}
    assert len(names) == 4


def test_another_mode_is_another_prefill() -> None:
    exact, blend = Prefill(("a",), ("a.md",), 0, "exact"), Prefill(("a",), ("a.md",), 0, "blend")
    assert exact.name != blend.name


def test_the_later_write_replaces_the_earlier_one() -> None:
    pending = queue()
    pending.add_written(chunk("a", at_ms=1))
    pending.add_written(chunk("a", at_ms=2))
    one = pending.advance_to_first(NOW_MS)
    assert one is not None
    assert one.prefill.planned_at_ms == 2


def test_a_deleted_document_removes_its_prefills() -> None:
    pending = queue()
    for text in ("a", "b"):
        pending.add_written(chunk(text, "gone.md"))
    pending.add_written(chunk("c", "kept.md"))
    assert pending.forget_document("gone.md", NOW_MS) == 2
    assert pending.forget_document("gone.md", NOW_MS) == 0
    assert drained(pending) == ["c"]


def test_if_any_document_may_be_deleted_no_prefill_is_left() -> None:
    pending = queue()
    for text in ("a", "b"):
        pending.add_written(chunk(text, f"{text}.md"))
    pending.forget_all(NOW_MS)
    pending.check()
    assert drained(pending) == []
    for _ in range(3):
        miss(pending, chunk("a"))
    assert pending.advance_to_first(NOW_MS) is None


def test_a_question_from_before_a_delete_queues_nothing() -> None:
    pending = queue()
    miss(pending, chunk("a"))
    pending.forget_document("a.md", NOW_MS)
    for _ in range(3):
        miss(pending, chunk("a"))
    assert pending.advance_to_first(NOW_MS) is None
    for _ in range(2):  # it has been written again
        miss(pending, chunk("a", at_ms=NOW_MS + 1))
    assert pending.advance_to_first(NOW_MS) is not None


def test_an_expired_prefill_is_dropped() -> None:
    pending = queue()
    pending.add_written(chunk("a", at_ms=0))
    pending.add_written(chunk("b", at_ms=1))
    assert drained_at(pending, MAX_AGE_MS + 1) == ["b"]
    assert len(pending) == 0


def test_a_postponed_prefill_is_last_until_it_is_missed_again() -> None:
    pending = queue()
    for _ in range(2):
        miss(pending, chunk("hot"))
    for text in "ab":
        pending.add_written(chunk(text))
    pending.postpone(chunk("hot"))
    first = pending.advance_to_first(NOW_MS)
    assert first is not None
    assert first.prefill.texts == ("a",)
    miss(pending, chunk("hot"))
    assert drained(pending) == ["hot", "a", "b"]
    pending.postpone(chunk("hot"))
    assert len(pending) == 0


@given(
    uses=st.lists(st.floats(0, 1e6), min_size=1, max_size=30),
    later_s=st.floats(0, 1e6),
    saved_s=st.floats(1e-6, 1e3),
)
def test_one_more_use_gives_the_higher_priority(
    uses: list[float], later_s: float, saved_s: float
) -> None:
    pending = queue()
    for text in ("less", "more"):
        pending.add_written(chunk(text))
    for now in sorted(uses):
        for text in ("less", "more"):
            miss(pending, chunk(text), now, saved_s)
    miss(pending, chunk("more"), max(uses) + later_s, saved_s)
    assert drained(pending) == ["more", "less"]


class QueueMachine(RuleBasedStateMachine):
    """Compares the queue with a model that computes each priority from all uses."""

    TEXTS = st.sampled_from("abcdefgh")
    DOCUMENTS = st.sampled_from(["a.md", "b.md"])
    SETS = st.sampled_from([("a.md",), ("b.md",), ("a.md", "b.md"), ("b.md", "a.md", "b.md")])
    MAX_CHUNKS = 5

    def __init__(self) -> None:
        super().__init__()
        self.queue = queue(self.MAX_CHUNKS)
        self.now = 0.0
        self.now_ms = 1
        self.num_arrived = 0
        self.waiting: dict[str, tuple[int, tuple[str, ...]]] = {}
        self.uses: dict[str, list[float]] = defaultdict(list)
        self.misses: dict[str, list[float]] = defaultdict(list)
        self.times: dict[str, int] = defaultdict(int)
        self.saved_s: dict[str, float] = {}

    def decayed(self, times: list[float]) -> float:
        return sum(2.0 ** ((at - self.now) / HALF_LIFE_S) for at in times)

    def sort_key(self, text: str) -> tuple[float, int]:
        priority = self.decayed(self.uses[text]) * self.saved_s.get(text, 0.0) / TOKENS
        return (-priority, self.waiting[text][0])

    def put(self, text: str, documents: tuple[str, ...]) -> None:
        self.num_arrived += 1
        self.waiting[text] = (self.waiting.get(text, (self.num_arrived, ()))[0], documents)
        while len(self.waiting) > self.MAX_CHUNKS:
            del self.waiting[max(self.waiting, key=self.sort_key)]

    @rule(seconds=st.sampled_from([0.0, 1.0, 7.0, 1000.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(text=TEXTS, documents=SETS)
    def write(self, text: str, documents: tuple[str, ...]) -> None:
        self.queue.add_written(chunk(text, *documents, at_ms=self.now_ms))
        self.put(text, documents)

    @rule(text=TEXTS, documents=SETS, saved_s=st.sampled_from([0.0, 1.0, 3.1]))
    def ask(self, text: str, documents: tuple[str, ...], saved_s: float) -> None:
        # No two priorities are equal, because rounding would then decide the order.
        saved_s *= 1 + ord(text) / 1000
        one = chunk(text, *documents, at_ms=self.now_ms)
        self.queue.record_question(one, self.now, num_tokens=TOKENS, saved_s=saved_s)
        missed_before = self.decayed(self.misses[text])
        self.uses[text].append(self.now)
        if saved_s:
            self.misses[text].append(self.now)
            self.saved_s[text] = saved_s
        required = MISSED_BEFORE * MISS_GROWTH ** self.times[text]
        if text in self.waiting or (saved_s and missed_before >= required):
            self.put(text, documents)

    @rule()
    def compute(self) -> None:
        one = self.queue.advance_to_first(self.now_ms)
        assert (one is None) is (not self.waiting)
        if one is not None:
            best = min(self.waiting, key=self.sort_key)
            assert one.prefill.texts == (best,)
            self.queue.mark_done(one.prefill)
            del self.waiting[best]
            if self.uses[best]:
                self.misses[best] = []
                self.times[best] += 1

    @rule(document=DOCUMENTS)
    def forget(self, document: str) -> None:
        gone = [text for text, (_, of) in self.waiting.items() if document in of]
        assert self.queue.forget_document(document, self.now_ms) == len(gone)
        self.now_ms += 1
        for text in gone:
            del self.waiting[text]
            self.uses.pop(text, None)
            self.misses.pop(text, None)
            self.saved_s.pop(text, None)
            self.times.pop(text, None)

    @invariant()
    def state_is_consistent(self) -> None:
        self.queue.check()
        assert len(self.queue) == len(self.waiting)


TestQueue = QueueMachine.TestCase


@pytest.mark.parametrize("max_known", [1, 3])
def test_the_remembered_demand_is_bounded(max_known: int) -> None:
    pending = queue(max_known=max_known)
    for text in "abcdef":
        miss(pending, chunk(text))
    pending.check()
    miss(pending, chunk("a"))
    assert pending.advance_to_first(NOW_MS) is None, "its first miss is long forgotten"


def numbered(document: str, count: int, size: int = 1) -> list[Prefill]:
    return [
        Prefill((f"{document}{ordinal}".ljust(size),), (document,), NOW_MS, ordinal=ordinal)
        for ordinal in range(count)
    ]


def sequence(pending: PrecomputeQueue, max_chars: int) -> list[str]:
    return [one.prefill.texts[0].strip() for one in pending.next_sequence(NOW_MS, max_chars)]


def test_a_sequence_has_the_chunks_of_the_heads_document_in_their_order() -> None:
    pending = queue()
    for one in reversed(numbered("a", 4, size=10)):
        pending.add_written(one)
    for one in numbered("b", 4, size=10):
        pending.add_written(one)
    assert sequence(pending, 40) == ["a0", "a1", "a2", "a3"]


def test_a_long_document_is_cut_into_groups_and_the_heads_group_comes_first() -> None:
    pending = queue()
    for one in numbered("a", 6, size=10):
        pending.add_written(one)
    for _ in range(2):
        miss(pending, numbered("a", 6, size=10)[3])
    assert sequence(pending, 20) == ["a2", "a3"]


def test_a_short_document_is_filled_with_the_next_chunks_of_the_queue() -> None:
    pending = queue()
    for document in "abcd":
        pending.add_written(numbered(document, 1, size=10)[0])
    assert sequence(pending, 60) == ["a0", "b0", "c0"]
    pending.rank_document("d", [0.9])
    assert sequence(pending, 60) == ["d0", "a0", "b0"]
    assert sequence(pending, 20) == ["d0"]


def test_central_chunks_come_first_among_written_ones() -> None:
    pending = queue()
    for document in "abc":
        pending.add_written(numbered(document, 1)[0])
    pending.rank_document("b", [0.5])
    pending.rank_document("c", [0.7])
    assert pending.unranked_documents() == ["a"]
    assert drained(pending) == ["c0", "b0", "a0"]


def test_missed_chunks_come_before_central_ones_and_keep_their_rank() -> None:
    pending = queue()
    first, second = numbered("a", 2)
    pending.add_written(first)
    pending.add_written(second)
    pending.rank_document("a", [0.9, 0.1])
    # A question does not know the index of a chunk.
    miss(pending, Prefill(second.texts, ("a",), NOW_MS))
    assert drained(pending) == ["a1", "a0"]


def test_prefills_of_several_chunks_are_computed_alone() -> None:
    pending = queue()
    context = Prefill(("x", "y"), ("a", "b"), NOW_MS, "exact")
    for _ in range(2):
        miss(pending, context)
    pending.add_written(numbered("a", 1)[0])
    assert [one.prefill for one in pending.next_sequence(NOW_MS, 100)] == [context]
    pending.mark_done(context)
    assert sequence(pending, 100) == ["a0"]


@given(
    documents=st.lists(st.lists(st.integers(1, 40), max_size=8), max_size=6),
    ranks=st.lists(st.floats(-1, 1), max_size=8),
    max_chars=st.integers(1, 200),
)
def test_sequences_cover_the_queue_within_their_bound(
    documents: list[list[int]], ranks: list[float], max_chars: int
) -> None:
    pending = queue()
    written = {
        Prefill((f"{d}.{o}.".ljust(size, "x"),), (str(d),), NOW_MS, ordinal=o)
        for d, sizes in enumerate(documents)
        for o, size in enumerate(sizes)
    }
    for one in sorted(written, key=lambda one: one.name):
        pending.add_written(one)
    for document in range(len(documents)):
        pending.rank_document(str(document), ranks)
    computed: set[Prefill] = set()
    while found := pending.next_sequence(NOW_MS, max_chars):
        prefills = [one.prefill for one in found]
        head = pending.advance_to_first(NOW_MS)
        assert head is not None
        assert head.prefill in prefills
        assert len(set(prefills)) == len(prefills)
        assert len(prefills) == 1 or sum(len(p.texts[0]) for p in prefills) <= max_chars
        assert computed.isdisjoint(prefills)
        for prefill in prefills:
            pending.mark_done(prefill)
        computed.update(prefills)
        pending.check()
    assert computed == written
