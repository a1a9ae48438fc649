"""Quality controller: which questions are replayed, and the resulting alpha."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ragcache_core.blend.fix_overhead import VariantFit
from ragcache_core.blend.token_selection import share_to_tokens, wanted_tokens
from ragcache_core.blend.variant_selection import ALPHA
from ragcache_core.identity.keys import VariantKey
from ragcache_core.plan.prompt import assemble
from ragcache_core.quality.calibration import Calibration
from ragcache_core.quality.controller import (
    MAX_AGE_MS,
    MAX_ENGINE_LOSSES,
    MAX_QUESTIONS,
    MIN_QUESTIONS,
    RETRY_EVERY,
    SAMPLE_EVERY,
    SAMPLE_UNDECIDED_EVERY,
    WINDOW_QUESTIONS,
    AskedQuestion,
    QualityController,
    QualityDecision,
    QuestionReplay,
    QuestionReservoir,
    alpha_ladder,
)
from ragcache_core.quality.similarity import rouge_l
from ragcache_core.quality.similarity import words as words_of

SHARE = 0.2
BLENDED_TOKENS = 100
shares = st.floats(0, 1)
words = st.lists(st.sampled_from("abc"), max_size=8)


def question(*documents: str, at: int = 1) -> AskedQuestion:
    return AskedQuestion(assemble([1], [[2]], [3]), documents or ("a",), at)


@dataclass
class World:
    """Answers of ten words; a blend with alpha gets `right(alpha)` of them right."""

    control: QualityController
    right: Callable[[float], int]
    asked: list[float | None] = field(default_factory=list)

    def answer(self, replay: QuestionReplay) -> None:
        self.asked.append(replay.alpha)
        if replay.alpha is None:
            self.control.record_answer(replay, "w " * 10, 0, 0)
            return
        right = self.right(replay.alpha)
        recomputed = round(BLENDED_TOKENS * min(SHARE, 0.6 * replay.alpha))
        assert self.control.record_answer(
            replay, "w " * right + "x " * (10 - right), BLENDED_TOKENS, recomputed
        )

    def try_questions(self, count: int) -> None:
        for number in range(count):
            self.control.offer(question(at=number + 1), number + 1)
            while (replay := self.control.begin_replay(number + 1)) is not None:
                self.answer(replay)


def world(target: float, right: Callable[[float], int]) -> World:
    return World(QualityController(target, SHARE), right)


class TestLadder:
    @given(st.floats(0.01, 1), st.floats(0.5, 1))
    def test_it_differs_below_the_limit_for_a_chunk_without_its_prefix(
        self, budget: float, cci: float
    ) -> None:
        """The three lowest alphas recompute ever more tokens; the two highest reach the limit."""
        fit, tokens = VariantFit(VariantKey(bytes(16), bytes(16)), cci, 0.0), 10_000
        recomputed = [
            min(wanted_tokens(fit.fix_overhead(alpha), tokens), share_to_tokens(budget, tokens))
            for alpha in alpha_ladder(budget)
        ]
        assert 0 == recomputed[0] < recomputed[1] < recomputed[2] <= recomputed[3]
        assert recomputed[-1] == recomputed[-2] == share_to_tokens(budget, tokens)

    @given(shares)
    def test_it_ascends_and_ends_with_the_default(self, budget: float) -> None:
        ladder = alpha_ladder(budget)
        assert list(ladder) == sorted(ladder)
        assert ladder[-1] == (ALPHA if budget else 0)

    def test_a_share_outside_0_to_1_is_rejected(self) -> None:
        with pytest.raises(ValueError, match="recompute_share"):
            alpha_ladder(1.1)


class TestDecision:
    def test_each_question_is_asked_in_full_and_then_with_every_alpha(self) -> None:
        tried = world(0.9, lambda _: 10)
        tried.try_questions(2)
        assert tried.asked == 2 * [None, *alpha_ladder(SHARE)]

    def test_nothing_is_decided_before_min_questions(self) -> None:
        tried = world(1.0, lambda _: 0)
        tried.try_questions(MIN_QUESTIONS - 1)
        decision = tried.control.decision
        assert (decision.decided, decision.alpha, decision.computes_all) == (False, None, False)

    def test_the_least_sufficient_alpha_is_chosen(self) -> None:
        tried = world(0.9, lambda alpha: 10 if alpha >= SHARE else 5)
        tried.try_questions(MIN_QUESTIONS)
        assert tried.control.decision.alpha is not None
        # Between half of the share (0.5) and all of it (1.0) the quality is interpolated.
        assert tried.control.decision.alpha == pytest.approx(0.9 * SHARE)
        found = tried.control.decision.calibration
        assert found is not None
        assert found.quality == pytest.approx(0.9)
        assert found.fix_overhead == pytest.approx(0.108)

    def test_if_no_alpha_suffices_everything_is_computed_and_some_questions_are_sampled(
        self,
    ) -> None:
        tried = world(0.9, lambda _: 5)
        tried.try_questions(MIN_QUESTIONS)
        assert tried.control.decision.computes_all
        left = [tried.control.sample_for_trial() for _ in range(3 * RETRY_EVERY)]
        assert sum(left) == 3

    def test_before_a_decision_more_questions_are_sampled(self) -> None:
        tried = world(0.9, lambda _: 5)
        sampled = [tried.control.sample_for_trial() for _ in range(3 * SAMPLE_UNDECIDED_EVERY)]
        assert sum(sampled) == 3

    def test_another_gateways_decision_holds_until_there_is_an_own_one(self) -> None:
        tried = world(0.9, lambda _: 5)
        adopted = QualityDecision(True, Calibration(0.5, 0.1, 0.95))
        tried.control.adopt(adopted)
        assert tried.control.decision == adopted
        tried.try_questions(MIN_QUESTIONS)
        assert tried.control.decision.computes_all
        tried.control.adopt(adopted)
        assert tried.control.decision.computes_all

    def test_it_follows_the_quality_of_later_answers(self) -> None:
        tried = world(0.9, lambda _: 5)
        tried.try_questions(MIN_QUESTIONS)
        tried.right = lambda _: 10
        tried.try_questions(WINDOW_QUESTIONS * SAMPLE_EVERY)
        assert tried.control.decision.alpha == 0.0

    def test_with_a_full_window_few_questions_are_replayed(self) -> None:
        tried = world(0.9, lambda _: 10)
        tried.try_questions(WINDOW_QUESTIONS)
        tried.asked.clear()
        tried.try_questions(3 * SAMPLE_EVERY)
        assert tried.asked.count(None) == 3

    def test_a_sampled_question_is_always_replayed(self) -> None:
        tried = world(0.9, lambda _: 10)
        tried.try_questions(WINDOW_QUESTIONS)
        for number in range(3):
            tried.control.offer(question(at=100 + number), 100, is_sampled=True)
            assert tried.control.begin_replay(102) is not None

    def test_an_expired_question_is_abandoned_during_its_replays(self) -> None:
        control = QualityController(0.9, SHARE)
        control.offer(question(at=1), 1)
        full = control.begin_replay(1)
        assert full is not None
        control.record_answer(full, "w", 0, 0)
        control.remove_expired(2 + MAX_AGE_MS)
        assert not control.record_answer(QuestionReplay(full.question, 0.0), "w", BLENDED_TOKENS, 0)

    def test_a_question_that_is_no_longer_blended_is_abandoned(self) -> None:
        control = QualityController(0.9, SHARE)
        control.offer(question(), 1)
        full = control.begin_replay(1)
        assert full is not None
        assert not control.record_answer(full, "w", 0, 0)
        first = control.begin_replay(1)
        assert first is not None
        assert not control.record_answer(first, "w", 0, 0)
        assert control.begin_replay(1) is None

    def test_an_interrupted_replay_is_asked_again(self) -> None:
        control = QualityController(0.9, SHARE)
        control.offer(question(), 1)
        first, again = control.begin_replay(1), control.begin_replay(1)
        assert first is not None
        assert again is not None
        assert (first.question, first.alpha) == (again.question, again.alpha)
        control.abandon(again)
        assert control.begin_replay(1) is None

    def test_an_answer_to_an_abandoned_question_is_ignored(self) -> None:
        control = QualityController(0.9, SHARE)
        control.offer(question("gone"), 1)
        full = control.begin_replay(1)
        assert full is not None
        control.record_answer(full, "w", 0, 0)
        replay = control.begin_replay(1)
        assert replay is not None
        control.forget_document("gone", 2)
        assert not control.record_answer(replay, "w", BLENDED_TOKENS, 0)
        assert control.begin_replay(2) is None

    def test_if_any_document_may_be_deleted_no_question_is_left(self) -> None:
        control = QualityController(0.9, SHARE)
        for at in (1, 2, 4):
            control.offer(question("kept", at=at), at)
        assert control.begin_replay(4) is not None
        control.forget_all(4)
        assert control.begin_replay(4) is None
        control.offer(question("kept", at=5), 5)
        assert control.begin_replay(5) is not None

    def test_a_question_expires_during_its_replays(self) -> None:
        control = QualityController(0.9, SHARE)
        control.offer(question(at=1), 1)
        assert control.begin_replay(1 + MAX_AGE_MS) is not None
        assert control.begin_replay(2 + MAX_AGE_MS) is None

    @given(wanted=shares, seed=st.lists(st.integers(0, 10), min_size=5, max_size=5))
    def test_a_lower_quality_never_needs_a_higher_alpha(
        self, wanted: float, seed: list[int]
    ) -> None:
        """For any quality of answers, a lower target never takes a higher alpha."""
        by_alpha = dict(zip(alpha_ladder(SHARE), seed, strict=True))
        low, high = world(wanted / 2, by_alpha.__getitem__), world(wanted, by_alpha.__getitem__)
        for one in (low, high):
            one.try_questions(MIN_QUESTIONS)
        if not high.control.decision.computes_all:
            lower, higher = low.control.decision.alpha, high.control.decision.alpha
            assert lower is not None
            assert higher is not None
            assert lower <= higher <= ALPHA


class Reservoirs(RuleBasedStateMachine):
    """The reservoir stays bounded, recent, and free of questions about deleted documents."""

    def __init__(self) -> None:
        super().__init__()
        self.reservoir = QuestionReservoir()
        self.now = 1
        self.deleted: dict[str, int] = {}

    @rule(step=st.integers(0, MAX_AGE_MS // 3))
    def time_passes(self, step: int) -> None:
        self.now += step

    @rule(documents=st.sets(st.sampled_from("abcd"), min_size=1), ago=st.integers(0, MAX_AGE_MS))
    def answered(self, documents: set[str], ago: int) -> None:
        self.reservoir.add(question(*documents, at=max(1, self.now - ago)), self.now)

    @rule(document=st.sampled_from("abcd"))
    def deleted_now(self, document: str) -> None:
        self.deleted[document] = self.now
        self.reservoir.forget_document(document, self.now)

    @precondition(lambda self: len(self.reservoir) > 0)
    @rule()
    def taken(self) -> None:
        found = self.reservoir.take_newest(self.now)
        if found is not None:
            assert self.now - found.planned_at_ms <= MAX_AGE_MS
            for document in found.documents:
                assert self.deleted.get(document, 0) < found.planned_at_ms

    @invariant()
    def is_bounded(self) -> None:
        assert len(self.reservoir) <= MAX_QUESTIONS


TestReservoirs = Reservoirs.TestCase


class TestReservoir:
    def test_the_newest_comes_first_and_the_oldest_is_dropped(self) -> None:
        reservoir = QuestionReservoir()
        asked = [question(at=n + 1) for n in range(MAX_QUESTIONS + 1)]
        for one in asked:
            reservoir.add(one, 20)
        taken = [reservoir.take_newest(20) for _ in range(MAX_QUESTIONS)]
        assert taken == asked[:0:-1]
        assert reservoir.take_newest(20) is None

    def test_a_question_planned_before_a_delete_is_not_kept(self) -> None:
        reservoir = QuestionReservoir()
        reservoir.forget_document("a", 5)
        reservoir.add(question("a", "b", at=5), 6)
        assert len(reservoir) == 0
        reservoir.add(question("a", "b", at=6), 6)
        assert len(reservoir) == 1

    def test_expired_questions_are_removed(self) -> None:
        reservoir = QuestionReservoir()
        reservoir.add(question(at=1), 1)
        reservoir.remove_expired(1 + MAX_AGE_MS)
        assert len(reservoir) == 1
        reservoir.remove_expired(2 + MAX_AGE_MS)
        assert len(reservoir) == 0


class TestRouge:
    def test_worked_example(self) -> None:
        assert rouge_l(["the", "cat", "sat"], ["the", "dog", "sat", "down"]) == pytest.approx(4 / 7)

    @given(words, words)
    def test_it_is_symmetric_and_1_for_equal_answers(
        self, one: list[str], other: list[str]
    ) -> None:
        value = rouge_l(one, other)
        assert 0 <= value <= 1
        assert value == rouge_l(other, one)
        assert (value == 1) == (one == other)

    def test_scripts_without_spaces_are_compared_by_character(self) -> None:
        assert words_of(" port 8080,\nin Paris") == ["port", "8080,", "in", "Paris"]
        assert words_of("端口是8080。") == ["端", "口", "是", "8080。"]
        assert "".join(words_of("ที่ปารีส")) == "ที่ปารีส"
        assert len(words_of("ที่ปารีส")) == len("ที่ปารีส")


def test_a_question_is_abandoned_after_two_engine_losses() -> None:
    control = QualityController(0.9, SHARE)
    for name in ("a", "b"):
        control.offer(question(name), 1)
    asked = []
    while (replay := control.begin_replay(1)) is not None:
        asked.append(replay.question)
        dropped = control.record_engine_loss(replay)
        assert dropped == (asked.count(replay.question) == MAX_ENGINE_LOSSES)
        # For an abandoned question nothing more is counted.
        assert not (dropped and control.record_engine_loss(replay))
    assert len(asked) == 2 * MAX_ENGINE_LOSSES
