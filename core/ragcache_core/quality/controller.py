"""Quality control: alpha found for a wanted quality from questions as they come (Cache-Craft §3.2).

Eq. 13 looks for the least alpha that reaches a wanted quality on a validation set, once and before
anything is served. Here the set is made of questions that were asked lately: each is asked again in
full, and as a blend under every alpha of a ladder. What answers agree with those of full
computations, and what was recomputed for it, makes trials (``calibration``); the last ones decide.
No right answer is needed for that, only another one.

The caller asks, one replay at a time (``next_replay``), and says what came of it (``note``).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ragcache_core.blend.selection import ALPHA
from ragcache_core.quality.calibration import Calibration, Trial, calibrate
from ragcache_core.quality.reservoir import AskedQuestion, QuestionReservoir
from ragcache_core.quality.rouge import rouge_l, words

MIN_QUESTIONS = 8
"""Tried before anything is decided; until then blends are made with ``blending.ALPHA``."""

WINDOW_QUESTIONS = 32
"""Tried last, by which is decided."""

SAMPLE_EVERY = 8
"""One in so many questions is tried once the window is full: a trial is a few answers' work."""

RETRY_EVERY = 16
"""One in so many questions is left to be tried where everything is computed: what is computed and
stored for a question is exact, so that asked again it would not be a blend."""

MAX_LOST = 2
"""Times that an engine may be lost over one question: the third could be lost to it, too."""


def alpha_ladder(budget: float) -> tuple[float, ...]:
    """The alphas to try, ascending. budget: the most that is recomputed, a share in [0, 1].

    The paper tries 0.5 to 3 (§6), with no budget. CCI is 0.5 or more (eq. 11), so that each of
    these has a chunk none of whose prefix is back want 0.25 and more, and under a budget of 0.2
    they are all one. Such a chunk wants CCI * alpha: at alpha = budget at most all that it may
    have, at twice that at least so much. One that has much of its prefix back wants less, and
    ``ALPHA`` gives it most. 0 is naive reuse.
    """
    if not 0 <= budget <= 1:
        raise ValueError(f"a budget lies in [0, 1], not {budget}")
    if budget == 0:
        return (0.0,)  # nothing is recomputed, whatever chunks want
    return (0.0, budget / 2, budget, 2 * budget, ALPHA)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What later questions are blended with.

    decided: there are enough trials. calibration: what alpha they call for; None, though decided:
    none of the ladder reaches the wanted quality, so that everything is to be computed.
    """

    decided: bool = False
    calibration: Calibration | None = None

    @property
    def computes_all(self) -> bool:
        """Whether nothing is to be blended."""
        return self.decided and self.calibration is None

    @property
    def alpha(self) -> float | None:
        """Alpha for a plan; None: the engine's own."""
        return self.calibration.alpha if self.calibration else None


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """A question to ask again. alpha: as a blend with it; None: computed in full."""

    question: AskedQuestion
    alpha: float | None


@dataclass(slots=True)
class _Trying:
    question: AskedQuestion
    full: list[str] | None = None  # words of the full computation's answer
    trials: list[Trial] = field(default_factory=list)
    lost: int = 0  # engines, while it was asked


class QualityControl:
    """Which questions to ask again, and what to make of it. Times are Unix milliseconds.

    wanted: quality, ROUGE-L F1 with the answer of full recomputation, in [0, 1]. budget: share of
    the tokens from other prefixes that may be recomputed, in [0, 1].
    """

    def __init__(self, wanted: float, budget: float) -> None:
        if not 0 <= wanted <= 1:
            raise ValueError(f"a quality lies in [0, 1], not {wanted}")
        self._wanted = wanted
        self._alphas = alpha_ladder(budget)
        self._reservoir = QuestionReservoir()
        self._trying: _Trying | None = None
        self._window: deque[list[Trial]] = deque(maxlen=WINDOW_QUESTIONS)
        self._offered = self._asked = 0
        self.verdict = Verdict()

    def is_left_to_try(self) -> bool:
        """Whether nothing is to be stored of a question about to be asked; once for each.

        Only where everything is computed, and then now and again.
        """
        if not self.verdict.computes_all:
            return False
        self._asked += 1
        return self._asked % RETRY_EVERY == 0

    def offer(self, question: AskedQuestion, now_ms: int, *, left_to_try: bool = False) -> None:
        """A question was answered that would be a blend if it were asked again.

        left_to_try: as ``is_left_to_try`` said of it; these are few enough already.
        """
        self._offered += not left_to_try
        is_sampled = left_to_try or self._offered % SAMPLE_EVERY == 0
        if is_sampled or len(self._window) < WINDOW_QUESTIONS:
            self._reservoir.add(question, now_ms)

    def prune(self, now_ms: int) -> None:
        """Let go of questions that have been kept for long enough; to be called now and then."""
        self._reservoir.prune(now_ms)
        self._leave_stale(now_ms)

    def delete(self, document: str, now_ms: int) -> None:
        """A document, or some of its text, is gone: what was asked about it is forgotten."""
        self._reservoir.delete(document, now_ms)
        self._leave_stale(now_ms)

    def next_replay(self, now_ms: int) -> Replay | None:
        """What to ask now; the same again until ``note`` or ``drop``. None: nothing."""
        self._leave_stale(now_ms)
        if self._trying is None:
            question = self._reservoir.take(now_ms)
            if question is None:
                return None
            self._trying = _Trying(question)
        trying = self._trying
        alpha = None if trying.full is None else self._alphas[len(trying.trials)]
        return Replay(trying.question, alpha)

    def note(self, replay: Replay, answer: str, blended: int, repaired: int) -> bool:
        """What came of a replay; returns whether that is a trial.

        blended: tokens that were taken from behind other chunks. repaired: those of them that were
        recomputed. A question that is not a blend any more says nothing, and is let go; so is what
        is said of one that was forgotten meanwhile.
        """
        trying = self._trying
        if trying is None or trying.question is not replay.question:
            return False
        if replay.alpha is None:
            trying.full = words(answer)
            return False
        if blended <= 0 or trying.full is None:
            self._trying = None
            return False
        quality = rouge_l(words(answer), trying.full)
        trying.trials.append(Trial(replay.alpha, min(1.0, repaired / blended), quality))
        if len(trying.trials) == len(self._alphas):
            self._decide(trying.trials)
            self._trying = None
        return True

    def drop(self, replay: Replay) -> None:
        """The question cannot be asked."""
        if self._trying and self._trying.question is replay.question:
            self._trying = None

    def lose(self, replay: Replay) -> bool:
        """An engine was lost while it was asked; returns whether the question is dropped for it."""
        trying = self._trying
        if trying is None or trying.question is not replay.question:
            return False
        trying.lost += 1
        if trying.lost == MAX_LOST:
            self._trying = None
        return trying.lost == MAX_LOST

    def _leave_stale(self, now_ms: int) -> None:
        if self._trying and not self._reservoir.may_ask(self._trying.question, now_ms):
            self._trying = None

    def _decide(self, trials: list[Trial]) -> None:
        """Only whole ladders count: the same questions under each alpha."""
        self._window.append(trials)
        if len(self._window) >= MIN_QUESTIONS:
            found = calibrate((trial for one in self._window for trial in one), self._wanted)
            self.verdict = Verdict(True, found)
