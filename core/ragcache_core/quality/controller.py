"""Find the recomputation factor alpha for a wanted quality while serving.

Eq. 13 looks for the least alpha that reaches a wanted quality on a validation set, once and before
serving. Here the validation set consists of recent questions. The caller replays each of them once
in full, and once as a blend under every alpha of a ladder. Each blended replay is a trial: the
similarity of its answer to the full one, and the share of tokens that it recomputed. The most
recent trials decide (``calibration``). No reference answer is needed.

The caller asks the engine one replay at a time (``begin_replay``, ``record_answer``).

Source: Cache-Craft section 3.2.

Recent questions are kept in a bounded number, for a bounded time, while their documents exist.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ragcache_core.access.reader import NO_READER, Reader
from ragcache_core.blend.variant_selection import ALPHA
from ragcache_core.cluster.recent_deletes import RecentDeletes
from ragcache_core.identity.keys import PUBLIC_DOMAIN
from ragcache_core.plan.prompt import Prompt
from ragcache_core.quality.calibration import Calibration, CalibrationTrial, calibrate
from ragcache_core.quality.similarity import rouge_l, words

MAX_QUESTIONS = 16
MAX_AGE_MS = 600_000
"""Ten minutes, after which a question is forgotten: what clients ask changes.
"""


@dataclass(frozen=True, slots=True, eq=False)
class AskedQuestion:
    """A question that was answered.

    Attributes:
        documents: Name of each chunk's document.
        planned_at_ms: A time before the gateway searched for the chunks.
        domain: Access domain of its KV.
        reader: Who asked.
    """

    prompt: Prompt
    documents: tuple[str, ...]
    planned_at_ms: int
    domain: str = PUBLIC_DOMAIN
    reader: Reader = NO_READER


class QuestionReservoir:
    """Keeps the newest MAX_QUESTIONS questions and returns the newest first."""

    def __init__(self) -> None:
        self._questions: deque[AskedQuestion] = deque(maxlen=MAX_QUESTIONS)
        self._deletes = RecentDeletes()

    def __len__(self) -> int:
        return len(self._questions)

    def add(self, question: AskedQuestion, now_ms: int) -> None:
        """Keep an answered question, if it may be replayed."""
        if self.may_replay(question, now_ms):
            self._questions.append(question)

    def take_newest(self, now_ms: int) -> AskedQuestion | None:
        """Remove and return the newest question that may be replayed."""
        while self._questions:
            question = self._questions.pop()
            if self.may_replay(question, now_ms):
                return question
        return None

    def forget_document(self, document: str, now_ms: int) -> None:
        """Remove the questions about a document that was deleted or changed."""
        self._deletes.record(document, now_ms)
        self.remove_expired(now_ms)

    def forget_all(self, now_ms: int) -> None:
        """Remove every question, as any document may have been deleted or changed."""
        self._deletes.record_all(now_ms)
        self.remove_expired(now_ms)

    def remove_expired(self, now_ms: int) -> None:
        """Remove questions that may not be replayed any more. Call it periodically."""
        left = [question for question in self._questions if self.may_replay(question, now_ms)]
        self._questions = deque(left, maxlen=MAX_QUESTIONS)

    def may_replay(self, question: AskedQuestion, now_ms: int) -> bool:
        """Whether it is recent, and none of its documents was deleted since it was planned."""
        is_recent = now_ms - question.planned_at_ms <= MAX_AGE_MS
        return is_recent and not self._deletes.may_include(
            question.documents, question.planned_at_ms
        )


MIN_QUESTIONS = 8
"""Questions to replay before the first decision; until then ``variant_selection.ALPHA`` applies."""

WINDOW_QUESTIONS = 32
"""Number of most recent questions that decide."""

SAMPLE_EVERY = 8
"""One in this many questions is replayed once the window is full, because a replay costs about as
much as a few answers."""

SAMPLE_UNDECIDED_EVERY = 4
"""One in this many questions is kept for a replay before the first decision, if nothing may be
blended until then."""

RETRY_EVERY = 16
"""One in this many questions is kept for a replay while everything is computed.

