"""Other ways to choose an engine, put into the gateway's process in place of the product's.

A rival gets the same engines, tree and predictions as the planner, and leaves the planner only the
engine of its choice. So the order of documents and what is loaded are still the product's.

Run the gateway with one: ``python -m bench.support.cluster.rivals NAME``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple

from ragcache_core.knowledge.knowledge_tree import KnowledgeTree
from ragcache_core.planner.planner import plan_request
from ragcache_core.planner.request_plan import (
    PlannedEngine,
    PlannedPrompt,
    PlanPolicy,
    RequestPlan,
)
from ragcache_core.planner.stored_path import StoredPath

LOAD_CAP = 1.25
"""Requests in flight over the mean of all engines, from which ``prefix_affinity`` leaves an engine.

Source: consistent hashing with bounded loads, as KubeAI's ``meanLoadFactor`` has it.
"""

AFFINITY_SHARE = 0.8
"""Of the longest cached prefix: engines with this much count as sticky (llm-d)."""


class Candidate(NamedTuple):
    """An engine, the prompt's tokens in its prefix cache, and the predicted time of all of them."""

    engine: PlannedEngine
    cached: int
    full_s: float

    @property
    def load(self) -> tuple[int, int]:
        """Requests in flight, and then the time of the last choice."""
        return self.engine.in_flight, self.engine.last_chosen


def least_in_flight(candidates: Sequence[Candidate]) -> Candidate:
    """Return the engine with the fewest requests, as the least-request policy of proxies does."""
    return min(candidates, key=lambda one: one.load)


def round_robin(candidates: Sequence[Candidate]) -> Candidate:
    """Return the engine that got no request for the longest time."""
    return min(candidates, key=lambda one: one.engine.last_chosen)


def prefix_affinity(candidates: Sequence[Candidate]) -> Candidate:
    """Return the engine with the longest prefix whose load is within ``LOAD_CAP``.

    Source: prefix-aware routing of production-stack and KubeAI.
    """
    mean = (sum(one.engine.in_flight for one in candidates) + 1) / len(candidates)
    free = [one for one in candidates if one.engine.in_flight <= LOAD_CAP * mean]
    return min(free, key=lambda one: (-one.cached, *one.load))


def sticky(candidates: Sequence[Candidate]) -> Candidate:
    """Return the least loaded engine among those with the prefix, unless they are saturated.

    An engine is saturated if its pending prefills take longer than the whole prompt would. llm-d's
    limit is also one of tokens to prefill: its peak rate times a longest wait.

    Source: llm-d, "Sticky until saturated: token-aware routing".
    """
    least = AFFINITY_SHARE * max(one.cached for one in candidates)
    unsaturated = [one for one in candidates if one.engine.queue_s <= one.full_s]
    near = [one for one in unsaturated if one.cached >= least]
    return min(near or unsaturated or candidates, key=lambda one: (one.engine.queue_s, *one.load))


Rival = Callable[[Sequence[Candidate]], Candidate]

RIVALS: Final[dict[str, Rival]] = {
    "least_in_flight": least_in_flight,
    "round_robin": round_robin,
    "prefix_affinity": prefix_affinity,
    "sticky": sticky,
}


def planner_with(rival: Rival) -> Callable[..., RequestPlan]:
    """Return a ``plan_engines`` whose engine a rival chooses."""

    def plan(
        tree: KnowledgeTree,
        prompt: PlannedPrompt,
        engines: Sequence[PlannedEngine],
        policy: PlanPolicy,
        stale: Collection[str] = (),
    ) -> RequestPlan:
        if len(engines) > 1:
            ranks = range(len(prompt.documents))
            path = StoredPath(tree, prompt, ranks, policy, stale)
            candidates = [
                Candidate(
                    one,
                    path.ends[path.cached_chunks(one.source)],
                    one.costs.compute_s(0, prompt.num_tokens) if one.costs else 0.0,
                )
                for one in engines
            ]
            engines = [rival(candidates).engine]
        return plan_request(tree, prompt, engines, policy, stale)

    return plan


def main() -> int:
    """Run the gateway with the rival that the command line names."""
    from ragcache_gateway.__main__ import main as run_gateway  # noqa: PLC0415  after the choice
    from ragcache_gateway.planning import request_planner  # noqa: PLC0415

    request_planner.plan_engines = planner_with(RIVALS[sys.argv.pop(1)])  # type: ignore[attr-defined]
    return run_gateway()


if __name__ == "__main__":
    sys.exit(main())
