"""How far a prompt is loaded: of what is held, as much as is worth it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ragcache_core.blend.selection import Blend, Source
from ragcache_core.cost.load_or_compute import TIE, Reuse, ReuseCosts
from ragcache_engine.config import EngineConfig
from ragcache_engine.scheduler.request import Request
from ragcache_engine.scheduler.tier_map import Places

_PATIENCE = 3.0
"""How much longer than computing a load may take before it is given up."""

_CONSIDERED = 10_000
"""Sources that are looked at to find what is better not loaded: every one as often as there are
others where they are a hundred. It is the scheduler's thread that looks, some ten milliseconds."""

_LEAST_DEADLINE_S = 2.0
"""Of any load, however little computing takes: a busy machine may pause for as long."""


class Reach:
    """Decides it by what loads, repairs and passes take."""

    def __init__(self, config: EngineConfig, costs: ReuseCosts, places: Places) -> None:
        self._config = config
        self._costs = costs
        self._places = places

    def of(self, request: Request, num_local: int) -> int:
        """Where what is to be loaded of a prompt ends; decided once for as many tokens at hand.

        A blend is left without what it takes longer to load than to compute.
        """
        if request.covered is None or request.covered[0] != num_local:
            if not request.recorded:
                request.record.slower = False
            blend = self._worth(request, num_local)
            request.blend = blend or request.blend
            end = blend.end if blend else self._exact_end(request, num_local)
            request.covered = num_local, end
        return request.covered[1]

    def deadline_s(self, request: Request, first: int, end: int) -> float:
        """Seconds that a load of prompt tokens [first, end) is waited for.

        A small multiple of what computing them takes: what is later than that is in trouble, and
        costs more with every second than it was ever going to save.
        """
        longest_s = self._config.load_deadline_s
        compute_s = self._costs.compute_s(first, end - first)
        if compute_s is None or self._config.load_always or request.plan.trial:
            return longest_s
        return min(longest_s, max(_LEAST_DEADLINE_S, _PATIENCE * compute_s))

    def _worth(self, request: Request, num_local: int) -> Blend | None:
        """The blend to make; None where there is none, or too little of it, or it is slower."""
        found = request.blend
        if found is None:
            return None
        first = max(num_local, found.exact_end)
        holes = sum(map(len, found.holes(first, found.end)))
        share = 1 - holes / max(1, found.end - first)
        if found.end <= first or share < self._config.min_blend_share:
            return None
        if self._config.load_always or request.plan.trial:  # a trial is there to be made
            return found
        narrowed = self._narrowed(request, found, first)
        ways = [found] if narrowed is None else [narrowed, found]
        reuses = [self._reuse(request, way, first) for way in ways]
        # What is not exact has to be faster to be worth it.
        best = self._costs.best(first, len(request.token_ids), reuses, tie=1.0)
        if best is None:
            _note_slower(request)
        return ways[reuses.index(best)] if best else None

    def _narrowed(self, request: Request, found: Blend, first: int) -> Blend | None:
        """A blend in which less is loaded and more computed; None where that is no faster."""
        length = len(request.token_ids)
        takes_s = whole_s = self._costs.takes_s(self._reuse(request, found, first), length)
        if takes_s is None or whole_s is None:
            return None
        sources = _loaded(found, first)
        by_place: dict[str, set[int]] = {}
        for source in sources:
            for place in self._bytes_in(request, [source]):
                by_place.setdefault(place, set()).add(source.start)
        best: Blend | None = None
        dropped: set[int] = set()
        # What spares a whole tier spares its latency, too; else from the end on, where vLLM's own
        # prefill goes on and nothing has to be repaired.
        singles = sources[-max(1, _CONSIDERED // max(1, len(sources))) :]
        for starts in (*by_place.values(), *({source.start} for source in reversed(singles))):
            less = found.without(dropped | starts)
            if less.end <= first:
                continue
            less_s = self._costs.takes_s(self._reuse(request, less, first), length)
            if less_s is not None and less_s < takes_s:
                best, takes_s, dropped = less, less_s, dropped | starts
        return best if takes_s * TIE < whole_s else None

    def _reuse(self, request: Request, way: Blend, first: int) -> Reuse:
        holes = sum(map(len, way.holes(first, way.end)))
        loads = self._bytes_in(request, _loaded(way, first))
        end = min(way.end, len(request.token_ids) - 1)
        return Reuse(end, loads, repairs=way.wanted + holes)

    def _bytes_in(self, request: Request, sources: Iterable[Source]) -> dict[str, int]:
        variants = (source.variant for source in sources if source.variant is not None)
        return dict(self._places.bytes_in(variants, request.stored or {}))

    def _exact_end(self, request: Request, num_local: int) -> int:
        """Up to where loading exact variants is no slower than computing them."""
        stored, length, chain = request.stored or {}, len(request.token_ids), request.chain
        behind = [named for named in chain if named.segment.end > num_local]
        if not behind or self._config.load_always:
            return chain[-1].segment.end if chain else 0
        loads: Counter[str] = Counter()
        reuses = []
        for named in behind:
            loads.update(self._places.bytes_in([named.variant], stored))
            reuses.append(Reuse(min(named.segment.end, length - 1), dict(loads)))
        best = self._costs.best(num_local, length, reuses)
        if best is not reuses[-1]:
            _note_slower(request)
        return behind[reuses.index(best)].segment.end if best else 0


def _note_slower(request: Request) -> None:
    if not request.recorded:
        request.record.slower = True


def _loaded(way: Blend, first: int) -> list[Source]:
    """Sources that are loaded, of what lies behind position first."""
    return [s for s in way.sources if s.variant is not None and s.end > first]
