"""Plan a request: the order of documents, the engine, and what to load.

Each engine is predicted with each order: queue, loads, recomputed tokens and prefill. Computing all
that is not in the engine's prefix cache is always one of the options, and a load is chosen only if
it is predicted to be no slower.

An engine has the KV of another one through the cache store. The other engine stores what it
computes, and also what it finds in its own prefix cache if the store has lost it. So a hot prefix
is copied instead of queued for. A request goes elsewhere and loads it there as soon as that is
predicted to be faster than the queue of the engine that has it, by what the copy costs others.

Some engines of a pool may not have reported what prefills and loads take: those without RagCache,
and a new replica until its first report. They are predicted with the costs of the median engine of
those that have. So they do not change the choice between the other engines.

Source: Mooncake section 2.2, equations 1 and 2, and Algorithm 1; RAGCache section 5.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Literal, NamedTuple

from ragcache_core.cost.engine_costs import EngineCosts
from ragcache_core.knowledge.knowledge_tree import KnowledgeTree
from ragcache_core.planner.document_order import order_documents
from ragcache_core.planner.request_plan import (
    ChunkAction,
    ChunkDecision,
    PlanAlternative,
    PlannedEngine,
    PlannedPrompt,
    PlanPolicy,
    PlanReason,
    PlanSeconds,
    RequestPlan,
)
from ragcache_core.planner.stored_path import DEVICE, STORE, StoredPath

TIE_SHARE = 0.05
"""Engines count as equal if their predictions differ by less than this share of the seconds that
the request itself takes, because these are not exact. A share of the queue would hide what a cached
prefix saves just when engines are busy."""

BLEND_MIN_GAIN = 0.1
"""Share of the time of exact reuse that a blend has to save, as in the engine."""


COPY_SHARE = 0.5
"""Seconds that a copy will cost others, over those of its load. It takes the place of other KV in
the engine's prefix cache, and some of that has to be loaded again. It counts only in the choice
among engines: an engine whose queue takes a little longer keeps the requests for what it has."""


class _Option(NamedTuple):
    """One way to answer. The order is that of comparison: the fastest one first."""

    total_s: float
    order_index: int
    engine_index: int
    exact_end: int  # index of the first chunk that is neither cached nor loaded exactly
    cached_end: int  # index of the first chunk that the engine does not have
    blend_tiers: tuple[str, ...]  # tiers from which chunks are blended; empty: no blend
    queue_s: float
    load_s: float
    recompute_s: float
    prefill_s: float

    @property
    def seconds(self) -> PlanSeconds:
        return PlanSeconds(self.queue_s, self.load_s, self.recompute_s, self.prefill_s)

    @property
    def kind(self) -> Literal["compute", "exact", "blend"]:
        if self.blend_tiers:
            return "blend"
        return "exact" if self.exact_end > self.cached_end else "compute"


def plan_request(
    tree: KnowledgeTree,
    prompt: PlannedPrompt,
    engines: Sequence[PlannedEngine],
    policy: PlanPolicy,
    stale: Collection[str] = (),
) -> RequestPlan:
    """Return the plan with the least predicted time to the first token.

    Engines that differ by less than ``TIE_SHARE`` count as equal. Of these the one with the fewest
    decodes is chosen, and then the one with the most free tokens. What decides last is how
    much of the prompt each engine has, and then how long it got no request. If no engine has
    reported its costs, the one with the fewest requests in flight is chosen.

    Args:
        engines: Those without costs are assumed to have the costs of the median engine, by the time
            of computing the whole prompt.
        stale: Sources whose part of the tree may be out of date. The plan uses nothing of them.
    """
    engines = _with_assumed_costs(engines, prompt.num_tokens)
    orders = _orders(tree, prompt, engines, policy, stale)
    paths = [StoredPath(tree, prompt, order, policy, stale) for order in orders]
    if not engines:
        return RequestPlan(orders[-1], "")
    if policy.reuse == "off":
        return _without_reuse(orders[0], paths[0], engines, prompt.num_tokens)
    if engines[0].costs is None:
        return _without_costs(orders, paths, engines)
    options: list[_Option] = []
    best = [
        _best_of_engine(index, engine, paths, prompt.tail_tokens, policy, options)
        for index, engine in enumerate(engines)
    ]
    chosen = _choose(best, paths, engines)
    others = [option for option in options if option is not chosen]
    runner_up = min(others) if others else None
    return RequestPlan(
        orders[chosen.order_index],
        engines[chosen.engine_index].source,
        _decisions(chosen, paths[chosen.order_index], engines[chosen.engine_index]),
        chosen.seconds,
        _alternative(runner_up, orders, engines) if runner_up is not None else None,
        len(options),
    )


def _orders(
    tree: KnowledgeTree,
    prompt: PlannedPrompt,
    engines: Sequence[PlannedEngine],
    policy: PlanPolicy,
    stale: Collection[str],
) -> list[tuple[int, ...]]:
    """Return the orders to compare, that of the ranks first."""
    ranks = tuple(range(len(prompt.documents)))
    orders = [ranks]
    if policy.order == "rank" or policy.reuse == "off":
        return orders
    start = tree.children_after(prompt.head)
    limit = policy.max_displacement
    unused = set(stale)
    if not any(engine.reads_store for engine in engines):
        unused.update(name for name in tree.sources if name.startswith(STORE))
    current = {name for name in tree.sources if name not in unused} if unused else None
    found = order_documents(start, prompt.documents, max_displacement=limit, sources=current)
    orders.append(found.order)
    if len(engines) > 1 and found.cached_tokens:
        # The best order of all may be that of a busy engine.
        quickest = min(engines, key=lambda e: (e.queue_s, e.in_flight, e.last_chosen))
        sources = {quickest.source}
        if quickest.reads_store:
            sources.update(name for name in tree.sources if name.startswith(STORE))
        sources.difference_update(stale)
        own = order_documents(start, prompt.documents, max_displacement=limit, sources=sources)
        orders.append(own.order)
    return list(dict.fromkeys(orders))


def _best_of_engine(
    engine_index: int,
    engine: PlannedEngine,
    paths: Sequence[StoredPath],
    tail_tokens: int,
    policy: PlanPolicy,
    options: list[_Option],
) -> _Option:
    """Return the fastest option of an engine, and add all that were compared to ``options``."""
    costs = engine.costs
    assert costs is not None
    best: _Option | None = None
    length = paths[0].ends[-1] + tail_tokens
    # By tokens before them, seconds to compute the rest: orders often have some in common.
    rest_s: dict[int, float] = {}
    for order_index, path in enumerate(paths):
        ends = path.ends
        cached_end = _cached_end(path, engine)
        cached = ends[cached_end]
        prefill_s = rest_s.get(cached, 0.0)
        if not prefill_s:
            prefill_s = rest_s[cached] = costs.prefill_s(cached, length - cached)
        queue_s = _queue_s(engine, costs, length - cached)
        exact = _Option(
            queue_s + prefill_s,
            order_index,
            engine_index,
            cached_end,
            cached_end,
            (),
            queue_s,
            0.0,
            0.0,
            prefill_s,
        )
        options.append(exact)
        for end, sizes in _loads(path, engine, cached_end):
            load_s = 0.0
            for tier, num_bytes in sizes.items():
                load_s += costs.load_s(tier, num_bytes)
            cached = ends[end]
            after_s = rest_s.get(cached, 0.0)
            if not after_s:
                after_s = rest_s[cached] = costs.prefill_s(cached, length - cached)
            total_s = queue_s + load_s + after_s
            option = _Option(
                total_s,
                order_index,
                engine_index,
                end,
                cached_end,
                (),
                queue_s,
                load_s,
                0.0,
                after_s,
            )
            options.append(option)
            # Of equal options the one that loads most leaves most to other requests.
            if total_s <= exact.total_s:
                exact = option
        if path.variants and engine.reads_store:
            blend = _blend(exact, path, costs, length, policy)
            if blend is not None:
                options.append(blend)
                if blend.total_s <= queue_s + (1 - BLEND_MIN_GAIN) * (exact.total_s - queue_s):
                    exact = blend
        if best is None or exact.total_s < best.total_s:
            best = exact
    assert best is not None
    return best


def _blend(
    exact: _Option,
    path: StoredPath,
    costs: EngineCosts,
    length: int,
    policy: PlanPolicy,
) -> _Option | None:
    """Return the option that loads chunks after the exact ones from after other prefixes."""
    ends = path.ends
    first = max(exact.exact_end, path.num_head)
    computed = length - ends[exact.exact_end]
    # Seconds that loading saves for each token, because a share of the tokens is recomputed.
    compute_s = costs.compute_s(length - computed, computed)
    token_s = (1 - policy.recompute_share) * compute_s / computed if computed else 0.0
    sizes: dict[str, int] = {}
    tokens_by_tier: dict[str, int] = {}
    for index in range(first, len(path.chunks)):
        copy = path.variants[index]
        if copy is not None:
            tokens = ends[index + 1] - ends[index]
            sizes[copy.tier] = sizes.get(copy.tier, 0) + copy.num_bytes
            tokens_by_tier[copy.tier] = tokens_by_tier.get(copy.tier, 0) + tokens
    tiers = tuple(
        tier
        for tier, num_bytes in sizes.items()
        if costs.loads_faster(tier, num_bytes / tokens_by_tier[tier], token_s)
    )
    blended = sum([tokens_by_tier[tier] for tier in tiers])
    if not blended:
        return None
    load_s = exact.load_s + sum([costs.load_s(tier, sizes[tier]) for tier in tiers])
    recomputed = round(policy.recompute_share * blended)
    computed += recomputed - blended
    passes_s = costs.prefill_s(length - computed, computed)
    recompute_s = passes_s * recomputed / computed if computed else 0.0
    return exact._replace(
        total_s=exact.queue_s + load_s + passes_s,
        blend_tiers=tiers,
        load_s=load_s,
        recompute_s=recompute_s,
        prefill_s=passes_s - recompute_s,
    )


def _queue_s(engine: PlannedEngine, costs: EngineCosts, new_tokens: int) -> float:
    """Return the predicted seconds until an engine can begin with a prompt.

    A prompt that does not fit into the free tokens waits until another request ends, or vLLM
    preempts one. It counts as much as computing the missing tokens again, which a preempted request
    needs.

    Args:
        new_tokens: Tokens of the prompt that the engine does not have.
    """
    if engine.free_tokens is None or new_tokens <= engine.free_tokens:
        return engine.queue_s
    return engine.queue_s + costs.compute_s(0, new_tokens - engine.free_tokens)


def _choose(
    options: Sequence[_Option], paths: Sequence[StoredPath], engines: Sequence[PlannedEngine]
) -> _Option:
    """Choose among the best options of the engines.

    An engine that reports no free tokens reports no decodes either. What it has in flight counts.
    """

    def load(option: _Option) -> tuple[int, int, int, int]:
        engine = engines[option.engine_index]
        knows = engine.free_tokens is not None
        return (
            engine.num_decoding if knows else engine.in_flight,
            -(engine.free_tokens or 0),
            -paths[option.order_index].ends[option.cached_end],
            engine.last_chosen,
        )

    best = min(options, key=_shared_s)
    limit_s = _shared_s(best) + TIE_SHARE * (best.total_s - best.queue_s)
    return min((option for option in options if _shared_s(option) <= limit_s), key=load)


def _shared_s(option: _Option) -> float:
    """Return the seconds of an option with those that its load will cost other requests."""
    return option.total_s + COPY_SHARE * option.load_s


def _without_reuse(
    order: tuple[int, ...], path: StoredPath, engines: Sequence[PlannedEngine], length: int
) -> RequestPlan:
    """Plan to compute everything."""
    if engines[0].costs is None:
        engine = min(engines, key=lambda one: (one.in_flight, one.last_chosen))
        return RequestPlan(order, engine.source, _computed(path))
    options = []
    for index, engine in enumerate(engines):
        assert engine.costs is not None
        queue_s = _queue_s(engine, engine.costs, length)
        prefill_s = engine.costs.prefill_s(0, length)
        options.append(
            _Option(queue_s + prefill_s, 0, index, 0, 0, (), queue_s, 0.0, 0.0, prefill_s)
        )
    chosen = _choose(options, [path], engines)
    return RequestPlan(order, engines[chosen.engine_index].source, _computed(path), chosen.seconds)


def _without_costs(
    orders: Sequence[tuple[int, ...]],
    paths: Sequence[StoredPath],
    engines: Sequence[PlannedEngine],
) -> RequestPlan:
    """Choose without predictions: the least busy engine, and the order that it has most of."""
    choices = []
    for engine_index, engine in enumerate(engines):
        source = engine.source
        cached = [path.ends[_cached_end(path, engine)] for path in paths]
        reachable = [path.ends[_loadable_end(path, engine, 0)] for path in paths]
        best = max(range(len(paths)), key=lambda i: (cached[i], max(cached[i], reachable[i]), -i))
        choices.append(
            (engine.in_flight, -cached[best], engine.last_chosen, best, source, engine_index)
        )
    *_, order_index, source, engine_index = min(choices)
    path, engine = paths[order_index], engines[engine_index]
    cached_end = _cached_end(path, engine)
    exact_end = _loadable_end(path, engine, cached_end)
    option = _Option(0.0, order_index, engine_index, exact_end, cached_end, (), 0.0, 0.0, 0.0, 0.0)
    decisions = _decisions(option, path, engine)
    num_considered = len(orders) * len(engines)
    return RequestPlan(orders[order_index], source, decisions, num_considered=num_considered)


def _cached_end(path: StoredPath, engine: PlannedEngine) -> int:
    """Return the index of the first chunk that an engine does not have in its prefix cache."""
    end = path.cached_chunks(engine.source)
    for computed in engine.computed:
        common = takewhile(
            lambda pair: pair[0] == pair[1], zip(computed, path.chunks, strict=False)
        )
        end = max(end, sum(1 for _ in common))
    return end


def _loads(path: StoredPath, engine: PlannedEngine, first: int) -> list[tuple[int, dict[str, int]]]:
    """Return what an engine may load exactly, as ``StoredPath.loads``."""
    return path.loads(engine.source, first) if engine.reads_store else []


def _loadable_end(path: StoredPath, engine: PlannedEngine, start: int) -> int:
    """Return the index of the first chunk from ``start`` on that cannot be loaded exactly."""
    return max([start, *(end for end, _ in _loads(path, engine, start))])


def _decisions(
    option: _Option, path: StoredPath, engine: PlannedEngine
) -> tuple[ChunkDecision, ...]:
    """Return what an option does with each chunk."""
    decisions = []
    source = engine.source
    loadable = _loadable_end(path, engine, option.cached_end)
    for index, chunk in enumerate(path.chunks):
        tokens = path.ends[index + 1] - path.ends[index]
        copy = path.exact_copy(source, index) if option.cached_end <= index < loadable else None
        variant = path.variants[index] if path.variants and engine.reads_store else None
        action, reason, tier, origin = ChunkAction.COMPUTE, PlanReason.NOT_STORED, "", ""
        if index < option.cached_end:
            action, reason, tier, origin = ChunkAction.CACHED, PlanReason.RESIDENT, DEVICE, source
        elif index < option.exact_end and copy is not None:
            action, reason = ChunkAction.LOAD, PlanReason.STORED
            tier, origin = copy.tier, copy.source
        elif variant is not None and variant.tier in option.blend_tiers:
            action, reason = ChunkAction.BLEND, PlanReason.OTHER_PREFIX
            tier, origin = variant.tier, variant.source
        elif index < loadable or variant is not None:
            reason = PlanReason.SLOWER
        elif index < len(path.nodes) and path.nodes[index].is_exact:
            is_readable = engine.reads_store and path.copies[index]
            reason = PlanReason.AFTER_GAP if is_readable else PlanReason.OTHER_ENGINE
        decisions.append(ChunkDecision(chunk, tokens, action, reason, tier, origin))
    return tuple(decisions)


def _computed(path: StoredPath) -> tuple[ChunkDecision, ...]:
    return tuple(
        ChunkDecision(chunk, end - start, ChunkAction.COMPUTE, PlanReason.REUSE_OFF)
        for chunk, start, end in zip(path.chunks, path.ends, path.ends[1:], strict=False)
    )


def _with_assumed_costs(
    engines: Sequence[PlannedEngine], num_tokens: int
) -> Sequence[PlannedEngine]:
    """Give engines without costs those of the median engine, if any engine has costs."""
    known = [engine.costs for engine in engines if engine.costs is not None]
    if not known or len(known) == len(engines):
        return engines
    by_time = sorted(known, key=lambda costs: costs.compute_s(0, num_tokens))
    assumed = by_time[(len(by_time) - 1) // 2]
    return [replace(one, costs=assumed) if one.costs is None else one for one in engines]


def _alternative(
    option: _Option, orders: Sequence[tuple[int, ...]], engines: Sequence[PlannedEngine]
) -> PlanAlternative:
    source = engines[option.engine_index].source
    return PlanAlternative(source, orders[option.order_index], option.kind, option.seconds)
