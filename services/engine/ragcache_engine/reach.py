"""How far a prompt is loaded: of what is held, as much as is worth it."""

from __future__ import annotations

from collections import Counter

from ragcache_core.reuse_costs import Reuse, ReuseCosts
from ragcache_core.variant import Tier
from ragcache_engine.config import EngineConfig
from ragcache_engine.request import Request

SLOWER = "computing is faster"
"""Why less was loaded than is held, in a record."""


class Reach:
    """Decides it by what loads, repairs and passes take."""

    def __init__(self, config: EngineConfig, costs: ReuseCosts) -> None:
        self._config = config
        self._costs = costs

    def of(self, request: Request, num_local: int) -> int:
        """Where what is to be loaded of a prompt ends; decided once for as many tokens at hand."""
        if request.covered is None or request.covered[0] != num_local:
            end = self._blend_end(request, num_local) or self._exact_end(request, num_local)
            request.covered = num_local, end
        return request.covered[1]

    def _blend_end(self, request: Request, num_local: int) -> int | None:
        """Where the blend ends; None where there is none, or too little of it, or it is slower."""
        found = request.blend
        if found is None:
            return None
        first = max(num_local, found.exact_end)
        holes = sum(map(len, found.holes(first, found.end)))
        share = 1 - holes / max(1, found.end - first)
        if found.end <= first or share < self._config.min_blend_share:
            return None
        length = len(request.token_ids)
        approximate = (
            source.variant
            for source in found.sources
            if source.variant is not None and source.end > first
        )
        loads = request.bytes_by_tier(approximate)
        reuse = Reuse(min(found.end, length - 1), loads, repairs=found.wanted + holes)
        # What is not exact has to be faster to be worth it; a trial is there to be made.
        always = self._config.load_always or request.plan.trial
        pays = always or self._costs.best(first, length, [reuse], tie=1.0)
        if not pays:
            request.record.miss = SLOWER
        return found.end if pays else None

    def _exact_end(self, request: Request, num_local: int) -> int:
        """Up to where loading exact variants is no slower than computing them."""
        stored, length, chain = request.stored or {}, len(request.token_ids), request.chain
        behind = [named for named in chain if named.segment.end > num_local]
        if not behind or self._config.load_always:
            return chain[-1].segment.end if chain else 0
        loads: Counter[Tier] = Counter()
        reuses = []
        for named in behind:
            held = stored[named.variant]
            loads[held.tier] += held.info.num_bytes
            reuses.append(Reuse(min(named.segment.end, length - 1), dict(loads)))
        best = self._costs.best(num_local, length, reuses)
        if best is not reuses[-1]:
            request.record.miss = SLOWER
        return behind[reuses.index(best)].segment.end if best else 0