What is computed for a question is stored as exact, so a replay of it would not be a blend. The
engine therefore stores nothing for these questions.
"""

MAX_ENGINE_LOSSES = 2
"""A question is abandoned after this many engines were lost during its replays.

The question may be what makes the engines fail.
"""


def alpha_ladder(recompute_share: float) -> tuple[float, ...]:
    """Return the alphas to try, ascending.

    The paper tries 0.5 to 3 (section 6) without a limit on the recomputed share. CCI is at least
    0.5 (eq. 11), so with each of these a chunk without any of its old prefix asks for 25 % or more.
    Under a limit of 20 % they would all be the same. Such a chunk asks for CCI * alpha: with alpha
    = recompute_share at most the limit, with twice that at least the limit. A chunk with much of
    its old prefix asks for less, and ``ALPHA`` recomputes most of it. 0 is reuse without
    recomputation.

    Args:
        recompute_share: Maximum share of the tokens from other prefixes that may be recomputed, in
            [0, 1].
    """
    if not 0 <= recompute_share <= 1:
        raise ValueError(f"recompute_share lies in [0, 1], not {recompute_share}")
    if recompute_share == 0:
        return (0.0,)  # nothing is recomputed under any alpha
    return (0.0, recompute_share / 2, recompute_share, 2 * recompute_share, ALPHA)


@dataclass(frozen=True, slots=True)
class QualityDecision:
    """How to blend later questions.

    Attributes:
        decided: Whether there are enough trials.
        calibration: The alpha that the trials call for. None although decided: no alpha of the
            ladder reaches the wanted quality, so everything has to be computed.
    """

    decided: bool = False
    calibration: Calibration | None = None

    @property
    def computes_all(self) -> bool:
        """Whether no question may be blended."""
        return self.decided and self.calibration is None

    @property
    def alpha(self) -> float | None:
        """Alpha for a plan. None: the engine's default."""
        return self.calibration.alpha if self.calibration else None


@dataclass(frozen=True, slots=True, eq=False)
class QuestionReplay:
    """A question to ask again, as a blend with this alpha. None: computed in full."""

    question: AskedQuestion
    alpha: float | None


@dataclass(slots=True)
class _QuestionTrials:
    """The replays of one question so far."""

    question: AskedQuestion
    full_answer: list[str] | None = None  # words
    trials: list[CalibrationTrial] = field(default_factory=list)
    engine_losses: int = 0


