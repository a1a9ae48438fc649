"""Plan a request for one engine, or for one that computes the prompt and one that decodes.

A prefill delays the answers that its engine decodes. So plans are compared by the seconds that they
delay all requests: the request's own time to the first token, and the time of the prefill for each
answer that the same engine decodes. An engine that only decodes counts as decoding one answer at
least, because others will come.

Engines do what their role says where they can. An engine that decodes also computes what takes less
than a handoff. It computes nothing else, however long engines that prefill are busy. Only without
such an engine those that decode do both, and the other way round.

Source: Mooncake section 3 and Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final, Literal, NamedTuple

from ragcache_core.knowledge.knowledge_tree import KnowledgeTree
from ragcache_core.planner.planner import TIE_SHARE, plan_request
from ragcache_core.planner.request_plan import (
    ChunkAction,
    EngineRole,
    PlanAlternative,
    PlannedEngine,
    PlannedPrompt,
    PlanPolicy,
    PlanSeconds,
    RequestPlan,
)
from ragcache_core.planner.stored_path import MEMORY, StoredPath

MIN_HANDOFF_TOKENS: Final = 64
"""Fewer tokens are computed where the answer is: engines do not load so few."""

_ROLES: Final[Sequence[EngineRole]] = ("both", "prefill", "decode")


def plan_engines(
    tree: KnowledgeTree,
    prompt: PlannedPrompt,
    engines: Sequence[PlannedEngine],
    policy: PlanPolicy,
    stale: Collection[str] = (),
) -> RequestPlan:
    """Return the plan that delays all requests least: of one engine, or of a pair.

    A pair is chosen only if it is predicted to delay less than each engine that does all. If no
    engine has reported its costs, an engine that does all is chosen, or else a pair.

    Args:
        engines: As in ``plan_request``.
        stale: As in ``plan_request``.
    """

    def plan_of(group: Sequence[PlannedEngine]) -> RequestPlan:
        return plan_request(tree, prompt, group, policy, stale)

    whole, prefilling, decoding = (
        [engine for engine in engines if engine.role == role] for role in _ROLES
    )
    if len(whole) == len(engines) or not (whole or decoding):
        return plan_of(engines)
    plans = [plan_of(whole)] if whole else []
    if policy.reuse != "off":
        # A pair of two engines that do all would gain nothing over the less busy one of them.
        for group in (prefilling, whole if decoding else []):
            if group := [engine for engine in group if engine.reads_store]:
                computing = plan_of(group)
                path = StoredPath(tree, prompt, computing.order, policy, stale)
                pair = _pair(computing, path, engines, prompt.num_tokens)
                plans += [pair] if pair is not None else []
    if decoding:
        alone = plan_of(decoding)
        if not plans:
            return alone
        plans.append(alone)
    if any(plan.seconds is None for plan in plans):
        return plans[0]
    by_source = {engine.source: engine for engine in engines}
    if decoding and plans[-1] is not min(plans, key=lambda plan: _work_s(plan, by_source)):
        plans.pop()
    best = min(plans, key=lambda plan: _delay_s(plan, by_source))
    others = [plan for plan in plans if plan is not best and not plan.prefill_source]
    num_considered = sum(plan.num_considered for plan in plans)
    if best.prefill_source and others:
        other = min(others, key=lambda plan: _delay_s(plan, by_source))
        return replace(best, runner_up=_alternative(other), num_considered=num_considered)
    return replace(best, num_considered=num_considered)


class _Decode(NamedTuple):
    """An engine that decodes a prompt that another one computes."""

    engine: PlannedEngine
    transfer_s: float
    total_s: float  # until the first token


def _pair(
    computing: RequestPlan,
    path: StoredPath,
    engines: Sequence[PlannedEngine],
    length: int,
) -> RequestPlan | None:
    """Return the plan of a pair. None: no engine lacks enough of the prompt to load it.

    The engine that decodes has to begin, to load what it does not have when the prompt has been
    computed, and to compute the last token. Of those that are about equal, the one that decodes
    fewest answers is chosen, then the one with most space for KV.

    Args:
        computing: The plan of the engine that computes the prompt.
        path: What is stored of the prompt in the plan's order.
        engines: All engines.
        length: Tokens of the prompt.
    """
    [prefill] = [engine for engine in engines if engine.source == computing.source]
    computed_s = computing.seconds.total_s if computing.seconds is not None else 0.0
    missing = {
        engine.source: length - 1 - path.ends[path.cached_chunks(engine.source)]
        for engine in engines
    }
    others = [
        engine
        for engine in engines
        if engine.reads_store
        and engine.role != "prefill"
        and (prefill.role == "prefill" or engine.role == "decode")
        and missing[engine.source] >= MIN_HANDOFF_TOKENS
    ]
    if not others:
        return None
    roomy = [e for e in others if e.free_tokens is None or e.free_tokens >= length]
    options = []
    for engine in roomy or others:
        costs = engine.costs or prefill.costs
        transfer_s = step_s = 0.0
        if costs is not None:
            num_bytes = round(path.token_bytes * missing[engine.source])
            transfer_s, step_s = costs.load_s(MEMORY, num_bytes), costs.compute_s(length - 1, 1)
        total_s = max(computed_s, engine.queue_s) + transfer_s + step_s
        options.append(_Decode(engine, transfer_s, total_s))
    fastest = min(options, key=lambda option: option.total_s)
    limit_s = fastest.total_s + TIE_SHARE * (fastest.total_s - fastest.engine.queue_s)
    decode, transfer_s, total_s = min(
        (option for option in options if option.total_s <= limit_s),
        key=lambda option: (
            option.engine.num_decoding,
            -(option.engine.free_tokens or 0),
            option.engine.in_flight,
            option.engine.last_chosen,
        ),
    )
    seconds = computing.seconds
    if seconds is not None:
        waits_s = max(0.0, decode.queue_s - computed_s)
        step_s = total_s - computed_s - waits_s - transfer_s
        seconds = PlanSeconds(
            seconds.queue_s + waits_s,
            seconds.load_s + transfer_s,
            seconds.recompute_s,
            seconds.prefill_s + step_s,
        )
    return replace(
        computing,
        source=decode.source,
        prefill_source=prefill.source,
        seconds=seconds,
        handoff_s=total_s - max(computed_s, decode.queue_s),
    )


def _work_s(plan: RequestPlan, engines: Mapping[str, PlannedEngine]) -> float:
    """Return the seconds of a plan in idle engines, and of a delay where answers are generated."""
    seconds = plan.seconds
    assert seconds is not None
    role = engines[plan.prefill_source or plan.source].role
    delayed_s = seconds.recompute_s + seconds.prefill_s if role == "decode" else 0.0
    return seconds.total_s - seconds.queue_s + delayed_s


def _delay_s(plan: RequestPlan, engines: Mapping[str, PlannedEngine]) -> float:
    """Return by how many seconds a plan delays its own request and the answers beside it."""
    seconds = plan.seconds
    assert seconds is not None
    engine = engines[plan.prefill_source or plan.source]
    num_delayed = max(engine.num_decoding, int(engine.role == "decode"))
    return seconds.total_s + num_delayed * (seconds.recompute_s + seconds.prefill_s)


def _alternative(plan: RequestPlan) -> PlanAlternative:
    assert plan.seconds is not None
    actions = {decision.action for decision in plan.decisions}
    reuse: Literal["compute", "exact", "blend"] = "compute"
    if ChunkAction.BLEND in actions:
        reuse = "blend"
    elif ChunkAction.LOAD in actions:
        reuse = "exact"
    return PlanAlternative(plan.source, plan.order, reuse, plan.seconds)
