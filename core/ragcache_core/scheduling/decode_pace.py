"""Learn the time between two tokens of an answer, over the number of answers generated at once.

One pass of an engine gives each of its answers a token, so more answers make each of them slower.
"""

from __future__ import annotations

from typing import Final

MIN_ANSWERS: Final = 8
"""Answers after which the time is predicted."""

_DECAY: Final = 0.95
"""Weight of an answer relative to the next one. About twenty answers count."""
_MIN_SPREAD: Final = 0.1
"""Least spread of the numbers of answers, as a share of their mean, that determines a slope."""


class DecodePace:
    """Exponentially weighted least-squares fit for one engine.

    It does not extrapolate from one number of answers to others: without a measured slope the time
    is the mean. Otherwise an engine that was never busy would never become busy.
    """

    def __init__(self) -> None:
        self._num_answers = 0
        # Sums of weight 1, number, number squared, seconds, number times seconds, answer seconds.
        self._sums = [0.0] * 6

    def observe(self, num_decoding: float, token_s: float, answer_s: float) -> None:
        """Record an answer.

        Args:
            num_decoding: Mean number of answers that were generated at once, this one included.
            token_s: Mean seconds from one of its tokens to the next.
            answer_s: Seconds from its first token to its last.
        """
        terms = (
            *(1.0, num_decoding, num_decoding**2),
            *(token_s, num_decoding * token_s, answer_s),
        )
        self._sums = [_DECAY * one + term for one, term in zip(self._sums, terms, strict=True)]
        self._num_answers += 1

    def num_after(self, num_decoding: int, num_pending: int, seconds: float) -> float:
        """Return how many answers are generated after some seconds.

        Requests that wait now generate their answers then, and some of the present ones have ended.
        By the present answers alone, requests would be admitted as long as those before them have
        no token yet. Then too many answers come at once, and after them too few.

        Source: Mooncake (arXiv 2407.00079) section 7.4.
        """
        answer_s = self._sums[5] / self._sums[0] if self._num_answers else 0.0
        left_share = max(0.0, 1.0 - seconds / answer_s) if answer_s > 0 else 1.0
        return num_pending + left_share * num_decoding

    def token_s(self, num_decoding: float) -> float | None:
        """Return the predicted seconds between two tokens; None after few answers.

        Args:
            num_decoding: Answers that are generated at once.
        """
        if self._num_answers < MIN_ANSWERS:
            return None
        at_zero_s, slope_s = self._fit()
        return at_zero_s + slope_s * num_decoding

    def wait_s(self, num_decoding: float, limit_s: float) -> float:
        """Return when so many answers have ended that the next one keeps a limit; 0: never.

        Args:
            num_decoding: Answers that are generated now.
        """
        if self._num_answers < MIN_ANSWERS or not num_decoding:
            return 0.0
        at_zero_s, slope_s = self._fit()
        if slope_s <= 0 or limit_s < at_zero_s + slope_s:
            return 0.0
        most = int((limit_s - at_zero_s) / slope_s)
        num_over = max(0.0, num_decoding + 1 - most)
        return num_over * (self._sums[5] / self._sums[0]) / num_decoding

    def _fit(self) -> tuple[float, float]:
        """Return the seconds without any answer, and those that each one adds."""
        weight, total, squares, total_s, products, _ = self._sums
        mean, mean_s = total / weight, total_s / weight
        spread = squares / weight - mean**2
        slope_s = 0.0
        if spread > (_MIN_SPREAD * mean) ** 2:
            slope_s = (products / weight - mean * mean_s) / spread
        slope_s = min(max(slope_s, 0.0), mean_s / mean if mean else 0.0)
        return mean_s - slope_s * mean, slope_s
