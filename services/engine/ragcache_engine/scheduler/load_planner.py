"""Decides up to which position a prompt is loaded, and how long to wait for the load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ragcache_core.blend.variant_selection import Blend, BlendSource
from ragcache_core.cost.load_or_compute import ReuseCosts, ReuseOption
from ragcache_core.plan.reuse_plan import Handoff
from ragcache_engine.protocol.messages import VariantSpan
from ragcache_engine.scheduler.request import (
    LoadDecision,
    RequestState,
    blend_spans,
    exact_spans,
)
from ragcache_engine.scheduler.tier_map import TierMap
from ragcache_wire.settings import EngineSettings

_DEADLINE_FACTOR = 3.0
"""A load's deadline, as a multiple of the predicted time to compute the same tokens."""

_MIN_DEADLINE_S = 2.0
"""Shortest deadline of a load: a busy machine may stall for that long."""

_MIN_BLEND_GAIN = 0.1
"""Share of the time to compute a prompt that a blend has to save, because a blend is not exact."""

_MAX_SOURCE_READS = 10_000
"""Bounds how many sources a decision reads, about ten milliseconds of the scheduler's thread.

A blend of 100 sources is compared with 100 blends that leave out one of them.
"""


class LoadPlanner:
    """Compares the predicted time to load a prompt's KV with the time to compute it."""

    def __init__(self, settings: EngineSettings, costs: ReuseCosts, tiers: TierMap) -> None:
        self._settings = settings
        self._costs = costs
        self._tiers = tiers

    def decide(self, request: RequestState, num_local: int) -> LoadDecision:
        """Return how much of a request's prompt to load. The request does not change."""
        length = len(request.token_ids)
        found, blend = request.blend, self._choose_blend(request, num_local)
        if found is not None and blend is not None:
            first = max(num_local, blend.exact_end)
            option = self._blend_option(request, blend, first)
            declined = self._declined_of_blend(request, found, blend, num_local)
            predicted = self._costs.predict(option, length)
            return LoadDecision(num_local, blend.end, blend, predicted=predicted, declined=declined)
        options = self._exact_options(request, num_local)
        if options and self._must_load(request):
            chosen: ReuseOption | None = options[-1]
        else:
            chosen = self._costs.choose(num_local, length, options)
        end = chosen.end if chosen is not None else 0
        predicted = self._costs.predict(chosen or ReuseOption(num_local), length)
        blend_declined = found is not None and found.end > max(num_local, found.exact_end)
        shortened = bool(options) and chosen is not options[-1]
        declined = ()
        if found is not None and blend_declined:
            declined = self._declined_of_blend(request, found, None, num_local)
        if shortened and not declined:
            declined = self._declined_of_chain(request, options[-1], end, num_local)
        return LoadDecision(
            num_local, end, None, blend_declined or shortened, predicted, declined=declined
        )

    def deadline_s(self, request: RequestState, first: int, end: int) -> float:
        """Return after how many seconds to abandon a load of prompt tokens [first, end).

        A load that takes several times as long as computing its tokens has failed in some way,
        and no longer saves time.
        """
        longest_s = self._settings.load_deadline_s
        compute_s = self._costs.predict_compute_s(first, end - first)
        if compute_s is None or self._settings.load_always or request.plan.trial:
            return longest_s
        return min(longest_s, max(_MIN_DEADLINE_S, _DEADLINE_FACTOR * compute_s))

    def _choose_blend(self, request: RequestState, num_local: int) -> Blend | None:
        """Return the blend to load. None: there is none, or it does not save enough time."""
        found = request.blend
        if found is None:
            return None
        first = max(num_local, found.exact_end)
        if found.end <= first:
            return None
        if self._must_load(request) or request.plan.trial:  # a trial measures the blend
            return found
        reduced = self._reduced_blend(request, found, first)
        blends = [found] if reduced is None else [reduced, found]
        options = [self._blend_option(request, blend, first) for blend in blends]
        best = self._costs.choose(first, len(request.token_ids), options, min_gain=_MIN_BLEND_GAIN)
        return None if best is None else blends[options.index(best)]

    def _reduced_blend(self, request: RequestState, found: Blend, first: int) -> Blend | None:
        """Return a blend that recomputes some sources rather than load them.

        None: no such blend is faster.
        """
        length = len(request.token_ids)
        best_s = self._costs.predict_s(self._blend_option(request, found, first), length)
        if best_s is None:
            return None
        best: Blend | None = None
        removed: set[int] = set()
        for starts in self._removable_sources(request, _loaded_sources(found, first)):
            reduced = found.with_recomputed(removed | starts)
            if reduced.end <= first:
                continue
            option = self._blend_option(request, reduced, first)
            reduced_s = self._costs.predict_s(option, length)
            if reduced_s is not None and reduced_s < best_s:
                best, best_s, removed = reduced, reduced_s, removed | starts
        return best

    def _removable_sources(
        self, request: RequestState, sources: Sequence[BlendSource]
    ) -> list[set[int]]:
        """Return groups of sources, by their starts, that a blend could leave out.

        First all sources of a tier, which saves the tier's latency. Then single ones from the end
        on, where vLLM's own prefill goes on and nothing has to be recomputed.
        """
        by_tier: dict[str, set[int]] = {}
        for source in sources:
            for tier in self._bytes_by_tier(request, [source]):
                by_tier.setdefault(tier, set()).add(source.start)
        num_singles = max(1, _MAX_SOURCE_READS // max(1, len(sources)))
        singles = [{source.start} for source in reversed(sources[-num_singles:])]
        return [*by_tier.values(), *singles]

    def _blend_option(self, request: RequestState, blend: Blend, first: int) -> ReuseOption:
        return ReuseOption(
            min(blend.end, len(request.token_ids) - 1),
            self._bytes_by_tier(request, _loaded_sources(blend, first)),
            recompute_tokens=blend.recompute_tokens + _num_missing(blend, first),
        )

    def _bytes_by_tier(
        self, request: RequestState, sources: Iterable[BlendSource]
    ) -> dict[str, int]:
        variants = (source.variant for source in sources if source.variant is not None)
        return dict(self._tiers.bytes_by_tier(variants, request.stored or {}))

    def _exact_options(self, request: RequestState, num_local: int) -> list[ReuseOption]:
        """Return the loads of exact variants, the shortest first."""
        stored, length = request.stored or {}, len(request.token_ids)
        sizes: Counter[str] = Counter()
        options = []
        for named in request.exact_chain:
            if named.segment.end > num_local:
                sizes.update(self._tiers.bytes_by_tier([named.variant], stored))
                options.append(ReuseOption(min(named.segment.end, length - 1), dict(sizes)))
        return options

    def _must_load(self, request: RequestState) -> bool:
        """Tell whether a request loads all that it can.

        Computing what another engine has computed would delay the answers that this one decodes.
        """
        return self._settings.load_always or request.plan.handoff is Handoff.DECODE

    def _declined_of_blend(
        self, request: RequestState, found: Blend, chosen: Blend | None, num_local: int
    ) -> tuple[VariantSpan, ...]:
        """Return the spans of a blend that a request does not load, as in ``LoadDecision``."""
        if found is chosen:
            return ()
        first = max(num_local, found.exact_end)
        option = self._blend_option(request, found, first)
        if not self._costs.may_be_faster(option, first, len(request.token_ids)):
            return ()
        loaded = set(blend_spans(chosen, first, chosen.end)) if chosen is not None else set()
        return tuple(span for span in blend_spans(found, first, found.end) if span not in loaded)

    def _declined_of_chain(
        self, request: RequestState, longest: ReuseOption, end: int, num_local: int
    ) -> tuple[VariantSpan, ...]:
        """Return the exact spans that a request does not load, as in ``LoadDecision``."""
        if not self._costs.may_be_faster(longest, num_local, len(request.token_ids)):
            return ()
        return exact_spans(request, max(num_local, end), longest.end)


def _num_missing(blend: Blend, first: int) -> int:
    return sum(map(len, blend.missing_ranges(first, blend.end)))


def _loaded_sources(blend: Blend, first: int) -> list[BlendSource]:
    """Return the sources that are loaded and end after position first."""
    return [s for s in blend.sources if s.variant is not None and s.end > first]
