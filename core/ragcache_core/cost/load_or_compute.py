"""Choose between loading stored KV and computing it, from measured latencies.

Computing the whole prompt is always one of the options, and the fastest option is chosen. So
nothing is loaded that is predicted to be slower than computing. What is declined is measured again
while the engine has nothing else to do (``may_be_faster``), so that a slow minute is forgotten.

Loading is predicted from the bytes and their tier: a store's ``Tier`` or a tier of the engine
itself. Computing and recomputing are predicted from a profile that the engine measures at start
(``prefill_profile``) and corrects with the measured passes. A blend also has the seconds in which
the engine selects the tokens to recompute. What only a blend does is predicted relative to
computing. So it follows a machine that becomes slower or faster, also while no blend is chosen.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ragcache_core.cost.linear_fit import DECAY, LinearFit
from ragcache_core.cost.prefill_profile import PrefillProfile

MIN_WEIGHT = 3.5
"""Least weight of observations of each kind before it is predicted.

Four observations reach it, because older ones count a little less. Until then reuse is tried.
"""

TIMED_OUT_LOADS = 2
"""This many timeouts in a row from one tier set the expected time of its next load.

The first timeout may be due to a machine that paused. An average would take some fifty timed-out
loads to forget a fast past.
"""

KNOWN_REQUESTS = 32
"""Requests whose time besides loads and passes is remembered."""

MAX_REQUEST_S = 0.05
"""Most seconds of a request besides loads and passes. Longer ones waited for other requests."""

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


@dataclass(frozen=True, slots=True)
class PredictedTime:
    """Predicted seconds until a prompt is computed, by stage.

    Attributes:
        load_s: Loads.
        select_s: Selection of the tokens to recompute.
        passes_s: Forward passes.
    """

    load_s: float
    select_s: float
    passes_s: float

    @property
    def total_s(self) -> float:
        """Sum of all stages."""
        return self.load_s + self.select_s + self.passes_s


@dataclass(slots=True)
class PassCorrection:
    """Measured over predicted seconds of one kind of passes, older ones counting less."""

    predicted_s: float = 0.0
    measured_s: float = 0.0

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """Add a pass."""
        self.predicted_s = DECAY * self.predicted_s + predicted_s
        self.measured_s = DECAY * self.measured_s + measured_s

    @property
    def factor(self) -> float:
        """Factor that corrects a prediction; 1 before the first pass."""
        return self.measured_s / self.predicted_s if self.predicted_s else 1.0


class ReuseCosts:
    """Measured costs of loading, recomputing and computing, in tokens, bytes and seconds.

    One thread writes. ``tier_bandwidths`` may be called from any thread.
    """

    def __init__(self) -> None:
        self.profile: PrefillProfile | None = None
        # The engine recomputes tokens in the pass that computes the rest of the prompt.
        self.joins_passes = False
        self._correction = PassCorrection()
        # Of passes that recompute tokens of a blend, relative to the others.
        self._recompute_correction = PassCorrection()
        self._compute_fit = LinearFit()
        self._selection_fit = LinearFit()  # seconds over the correction at that time
        self._load_fits: dict[str, LinearFit] = {}  # by tier
        self._timeouts_s: dict[str, list[float]] = {}  # by tier, since its last finished load
        self._rests_s: deque[float] = deque(maxlen=KNOWN_REQUESTS)
        self.request_s = 0.0
        """Seconds that a request takes besides its loads and passes, predicted. Any thread may
        read it."""

    def use_profile(self, profile: PrefillProfile, *, joins_passes: bool = False) -> None:
        """Predict computing from this profile. Without one it is predicted from tokens.

        Args:
            profile: Seconds of passes on this machine.
            joins_passes: Whether tokens are recomputed in the pass that computes the rest of their
                prompt, and not in passes of their own.
        """
        self.profile, self.joins_passes = profile, joins_passes
        usual_s = PROFILE_WEIGHT * profile.predict(0, profile.computed[-1])
        self._correction = PassCorrection(usual_s, usual_s)
        self._recompute_correction = PassCorrection(usual_s, usual_s)

    def pass_cost(self, cached: float, computed: int) -> float:
        """Return the cost of one pass, in seconds of the profile or else in tokens.

        Args:
            cached: Mean number of cached tokens before each computed one.
            computed: Number of tokens that the pass computes.
        """
        return self.profile.predict(round(cached), computed) if self.profile else float(computed)

    def observe_compute(self, cost: float, seconds: float, *, recomputed: bool = False) -> None:
        """Record the duration of one prefill pass.

        Args:
            cost: ``pass_cost`` of this pass.
            seconds: Measured duration.
            recomputed: Whether the pass also recomputed tokens of a blend. Such tokens are spread
                over the prompt, which makes attention slower.
        """
        if self.profile is None:
            self._compute_fit.observe(cost, seconds)
        elif cost > 0 and seconds > 0:
            if recomputed:
                self._recompute_correction.observe(self.correction * cost, seconds)
            else:
                self._correction.observe(cost, seconds)

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

    def observe_request(self, predicted_s: float, measured_s: float) -> None:
        """Record the time from a request's first pass to its first token.

        Half of the requests take longer than predicted with ``request_s``, so those that shared
        their passes with others do not count more than one each.

        Args:
            predicted_s: The predicted passes.
        """
        self._rests_s.append(measured_s - predicted_s)
        rest_s = statistics.median(self._rests_s)
        self.request_s = min(MAX_REQUEST_S, max(0.0, rest_s))

    def observe_selection(self, tokens: int, seconds: float) -> None:
        """Record how long it took to select the tokens to recompute in a load of this size."""
        self._selection_fit.observe(tokens, seconds / self.correction)

    def predict_compute_s(self, cached: int, computed: int) -> float | None:
        """Return the predicted seconds to compute tokens after cached ones. None: not known yet."""
        return self._passes_s(cached, computed, recomputed=False)

    def prefill_token_s(self, cached: int, computed: int) -> float:
        """Return T(cached, computed) / computed of the profile, in seconds; 0 without a profile.

        Args:
            cached: Tokens of a prompt that are not computed.
            computed: Tokens of it that are computed.

        Source: RAGCache section 5.1, formula 4 and Algorithm 1, lines 6 to 8.
        """
        if self.profile is None or computed < 1:
            return 0.0
        return self.profile.predict(max(0, cached), computed) / computed

    def predict_s(self, option: ReuseOption, length: int) -> float | None:
        """Return the total of ``predict``, in seconds."""
        predicted = self.predict(option, length)
        return predicted.total_s if predicted is not None else None

    def predict(self, option: ReuseOption, length: int) -> PredictedTime | None:
        """Return the predicted time until a prompt is computed. None: not known yet.

        Args:
            option: How the prompt begins.
            length: Number of tokens of the prompt.
        """
        terms = [self._load_s(tier, size) for tier, size in option.bytes_by_tier.items() if size]
        loads_s = [seconds for seconds in terms if seconds is not None]
        without_loads = self._predict_without_loads(option, length)
        if without_loads is None or len(loads_s) < len(terms):
            return None
        return replace(without_loads, load_s=sum(loads_s))

    def _predict_without_loads(self, option: ReuseOption, length: int) -> PredictedTime | None:
        """Return the predicted time if all values are loaded in no time."""
        end, computed, recomputed = option.end, length - option.end, option.recompute_tokens
        if not recomputed:
            passes_s = self.predict_compute_s(end, computed)
            return None if passes_s is None else PredictedTime(0.0, 0.0, passes_s)
        if self.joins_passes:
            # Recomputed tokens are spread over the load: half of it precedes them on average.
            cached = round((computed * end + recomputed * end / 2) / (computed + recomputed))
            passes = [self._passes_s(cached, computed + recomputed, recomputed=True)]
        else:
            passes = [
                self._passes_s(end // 2, recomputed, recomputed=True),
                self.predict_compute_s(end, computed),
            ]
        known = [seconds for seconds in passes if seconds is not None]
        if len(known) < len(passes) or not _has_enough(self._selection_fit):
            return None
        select_s = self.correction * self._selection_fit.predict(end)
        return PredictedTime(0.0, select_s, sum(known))

    def tier_bandwidths(self) -> Mapping[str, tuple[float, float]]:
        """Return (latency in seconds, bytes per second) of each tier with enough observations.

        Safe to call from any thread.
        """
        fits = {tier: fit.fit() for tier, fit in [*self._load_fits.items()] if _has_enough(fit)}
        return {tier: (latency_s, 1.0 / byte_s) for tier, (latency_s, byte_s) in fits.items()}

    @property
    def correction(self) -> float:
        """Measured over predicted seconds of passes; 1 without a profile."""
        return self._correction.factor

    def choose(
        self,
        num_cached: int,
        length: int,
        options: Sequence[ReuseOption],
        *,
        min_gain: float = 0.0,
    ) -> ReuseOption | None:
        """Return the option with the lowest predicted time, or None to compute the whole prompt.

        Of equal options the one that loads most is returned, because what an engine does not
        compute leaves it to other requests. If any prediction is not known yet, the last option is
        returned, so that it is measured.

        Args:
            num_cached: Number of tokens that the engine has cached.
            length: Number of tokens of the prompt.
            options: Ascending by ``end``.
            min_gain: Share of the time to compute the prompt that an option has to save.
        """
        if not options:
            return None
        compute_s = self.predict_compute_s(num_cached, length - num_cached)
        predicted = [
            None if compute_s is None else (1.0 - min_gain) * compute_s,
            *[self.predict_s(option, length) for option in options],
        ]
        known = [seconds for seconds in predicted if seconds is not None]
        if len(known) < len(predicted):
            return options[-1]
        return (None, *options)[-1 - known[::-1].index(min(known))]

    def may_be_faster(self, option: ReuseOption, num_cached: int, length: int) -> bool:
        """Tell whether an option would be faster than computing if its loads took no time.

        Only then it is worth measuring the loads of an option that was declined.
        """
        compute_s = self.predict_compute_s(num_cached, length - num_cached)
        option_time = self._predict_without_loads(option, length)
        return compute_s is None or option_time is None or option_time.total_s < compute_s

    def _passes_s(self, cached: int, computed: int, *, recomputed: bool) -> float | None:
        if computed <= 0:
            return 0.0
        if self.profile is not None:
            relative = self._recompute_correction.factor if recomputed else 1.0
            return self.correction * relative * self.profile.predict(cached, computed)
        if not _has_enough(self._compute_fit):
            return None
        return self._compute_fit.predict(computed)

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


_ROUNDING = 1e-9


def preload_depth(num_layers: int, compute_s: float, load_s: float) -> int:
    """Return L_p of eq. 16: the layers to load before computing starts, so that it never waits.

    The result is in [1, num_layers]. It is 1 where computing takes at least as long as loading
    (line 1 of Algorithm 2), or where nothing is loaded. Eq. 16 is rounded up, because with one
    layer less the last layers would not be loaded in time.

    Args:
        num_layers: L, at least 1.
        compute_s: Seconds to compute all layers (T_prefill), finite, 0 or more.
        load_s: Seconds to load all layers (T_load), finite, 0 or more.
    """
    if num_layers < 1:
        raise ValueError(f"num_layers must be at least 1, not {num_layers}")
    if not all(math.isfinite(seconds) and seconds >= 0 for seconds in (compute_s, load_s)):
        raise ValueError("compute_s and load_s must be finite and 0 or more")
    if compute_s >= load_s:
        return 1
    depth = (num_layers - 1) * (1.0 - compute_s / load_s) + 1.0
    return min(num_layers, math.ceil(depth - _ROUNDING * num_layers))
