"""Replays a trace through a policy and an admission, as a tier of the store does."""

from __future__ import annotations

from dataclasses import dataclass

from bench.support.traces import Access, Trace
from ragcache_core.eviction import EvictionCandidate, EvictionPolicy
from ragcache_core.eviction.admission import Admission
from ragcache_core.store_api import VariantUse

CONTEXT_IMPACT = 0.7
"""Cache-Craft's CCI, in [0.5, 1): the data has no attention, so all chunks get the same."""


@dataclass(slots=True)
class Tally:
    """The savings of a replay; seconds are those of the prefill profile."""

    tokens: int = 0
    hit_tokens: int = 0
    cost_s: float = 0.0
    saved_s: float = 0.0
    written_bytes: int = 0

    @property
    def by_compute(self) -> float:
        return self.saved_s / self.cost_s


class Replay:
    """One tier of ``capacity_bytes``."""

    def __init__(
        self, policy: EvictionPolicy[int], admission: Admission[int], capacity_bytes: int
    ) -> None:
        self._policy = policy
        self._admission = admission
        self._free_bytes = capacity_bytes
        self._sizes: dict[int, int] = {}
        self._prefixes: dict[int, frozenset[int]] = {}  # the chunks before it at its computation

    def run(self, trace: Trace) -> Tally:
        """Replay every request: count and touch stored chunks, compute and offer the others."""
        tally = Tally()
        for request in trace.requests:
            asked = {access.key for access in request.accesses}
            before: list[int] = []
            missing: list[tuple[Access, frozenset[int]]] = []
            for access in request.accesses:
                tally.tokens += access.num_tokens
                tally.cost_s += access.cost_s
                # In `exact` a chunk after a gap cannot be used, and the tree never stores one.
                if access.key in self._policy and not (trace.exact and missing):
                    tally.hit_tokens += access.num_tokens
                    tally.saved_s += access.cost_s
                    fix = 0.0 if trace.exact else self._fix_overhead(access.key, before)
                    self._policy.touch(access.key, request.time_s, VariantUse(fix))
                else:
                    missing.append((access, frozenset() if trace.exact else frozenset(before)))
                before.append(access.key)
            for access, prefix in missing:
                candidate = EvictionCandidate(
                    access.num_bytes, access.num_tokens, access.cost_s, access.parent
                )
                if self._offer(access.key, candidate, request.time_s, asked):
                    tally.written_bytes += access.num_bytes
                    self._prefixes[access.key] = prefix
                elif trace.exact:
                    break  # its children could not be reached
        return tally

    def _offer(
        self, key: int, candidate: EvictionCandidate[int], now: float, asked: set[int]
    ) -> bool:
        """Insert an entry if it is admitted and fits; chunks of the request are leased."""

        def may(victim: int) -> bool:
            return victim not in asked

        worth = None
        if self._free_bytes < candidate.num_bytes:
            cheapest = self._policy.advance_to_victim(may)
            if cheapest is None:
                return False
            worth = self._policy.priority(cheapest, now)
        if not self._admission.admits(key, candidate, now, worth):
            return False
        while self._free_bytes < candidate.num_bytes:
            victim = self._policy.evict(may)
            if victim is None:
                return False
            self._free_bytes += self._sizes.pop(victim)
            self._prefixes.pop(victim, None)
        self._policy.add(key, candidate, now)
        self._sizes[key] = candidate.num_bytes
        self._free_bytes -= candidate.num_bytes
        return True

    def _fix_overhead(self, key: int, before: list[int]) -> float:
        """Return the CFO (Cache-Craft section 3.3) from the missing part of its prefix."""
        prefix = self._prefixes[key]
        if not prefix:
            return CONTEXT_IMPACT if before else 0.0
        overlap = len(prefix.intersection(before)) / len(prefix)
        return CONTEXT_IMPACT * (1 - overlap)
