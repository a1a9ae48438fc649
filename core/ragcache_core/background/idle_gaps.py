"""Predicts whether a question arrives soon, from the lengths of earlier idle gaps.

A gap is the time from the end of the last answer to the next question. Background work that begins
in a gap delays a question that arrives before the work ends. The expected delay follows from the
recent gaps that were at least as long as this one is now.

Two kinds of arrivals differ. If they are regular, a question is due at a certain time, and work
that waits until then delays nothing. If they are memoryless, no time is better than another, and
work that waits has lost the gap. So work begins unless the expected delay is both more than a share
of the work's time, and more than that of work that begins at a random time of a gap.

Long prefills are cut into slices, so that a question waits for one slice at most. vLLM schedules
running requests before waiting ones, so a long prefill holds every engine step until it ends. A
slice is a request for a longer beginning of the same prompt. The engine's prefix cache has the
beginning before it, and computes only what is new. A short slice delays questions less. But each
pass has a fixed cost, and each slice is a request of its own, so short slices waste time.
"""

from __future__ import annotations

import math
from collections import deque

from ragcache_core.cost.prefill_profile import PrefillProfile

MAX_GAPS = 32
"""Number of most recent gaps that count."""

DELAY_SHARE = 0.1
"""Work begins if it delays questions by at most this share of its own time. A second of it saves
questions a good part of a second later, so its delay is then a small part of its benefit."""

TOLERANCE = 2.0
"""Work also begins if it delays questions by at most this multiple of what it would delay them on
average. Below it, a difference may be chance."""

MAX_DELAY_SHARE = 0.5
"""Work never begins if it delays questions by more than this share of its own time: gaps are then
shorter than the work."""

_PRIOR_GAPS = 2.0
"""Weight of what is expected without the observed gaps, in gaps."""


class IdleGaps:
    """The recent idle gaps, in seconds."""

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=MAX_GAPS)

    def record(self, gap_s: float) -> None:
        """Record that a question ended a gap."""
        if not (math.isfinite(gap_s) and gap_s >= 0):
            raise ValueError(f"gap_s must be finite and 0 or more, not {gap_s}")
        self._gaps.append(gap_s)

    def may_begin(self, elapsed_s: float, work_s: float) -> bool:
        """Whether work should begin in a gap.

        Args:
            elapsed_s: Time since the gap began.
            work_s: Time that the work holds the engine.
        """
        delay_s = self.expected_delay_s(elapsed_s, work_s)
        usual_s = max(DELAY_SHARE * work_s, TOLERANCE * self.mean_delay_s(work_s))
        return delay_s <= min(usual_s, MAX_DELAY_SHARE * work_s)

    def expected_delay_s(self, elapsed_s: float, work_s: float) -> float:
        """Return how long work that begins now delays a question, on average.

        The longer a gap lasts that no earlier one has reached, the longer it may still last.
        """
        longer = [gap_s for gap_s in self._gaps if gap_s > elapsed_s]
        delays_s = math.fsum(max(0.0, elapsed_s + work_s - gap_s) for gap_s in longer)
        lasting_s = work_s * work_s / (2 * (elapsed_s + work_s))
        prior_s = min(self.mean_delay_s(work_s), lasting_s)
        return (delays_s + _PRIOR_GAPS * prior_s) / (len(longer) + _PRIOR_GAPS)

    def mean_delay_s(self, work_s: float) -> float:
        """Return how long work delays a question that begins at a random time of a gap."""
        total_s = math.fsum(self._gaps)
        if total_s <= 0:
            return 0.0
        # Work that begins at x of a gap delays its question by max(0, x + work_s - gap_s).
        areas = (min(gap_s, work_s) * (work_s - min(gap_s, work_s) / 2) for gap_s in self._gaps)
        # Areas of the shortest gaps that floats can hold are rounded to more than the work's time.
        return min(work_s, math.fsum(areas) / total_s)


ALIGNMENT_TOKENS = 128
"""Slices end at multiples of this many tokens. vLLM's prefix cache has whole blocks only, of 128
tokens on a CPU and of 16 on most devices. A slice that ends inside a block computes it twice."""

SHORT_S = 0.02
"""A slice of at most this time may be longer than the rate requires."""

MAX_REST_SHARE = 0.5
"""The last slice may be longer than the others by this share."""

MAX_SLOWDOWN = 1.2
"""Most time per token of a slice, as a multiple of the best time per token of any slice."""


def slice_tokens(profile: PrefillProfile, request_s: float, cached: int = 0) -> int:
    """Return how many tokens to compute with one request.

    That is the least number whose time per token is within MAX_SLOWDOWN of the best, or more if
    that still takes at most SHORT_S.

    Args:
        profile: Time of the engine's passes.
        request_s: Time of a request besides its pass.
        cached: Tokens before the slice, on average.
    """
    longest = max(ALIGNMENT_TOKENS, profile.pass_tokens // ALIGNMENT_TOKENS * ALIGNMENT_TOKENS)
    seconds = {
        tokens: request_s + profile.predict(cached, tokens)
        for tokens in range(ALIGNMENT_TOKENS, longest + 1, ALIGNMENT_TOKENS)
    }
    best_s = min(s / tokens for tokens, s in seconds.items())
    least = min(t for t, s in seconds.items() if s / t <= MAX_SLOWDOWN * best_s)
    return max([least, *(t for t, s in seconds.items() if s <= SHORT_S)])


def slice_ends(first: int, end: int, num_tokens: int) -> list[int]:
    """Return the end positions of the slices of prompt tokens [first, end), ascending.

    A short rest joins the slice before it: as a slice of its own it would cost almost as much.

    Args:
        first: Position from which the prompt is computed.
        num_tokens: Tokens of a slice, at least 1. Slices shorter than ALIGNMENT_TOKENS are not
            aligned.
    """
    unit = ALIGNMENT_TOKENS if num_tokens >= ALIGNMENT_TOKENS else 1
    ends = []
    position = first
    while end - position > (1 + MAX_REST_SHARE) * num_tokens:
        position = (position + num_tokens) // unit * unit
        ends.append(position)
    return [*ends, end] if first < end else []