class QualityController:
    """Selects the questions to replay and decides from their answers. Times are Unix milliseconds.

    Args:
        target_quality: ROUGE-L F1 with the answer of full recomputation, in [0, 1].
        recompute_share: Maximum share of the tokens from other prefixes that may be recomputed, in
            [0, 1].
    """

    def __init__(self, target_quality: float, recompute_share: float) -> None:
        if not 0 <= target_quality <= 1:
            raise ValueError(f"target_quality lies in [0, 1], not {target_quality}")
        self._target_quality = target_quality
        self._alphas = alpha_ladder(recompute_share)
        self._reservoir = QuestionReservoir()
        self._current: _QuestionTrials | None = None
        self._window: deque[list[CalibrationTrial]] = deque(maxlen=WINDOW_QUESTIONS)
        self._num_offered = self._num_computed = 0
        self.decision = QualityDecision()

    def adopt(self, decision: QualityDecision) -> None:
        """Use the decision of another gateway, or of an earlier run, until there is an own one."""
        if len(self._window) < MIN_QUESTIONS:
            self.decision = decision

    def sample_for_trial(self) -> bool:
        """Count a question and return whether the engine should store nothing for it.

        Call it once for each question that is not blended. Before the first decision every
        SAMPLE_UNDECIDED_EVERY-th one is sampled, and while everything is computed every
        RETRY_EVERY-th one.
        """
        every = RETRY_EVERY if self.decision.decided else SAMPLE_UNDECIDED_EVERY
        self._num_computed += 1
        return self._num_computed % every == 0

    def offer(self, question: AskedQuestion, now_ms: int, *, is_sampled: bool = False) -> None:
        """Offer an answered question that would be blended if it were asked again.

        Args:
            is_sampled: Result of ``sample_for_trial``. A sampled question is always kept.
        """
        self._num_offered += not is_sampled
        is_kept = is_sampled or self._num_offered % SAMPLE_EVERY == 0
        if is_kept or len(self._window) < WINDOW_QUESTIONS:
            self._reservoir.add(question, now_ms)

    def remove_expired(self, now_ms: int) -> None:
        """Remove questions that are too old. Call it periodically."""
        self._reservoir.remove_expired(now_ms)
        self._abandon_expired(now_ms)

    def forget_document(self, document: str, now_ms: int) -> None:
        """Remove the questions about a document that was deleted or changed."""
        self._reservoir.forget_document(document, now_ms)
        self._abandon_expired(now_ms)

    def forget_all(self, now_ms: int) -> None:
        """Remove every question, as any document may have been deleted or changed."""
        self._reservoir.forget_all(now_ms)
        self._abandon_expired(now_ms)

    def begin_replay(self, now_ms: int) -> QuestionReplay | None:
        """Return the replay to ask now, or None.

        The same replay is returned until ``record_answer`` or ``abandon`` is called with it.
        """
        self._abandon_expired(now_ms)
        if self._current is None:
            question = self._reservoir.take_newest(now_ms)
            if question is None:
                return None
            self._current = _QuestionTrials(question)
        current = self._current
        alpha = None if current.full_answer is None else self._alphas[len(current.trials)]
        return QuestionReplay(current.question, alpha)

    def record_answer(
        self, replay: QuestionReplay, answer: str, blended_tokens: int, recomputed_tokens: int
    ) -> bool:
        """Record the answer of a replay and return whether it is a trial.

        A question that is no longer blended says nothing, so it is abandoned. The answer to a
        question that was abandoned in the meantime is ignored.

        Args:
            replay: From ``begin_replay``.
            answer: Text.
            blended_tokens: Number of tokens that were loaded from other prefixes.
            recomputed_tokens: Number of those that were recomputed.
        """
        current = self._current
        if current is None or current.question is not replay.question:
            return False
        if replay.alpha is None:
            current.full_answer = words(answer)
            return False
        if blended_tokens <= 0 or current.full_answer is None:
            self._current = None
            return False
        quality = rouge_l(words(answer), current.full_answer)
        share = min(1.0, recomputed_tokens / blended_tokens)
        current.trials.append(CalibrationTrial(replay.alpha, share, quality))
        if len(current.trials) == len(self._alphas):
            self._decide(current.trials)
            self._current = None
        return True

    def abandon(self, replay: QuestionReplay) -> None:
        """Abandon a question that cannot be asked."""
        if self._current and self._current.question is replay.question:
            self._current = None

    def record_engine_loss(self, replay: QuestionReplay) -> bool:
        """Record that an engine was lost during a replay.

        Returns:
            Whether the question is abandoned for it.
        """
        current = self._current
        if current is None or current.question is not replay.question:
            return False
        current.engine_losses += 1
        if current.engine_losses == MAX_ENGINE_LOSSES:
            self._current = None
        return current.engine_losses == MAX_ENGINE_LOSSES

    def _abandon_expired(self, now_ms: int) -> None:
        if self._current and not self._reservoir.may_replay(self._current.question, now_ms):
            self._current = None

    def _decide(self, trials: list[CalibrationTrial]) -> None:
        """Decide from complete ladders only, that is, from the same questions under each alpha."""
        self._window.append(trials)
        if len(self._window) >= MIN_QUESTIONS:
            calibration = calibrate(
                (trial for one in self._window for trial in one), self._target_quality
            )
            self.decision = QualityDecision(True, calibration)
