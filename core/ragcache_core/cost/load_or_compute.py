"""Whether reuse is faster than computing, by what both have taken (DESIGN §1).

"Compute everything" always competes: what is predicted to be slower is not done. Loading is
predicted by bytes and where they are (a store's ``Tier``, or a tier of the engine's own),
repairing by tokens, computing by a profile measured at start (``prefill_profile``), which what
passes take goes on correcting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ragcache_core.cost.linear_fit import DECAY, Line
from ragcache_core.cost.prefill_profile import PrefillProfile

MIN_WEIGHT = 3.5
"""Of observations of each kind, before anything is predicted: four, as old ones count a little
less. Until then reuse is tried."""

RETRY_EVERY = 16
"""One in so many reuses that would not pay is made all the same: what is not done is not measured,
and one that was slow in a bad minute would be so for ever."""

TIE = 1.1
"""Predictions that differ by less are the same. Then more is loaded: what is not computed leaves
the engine to others."""

LATE_LOADS = 2
"""In a row from one place, and what the last ones took is expected of the next one, whatever was
seen before; the first may have met a machine that paused. Averages would forget a fast past only
after some fifty more, each of which is waited for in vain."""

PROFILE_WEIGHT = 2.0
"""How many passes of a usual size the profile is worth, before what is seen takes over."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """One way to begin a prompt: all of it before ``end`` is there without a prefill.

    loads: bytes by place. repairs: tokens recomputed, those included of which nothing is held.
    """

    end: int
    loads: Mapping[str, int] = field(default_factory=dict)
    repairs: int = 0


class ReuseCosts:
    """Not safe to share between threads, but that others may read. Sizes are tokens and bytes."""

    def __init__(self) -> None:
        self.profile: PrefillProfile | None = None
        self._predicted_s = self._taken_s = 0.0  # of passes, old ones counting less
        self._computing, self._repairing = Line(), Line()
        self._loading: dict[str, Line] = {}
        self._late: dict[str, list[float]] = {}  # by place, since the last load that came
        self._declined: Counter[bool] = Counter()  # by whether something would be repaired

    def start_from(self, profile: PrefillProfile) -> None:
        """Predict computing by this profile; without one it is put down to tokens."""
        self.profile = profile
        usual_s = profile.predict(0, profile.computed[-1])
        self._predicted_s = self._taken_s = PROFILE_WEIGHT * usual_s

    def work(self, cached: float, computed: int) -> float:
        """Size of a pass that computes so many tokens behind so many (on average) at hand."""
        return self.profile.predict(round(cached), computed) if self.profile else float(computed)

    def computed(self, work: float, seconds: float) -> None:
        """A pass of a prefill took so long. work: of just this pass, as ``work`` gave it."""
        if self.profile is None:
            self._computing.observe(work, seconds)
        elif work > 0 and seconds > 0:
            self._predicted_s = DECAY * self._predicted_s + work
            self._taken_s = DECAY * self._taken_s + seconds

    def loaded(self, loads: Mapping[str, int], seconds: float) -> None:
        """A load took so long, from its start until its tokens were in place.

        One from several places is shared out: what is known of some is taken as known, and the
        rest is the others'. Where all are known, each has been off by as much.
        """
        sizes = {place: size for place, size in loads.items() if size > 0}
        for place in sizes:
            self._late.pop(place, None)
        known = {p: self._line(p).predict(size) for p, size in sizes.items() if self._knows(p)}
        expected_s = sum(known.values())
        if len(known) == len(sizes):
            for place, place_s in known.items():
                self._line(place).observe(sizes[place], seconds * place_s / expected_s)
        elif seconds > expected_s:
            others = {place: size for place, size in sizes.items() if place not in known}
            byte_s = (seconds - expected_s) / sum(others.values())
            for place, size in others.items():
                self._line(place).observe(size, byte_s * size)

    def late(self, places: Iterable[str], seconds: float) -> None:
        """A load from these places was given up after so long; it would have taken longer still."""
        for place in places:
            self._late.setdefault(place, []).append(seconds)
            del self._late[place][:-LATE_LOADS]

    def repaired(self, tokens: int, seconds: float) -> None:
        """A repair took so long, the question's look and the turns of others included."""
        self._repairing.observe(tokens, seconds)

    def compute_s(self, cached: int, computed: int) -> float | None:
        """Seconds that computing is going to take; None: not known yet."""
        if computed <= 0:
            return 0.0
        if self.profile is not None:
            return self.correction * self.profile.predict(cached, computed)
        if not _is_known(self._computing):
            return None
        return self._computing.predict(computed)

    def bandwidths(self) -> Mapping[str, tuple[float, float]]:
        """(latency in seconds, bytes per second) of loads, by place, as far as that is known.

        Safe to call from any thread.
        """
        lines = {place: line.fit() for place, line in [*self._loading.items()] if _is_known(line)}
        return {place: (latency_s, 1.0 / byte_s) for place, (latency_s, byte_s) in lines.items()}

    @property
    def correction(self) -> float:
        """What passes take, over what the profile says; 1 without one."""
        return self._taken_s / self._predicted_s if self.profile is not None else 1.0

    def best(
        self, first: int, length: int, reuses: Sequence[Reuse], *, tie: float = TIE
    ) -> Reuse | None:
        """The one to take for a prompt of ``length`` tokens, of which ``first`` are at hand.

        reuses: each goes further than those before it. Returns None where computing all is fastest.
        The furthest is tried where something about it is not known. To be asked once for each
        decision. Reuses that are repaired and such that are not have turns of their own at being
        made all the same: a prompt may be asked for with the ones and then with the others.
        """
        if not reuses:
            return None
        furthest = reuses[-1]
        takes = [self.takes_s(reuse, length) for reuse in reuses]
        computing = self.compute_s(first, length - first)
        known = [seconds for seconds in (computing, *takes) if seconds is not None]
        if len(known) <= len(reuses):
            return furthest
        near = tie * min(known)
        chosen = next(
            reuse
            for reuse, seconds in zip((*reversed(reuses), None), reversed(known), strict=True)
            if seconds <= near
        )
        if chosen is not furthest:
            repairs = furthest.repairs > 0
            self._declined[repairs] += 1
            if self._declined[repairs] % RETRY_EVERY == 0:
                return furthest
        return chosen

    def takes_s(self, reuse: Reuse, length: int) -> float | None:
        """Seconds until a prompt of ``length`` tokens is there this way; None: not known yet."""
        takes = [self._load_s(place, size) for place, size in reuse.loads.items() if size]
        takes.append(self.compute_s(reuse.end, length - reuse.end))
        if reuse.repairs:
            repairing = self._repairing
            takes.append(repairing.predict(reuse.repairs) if _is_known(repairing) else None)
        known = [seconds for seconds in takes if seconds is not None]
        return sum(known) if len(known) == len(takes) else None

    def _load_s(self, place: str, size: int) -> float | None:
        late = self._late.get(place, ())
        late_s = max(late) if len(late) == LATE_LOADS else None
        if not self._knows(place):
            return late_s
        return max(self._line(place).predict(size), late_s or 0.0)

    def _line(self, place: str) -> Line:
        return self._loading.setdefault(place, Line())

    def _knows(self, place: str) -> bool:
        return place in self._loading and _is_known(self._loading[place])


def _is_known(line: Line) -> bool:
    return line.weight >= MIN_WEIGHT
