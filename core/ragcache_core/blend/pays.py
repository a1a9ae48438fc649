"""Whether a blend pays: what it takes against computing, by what both have taken (DESIGN §5.2)."""

from __future__ import annotations

from ragcache_core.line import Line

MIN_WEIGHT = 3.5
"""Of observations of each kind, before anything is predicted: four, as old ones count a little
less. Until then blends are tried."""

RETRY_EVERY = 16
"""One in so many blends that would not pay is made all the same: what is not done is not measured,
and one that was slow in a bad minute would be so for ever."""


class BlendPays:
    """Not safe to share between threads. Sizes are tokens."""

    def __init__(self) -> None:
        self._computing, self._loading, self._repairing = Line(), Line(), Line()
        self._declined = 0

    def computed(self, tokens: int, seconds: float) -> None:
        """A pass of a prefill took so long."""
        self._computing.observe(tokens, seconds)

    def loaded(self, tokens: int, seconds: float) -> None:
        """A load took so long, from its start until its tokens were in place."""
        self._loading.observe(tokens, seconds)

    def repaired(self, tokens: int, seconds: float) -> None:
        """A repair took so long, the question's look and the turns of others included."""
        self._repairing.observe(tokens, seconds)

    def decide(self, *, behind: int, loads: int, repairs: int, rest: int) -> bool:
        """Whether to blend; to be asked once for each request.

        behind: tokens that would be computed without the blend. loads, repairs: tokens loaded and
        recomputed with it; rest: those that are computed after it.
        """
        lines = [self._computing, self._loading, *([self._repairing] if repairs else [])]
        if min(line.weight for line in lines) < MIN_WEIGHT:
            return True
        takes = self._loading.predict(loads)
        takes += self._repairing.predict(repairs) if repairs else 0.0
        takes += self._computing.predict(rest) if rest else 0.0
        if takes <= self._computing.predict(behind):
            return True
        self._declined += 1
        return self._declined % RETRY_EVERY == 0
