"""Bounds the savings of a policy that knows all later requests and may leave chunks unstored.

To hit at its next use an entry must be held from one use to the next: an *interval*, which costs
its bytes over the requests between, and gains what the hit saves. A clairvoyant policy chooses
intervals whose bytes never exceed the capacity. With equal sizes and gains Belady's rule (drop what
is used last) is optimal. With sizes, gains and parents the choice is NP-hard, so several good
choices are made and the best is taken. Each of them could be carried out, so the result is at or
below the optimum. ``Choice.bound`` is at or above it: the bytes of all requests pooled, parents
ignored.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.support.traces import BYTES_PER_TOKEN, Trace

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Choice:
    """Gains of the best choice found, and the gains that no choice exceeds."""

    gain: float
    bound: float


class Intervals:
    """All intervals of a trace, by start, then by position in the prompt (parents first)."""

    def __init__(self, trace: Trace) -> None:
        parent_of: dict[int, int | None] = {}
        last: dict[int, int] = {}
        rows: list[tuple[int, int, int, int, int, float]] = []
        for number, request in enumerate(trace.requests):
            for position, access in enumerate(request.accesses):
                parent_of[access.key] = access.parent
                if access.key in last:
                    rows.append(
                        (
                            last[access.key],
                            position,
                            access.key,
                            number,
                            access.num_tokens,
                            access.cost_s,
                        )
                    )
                last[access.key] = number
        rows.sort()
        self.num_requests = len(trace.requests)
        self.start: Ints = np.array([row[0] for row in rows], dtype=np.int64)
        self.position: Ints = np.array([row[1] for row in rows], dtype=np.int64)
        self.end: Ints = np.array([row[3] for row in rows], dtype=np.int64)
        self.tokens: Floats = np.array([row[4] for row in rows], dtype=np.float64)
        self.cost_s: Floats = np.array([row[5] for row in rows], dtype=np.float64)
        self.parents = self._parents([row[2] for row in rows], parent_of)

    def _parents(self, keys: list[int], parent_of: dict[int, int | None]) -> list[Ints | None]:
        """Return for each interval those of its parent, which cover the same time without a gap."""
        of_key: dict[int, list[int]] = defaultdict(list)
        for index, key in enumerate(keys):
            of_key[key].append(index)
        indices = {key: np.array(found, dtype=np.int64) for key, found in of_key.items()}
        starts = {key: self.start[found] for key, found in indices.items()}
        parents: list[Ints | None] = []
        for index, key in enumerate(keys):
            parent = parent_of[key]
            if parent is None:
                parents.append(None)
            else:
                span = (self.start[index], self.end[index])
                low, high = np.searchsorted(starts[parent], span)
                parents.append(indices[parent][low:high])
        return parents


def clairvoyant(intervals: Intervals, gains: Floats, capacity_bytes: int) -> Choice:
    """Return the best choice: Belady's, by gain density, and both filled up."""
    if not len(gains):
        return Choice(0.0, 0.0)
    capacity = capacity_bytes // BYTES_PER_TOKEN
    by_density = _by_density(intervals, gains)
    nothing = np.zeros(len(gains), dtype=np.bool_)
    choices = [
        _fill(intervals, capacity, nothing, by_density),
        _fill(intervals, capacity, _belady(intervals, capacity), by_density),
    ]
    return Choice(
        max(float(gains[chosen].sum()) for chosen in choices), _bound(intervals, gains, capacity)
    )


def _belady(intervals: Intervals, capacity: int) -> Bools:
    """Keep what is used soonest. A child is never used before its parent and is evicted first."""
    chosen: Bools = np.ones(len(intervals.start), dtype=np.bool_)
    start, end, position = (
        intervals.start.tolist(),
        intervals.end.tolist(),
        intervals.position.tolist(),
    )
    tokens = intervals.tokens.tolist()
    held: list[tuple[int, int, int]] = []
    ending: dict[int, list[int]] = defaultdict(list)
    used = 0.0
    index = 0
    for request in range(intervals.num_requests):
        used -= sum(tokens[over] for over in ending.pop(request, ()) if chosen[over])
        while index < len(start) and start[index] == request:
            heapq.heappush(held, (-end[index], -position[index], index))
            ending[end[index]].append(index)
            used += tokens[index]
            index += 1
        while used > capacity:
            dropped = heapq.heappop(held)[2]
            chosen[dropped] = False
            used -= tokens[dropped]
    return chosen


def _by_density(intervals: Intervals, gains: Floats) -> Ints:
    """Choose intervals by gain per token and request, parents first."""
    density = gains / (intervals.tokens * (intervals.end - intervals.start))
    for index in np.argsort(intervals.position, kind="stable").tolist():
        parents = intervals.parents[index]
        if parents is not None:
            density[index] = min(density[index], density[parents].min())
    order: Ints = np.lexsort((intervals.position, -density))
    return order


def _fill(intervals: Intervals, capacity: int, chosen: Bools, order: Ints) -> Bools:
    """Add all intervals that still fit, in this order, if their parents are chosen."""
    chosen = chosen.copy()
    start, end = intervals.start.tolist(), intervals.end.tolist()
    tokens = intervals.tokens.tolist()
    load = np.zeros(intervals.num_requests)
    for index in np.flatnonzero(chosen).tolist():
        load[start[index] : end[index]] += tokens[index]
    for index in order.tolist():
        parents = intervals.parents[index]
        if chosen[index] or (parents is not None and not chosen[parents].all()):
            continue
        span = load[start[index] : end[index]]
        if span.max() + tokens[index] <= capacity:
            span += tokens[index]
            chosen[index] = True
    return chosen


def _bound(intervals: Intervals, gains: Floats, capacity: int) -> float:
    """Return the gains of the densest intervals that fit into the pooled bytes of all requests."""
    room = intervals.tokens * (intervals.end - intervals.start)
    order = np.argsort(-gains / room, kind="stable")
    filled = np.cumsum(room[order])
    limit = float(capacity) * intervals.num_requests
    # The last interval counts for the share that fits, so that the bound holds.
    share = np.clip((limit - (filled - room[order])) / room[order], 0.0, 1.0)
    return float((gains[order] * share).sum())
