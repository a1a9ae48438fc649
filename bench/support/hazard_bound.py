"""Bounds the savings of policies that do not know later requests.

A clairvoyant policy knows which of a thousand new chunks is asked for again. No policy of a store
does: it knows how often a chunk was asked for, how long ago, and how deep it is in its prompt.
Chunks that are alike in these have the same rate of reuse (hazard). The best ranking by this
knowledge is by that rate times the saved seconds per byte. The bound is what it saves if it may
change the contents of the tier for free before each request.

The rates are measured on the sequence itself, with all of its later requests. So the bound is
above what can be learned while requests arrive, and small sequences raise it further.

Source: Panigrahy, Nain, Neglia and Towsley, A New Upper Bound on Cache Hit Probability for
Non-anticipative Caching Policies (2020): the hazard rate order, here with sizes and costs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bench.support.traces import Request, Trace

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

USES = (1, 2, 3, 4, 6, 9, 14)
"""Numbers of uses at which classes begin."""
DEPTHS = 8
AGES_S = np.concatenate(([0.0], 0.25 * 2.0 ** np.arange(20)))
"""Ages at which classes begin."""
MAX_SAMPLES = 400
"""Requests at which the contents of a tier are computed: evenly spread if there are more."""


class _Keys:
    """What a policy knows about each key at a request."""

    def __init__(self, num_keys: int) -> None:
        self.uses: Ints = np.zeros(num_keys, dtype=np.int64)
        self.depth: Ints = np.zeros(num_keys, dtype=np.int64)
        self.last_s: Floats = np.zeros(num_keys)
        self.num_bytes: Floats = np.ones(num_keys)
        self.cost_s: Floats = np.zeros(num_keys)

    def classes(self, keys: Ints) -> Ints:
        """Return the class of each key without its age."""
        uses = np.searchsorted(USES, self.uses[keys], side="right") - 1
        return np.asarray(uses * DEPTHS + self.depth[keys], dtype=np.int64)


def hazard_bounds(trace: Trace, capacities_bytes: list[int]) -> list[float]:
    """Return the bound of the saved share of prefill seconds for each capacity."""
    rates = _rates(trace)
    keys = _Keys(1 + max(access.key for one in trace.requests for access in one.accesses))
    stride = -(-len(trace.requests) // MAX_SAMPLES)
    saved, cost_s = np.zeros(len(capacities_bytes)), 0.0
    for number, request in enumerate(trace.requests):
        if number % stride == 0:
            known = np.flatnonzero(keys.uses)
            age = np.searchsorted(AGES_S, request.time_s - keys.last_s[known], side="right") - 1
            rate = rates[keys.classes(known), age]
            order = np.argsort(-rate * keys.cost_s[known] / keys.num_bytes[known], kind="stable")
            end = np.full(len(keys.uses), np.inf)
            end[known[order]] = np.cumsum(keys.num_bytes[known[order]])
            for access in request.accesses:
                # The one that is partly beyond the capacity counts, so that the bound holds.
                begin = end[access.key] - keys.num_bytes[access.key]
                saved += access.cost_s * (begin < np.array(capacities_bytes))
                cost_s += access.cost_s
        _use(keys, request)
    return [float(one) for one in saved / cost_s]


def _use(keys: _Keys, request: Request) -> None:
    depth_of: dict[int, int] = {}
    for access in request.accesses:
        depth = 0 if access.parent is None else depth_of[access.parent] + 1
        depth_of[access.key] = depth
        keys.uses[access.key] += 1
        keys.depth[access.key] = min(depth, DEPTHS - 1)
        keys.last_s[access.key] = request.time_s
        keys.num_bytes[access.key] = access.num_bytes
        keys.cost_s[access.key] = access.cost_s


def _rates(trace: Trace) -> Floats:
    """Return reuses per second by class and age."""
    shape = (len(USES) * DEPTHS, len(AGES_S))
    reuses, seconds = np.zeros(shape), np.zeros(shape)
    keys = _Keys(1 + max(access.key for one in trace.requests for access in one.accesses))

    def count(used: Ints, now_s: float, *, is_reuse: bool) -> None:
        ages = now_s - keys.last_s[used]
        classes = keys.classes(used)
        widths = np.append(np.diff(AGES_S), np.inf)
        spent = np.clip(ages[:, None] - AGES_S, 0.0, widths)
        np.add.at(seconds, classes, spent)
        if is_reuse:
            np.add.at(reuses, (classes, np.searchsorted(AGES_S, ages, side="right") - 1), 1.0)

    for request in trace.requests:
        asked = np.array([access.key for access in request.accesses], dtype=np.int64)
        count(asked[keys.uses[asked] > 0], request.time_s, is_reuse=True)
        _use(keys, request)
    count(np.flatnonzero(keys.uses), trace.requests[-1].time_s, is_reuse=False)
    return np.asarray(reuses / np.maximum(seconds, 1e-9), dtype=np.float64)
