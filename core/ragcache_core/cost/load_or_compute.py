"""Choose between loading stored KV and computing it, from measured latencies.

Computing the whole prompt is always one of the options, so an option that is predicted to be slower
is not chosen. Loading is predicted from the bytes and their tier: a store's ``Tier`` or a tier of
the engine itself. Recomputation is predicted from tokens. Computing is predicted from a profile
that the engine measures at start (``prefill_profile``) and corrects with the measured passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ragcache_core.cost.linear_fit import DECAY, LinearFit
from ragcache_core.cost.prefill_profile import PrefillProfile

MIN_WEIGHT = 3.5
"""Least weight of observations of each kind before it is predicted.

Four observations reach it, because older ones count a little less. Until then reuse is tried.
"""

RETRY_EVERY = 16
"""One in this many declined options is chosen all the same.

An option that is never chosen is never measured, so one slow minute would rule it out for ever.
"""

TIE_RATIO = 1.1
"""Predictions within this ratio count as equal, and the option that loads most is chosen.

What the engine does not compute leaves it to other requests.
"""

TIMED_OUT_LOADS = 2
"""This many timeouts in a row from one tier set the expected time of its next load.

The first timeout may be due to a machine that paused. An average would take some fifty timed-out
loads to forget a fast past.
"""

PROFILE_WEIGHT = 2.0
"""Weight of the profile against the measured passes, in passes of a usual size."""


@dataclass(frozen=True, slots=True)
class ReuseOption:
    """One way to begin a prompt: tokens before ``end`` need no prefill.

    Attributes:
        bytes_by_tier: Bytes to load from each tier.
        recompute_tokens: Tokens to recompute, including those of missing chunks.
    """

    end: int
    bytes_by_tier: Mapping[str, int] = field(default_factory=dict)
    recompute_tokens: int = 0


class ReuseCosts:
    """Measured costs of loading, recomputing and computing, in tokens, bytes and seconds.

    One thread writes. ``tier_bandwidths`` may be called from any thread.
    """

    def __init__(self) -> None:
        self.profile: PrefillProfile | None = None
        # Predicted and measured seconds of passes, older ones counting less.
        self._predicted_s = self._measured_s = 0.0
        self._compute_fit, self._recompute_fit = LinearFit(), LinearFit()
        self._load_fits: dict[str, LinearFit] = {}  # by tier
        self._timeouts_s: dict[str, list[float]] = {}  # by tier, since its last finished load
        self._num_declined: Counter[bool] = Counter()  # by whether the option recomputes tokens

    def use_profile(self, profile: PrefillProfile) -> None:
        """Predict computing from this profile. Without one it is predicted from tokens."""
        self.profile = profile
        usual_s = profile.predict(0, profile.computed[-1])
        self._predicted_s = self._measured_s = PROFILE_WEIGHT * usual_s

    def pass_cost(self, cached: float, computed: int) -> float:
        """Return the cost of one pass, in seconds of the profile or else in tokens.

        Args:
            cached: Mean number of cached tokens before each computed one.
            computed: Number of tokens that the pass computes.
        """
        return self.profile.predict(round(cached), computed) if self.profile else float(computed)

    def observe_compute(self, cost: float, seconds: float) -> None:
        """Record the duration of one prefill pass.

        Args:
            cost: ``pass_cost`` of this pass.
            seconds: Measured duration.
        """
        if self.profile is None:
            self._compute_fit.observe(cost, seconds)
        elif cost > 0 and seconds > 0:
            self._predicted_s = DECAY * self._predicted_s + cost
            self._measured_s = DECAY * self._measured_s + seconds

    def observe_load(self, bytes_by_tier: Mapping[str, int], seconds: float) -> None:
        """Record the duration of one load, from its start until its tokens were usable.

        A load from several tiers is divided among them. A tier with enough observations gets its
        predicted time and the other tiers share the rest. If all tiers have enough, each one's
        prediction is scaled by the same factor.
        """
        sizes = {tier: size for tier, size in bytes_by_tier.items() if size > 0}
        for tier in sizes:
            self._timeouts_s.pop(tier, None)
        known = {
            tier: self._load_fit(tier).predict(size)
            for tier, size in sizes.items()
            if self._has_load_fit(tier)
        }
        expected_s = sum(known.values())
        if len(known) == len(sizes):
            for tier, tier_s in known.items():
                self._load_fit(tier).observe(sizes[tier], seconds * tier_s / expected_s)
        elif seconds > expected_s:
            others = {tier: size for tier, size in sizes.items() if tier not in known}
            byte_s = (seconds - expected_s) / sum(others.values())
            for tier, size in others.items():
                self._load_fit(tier).observe(size, byte_s * size)

    def observe_timeout(self, tiers: Iterable[str], seconds: float) -> None:
        """Record a load from these tiers that was aborted after this many seconds."""
        for tier in tiers:
            self._timeouts_s.setdefault(tier, []).append(seconds)
            del self._timeouts_s[tier][:-TIMED_OUT_LOADS]

    def observe_recompute(self, tokens: int, seconds: float) -> None:
        """Record the duration of one recomputation.

        Args:
            tokens: Number of recomputed tokens.
            seconds: Includes the pass that measures the question's attention, and the passes of
                other requests in between.
        """
        self._recompute_fit.observe(tokens, seconds)

    def predict_compute_s(self, cached: int, computed: int) -> float | None:
        """Return the predicted seconds to compute tokens after cached ones. None: not known yet."""
        if computed <= 0:
            return 0.0
        if self.profile is not None:
            return self.correction * self.profile.predict(cached, computed)
        if not _has_enough(self._compute_fit):
            return None
        return self._compute_fit.predict(computed)

    def predict_s(self, option: ReuseOption, length: int) -> float | None:
        """Return the predicted seconds until a prompt is computed. None: not known yet.

        Args:
            option: How the prompt begins.
            length: Number of tokens of the prompt.
        """
        terms = [self._load_s(tier, size) for tier, size in option.bytes_by_tier.items() if size]
        terms.append(self.predict_compute_s(option.end, length - option.end))
        if option.recompute_tokens:
            fit = self._recompute_fit
            terms.append(fit.predict(option.recompute_tokens) if _has_enough(fit) else None)
        known = [seconds for seconds in terms if seconds is not None]
        return sum(known) if len(known) == len(terms) else None

    def tier_bandwidths(self) -> Mapping[str, tuple[float, float]]:
        """Return (latency in seconds, bytes per second) of each tier with enough observations.

        Safe to call from any thread.
        """
        fits = {tier: fit.fit() for tier, fit in [*self._load_fits.items()] if _has_enough(fit)}
        return {tier: (latency_s, 1.0 / byte_s) for tier, (latency_s, byte_s) in fits.items()}

    @property
    def correction(self) -> float:
        """Measured over predicted seconds of passes; 1 without a profile."""
        return self._measured_s / self._predicted_s if self.profile is not None else 1.0

    def fastest(
        self,
        num_cached: int,
        length: int,
        options: Sequence[ReuseOption],
        *,
        tie_ratio: float = TIE_RATIO,
    ) -> ReuseOption | None:
        """Return the option with the lowest predicted time, or None to compute the whole prompt.

        If any prediction is not known yet, the last option is returned, so that it is measured.

        Args:
            num_cached: Number of tokens that the engine has cached.
            length: Number of tokens of the prompt.
            options: Ascending by ``end``.
            tie_ratio: See TIE_RATIO.
        """
        if not options:
            return None
        predicted = [
            self.predict_compute_s(num_cached, length - num_cached),
            *[self.predict_s(option, length) for option in options],
        ]
        known = [seconds for seconds in predicted if seconds is not None]
        if len(known) < len(predicted):
            return options[-1]
        limit_s = tie_ratio * min(known)
        return next(
            option
            for option, seconds in zip((*reversed(options), None), reversed(known), strict=True)
            if seconds <= limit_s
        )

    def choose(
        self,
        num_cached: int,
        length: int,
        options: Sequence[ReuseOption],
        *,
        tie_ratio: float = TIE_RATIO,
    ) -> ReuseOption | None:
        """Choose as ``fastest`` does, but take every RETRY_EVERY-th declined option.

        Call it once for each decision, because it counts the declined options. Exact and blended
        options are counted apart, because a prompt may be asked for with one and then the other.
        """
        chosen = self.fastest(num_cached, length, options, tie_ratio=tie_ratio)
        if not options or chosen is options[-1]:
            return chosen
        declined = options[-1]
        recomputes = declined.recompute_tokens > 0
        self._num_declined[recomputes] += 1
        return declined if self._num_declined[recomputes] % RETRY_EVERY == 0 else chosen

    def _load_s(self, tier: str, size: int) -> float | None:
        timeouts_s = self._timeouts_s.get(tier, ())
        timeout_s = max(timeouts_s) if len(timeouts_s) == TIMED_OUT_LOADS else None
        if not self._has_load_fit(tier):
            return timeout_s
        return max(self._load_fit(tier).predict(size), timeout_s or 0.0)

    def _load_fit(self, tier: str) -> LinearFit:
        return self._load_fits.setdefault(tier, LinearFit())

    def _has_load_fit(self, tier: str) -> bool:
        return tier in self._load_fits and _has_enough(self._load_fits[tier])


def _has_enough(fit: LinearFit) -> bool:
    return fit.weight >= MIN_WEIGHT
