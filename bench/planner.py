"""Measures the planner: how long an order and a plan take, and what the order saves.

``order_us``: ordering five documents in a knowledge tree of ``nodes`` nodes.
``plan_us``: a whole plan over 16 engines in the same tree, with loads from two tiers.
``greedy_over_oracle``: saved tokens of the order over those of an exhaustive search, for each
request on the same tree. The tree is that of our own order, as a cache of limited size has it.
``algorithm_1_over_oracle`` is RAGCache++'s greedy walk on the same trees, and ``rank_over_oracle``
the retriever's order.

The traces are bursts of questions about one topic with shares of common documents from 0 to 0.8
(``bench/support/bursts.py``). Times are the median over questions of the least of several
rounds, because another program may run between two of them.
``loop_us`` is the time of a list of 1,000 numbers, to compare machines with.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import permutations

from bench.support.bursts import BurstShape, bursts
from bench.support.document_orders import greedy_order, leading_tokens
from bench.support.program import is_quick
from ragcache_core.cost.engine_costs import EngineCosts
from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.identity.keys import KEY_BYTES, ChunkKey
from ragcache_core.knowledge.knowledge_tree import KnowledgeTree
from ragcache_core.knowledge.predicted_cache import PredictedCache
from ragcache_core.planner.document_order import RankedDocument, order_documents
from ragcache_core.planner.planner import plan_request
from ragcache_core.planner.request_plan import PlannedEngine, PlannedPrompt, PlanPolicy

SEED = 1
ENGINES = 16
ROUNDS = 7
OVERLAPS = (0.0, 0.2, 0.4, 0.6, 0.8)
CAPACITIES = (20_000, 200_000)
"""Tokens of the engine's cache: about those of all documents once, and ten times as many."""
HEAD_TOKENS, TAIL_TOKENS = 150, 40
TOKEN_BYTES = 131_072.0  # of an 8B model with 8 KV heads in bf16
HEAD: ChunkKey = b"h" * KEY_BYTES
ENGINE = "engine:10.0.0.1:8000"


def document(number: int) -> RankedDocument:
    """Return a document of one chunk with 60 to 300 tokens."""
    tokens = random.Random(number).randint(60, 300)
    return RankedDocument((number.to_bytes(KEY_BYTES, "big"),), (tokens,))


def large_tree(nodes: int, seed: int) -> tuple[KnowledgeTree, BurstShape]:
    """Return a tree with this many nodes, from bursts that 16 engines and two tiers have."""
    tree = KnowledgeTree(nodes)
    shape = BurstShape(0.6, regions=nodes // 60)
    tree.record_use((), 0.0)
    while len(tree) < 0.99 * nodes:
        for number, question in enumerate(bursts(shape, 5000, seed)):
            documents = [document(one) for one in question]
            path = [HEAD, *(one.chunks[0] for one in documents)]
            sizes = [HEAD_TOKENS, *(one.num_tokens[0] for one in documents)]
            tree.assume(f"engine:10.0.0.{number % ENGINES}:8000", "device", path, sizes)
            if number % 2:
                tier = "memory" if number % 4 == 1 else "disk"
                tree.assume("store:10.0.1.1:7000", tier, path, sizes)
        seed += 1
    return tree, shape


def engines() -> list[PlannedEngine]:
    """Return engines with profiles and queues of their own."""
    rng = random.Random(0)
    points = (0, 1024, 4096, 16_384)
    sizes = (16, 128, 512, 2048)
    found = []
    for number in range(ENGINES):
        speed = rng.uniform(0.9, 1.1)
        seconds = tuple(
            tuple(speed * (0.01 + 1e-4 * size + 2e-9 * size * cached) for size in sizes)
            for cached in points
        )
        loads = {"memory": (0.002, 3e9 * speed), "disk": (0.01, 6e8 * speed)}
        costs = EngineCosts(PrefillProfile(points, sizes, seconds, 2048), 1.0, loads)
        source = f"engine:10.0.0.{number}:8000"
        found.append(PlannedEngine(source, costs, rng.uniform(0, 0.1), number % 3, number))
    return found


def median_us(calls: Sequence[Callable[[], object]]) -> float:
    """Return the median over the calls of each one's least time, in microseconds."""
    times_us = []
    for call in calls:
        rounds = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            call()
            rounds.append(1e6 * (time.perf_counter() - start))
        times_us.append(min(rounds))
    return round(statistics.median(times_us), 1)


def times_us(nodes: int, questions: int, seed: int) -> dict[str, float]:
    """Measure orders and plans in a large tree."""
    tree, shape = large_tree(nodes, seed)
    asked = bursts(shape, questions, seed + 10_000)
    prompts = [
        PlannedPrompt((HEAD,), (HEAD_TOKENS,), [document(one) for one in question], TAIL_TOKENS)
        for question in asked
    ]
    fleet = engines()
    policy = PlanPolicy("cached", "exact", None, 0.2, TOKEN_BYTES)

    def order(prompt: PlannedPrompt) -> Callable[[], object]:
        return lambda: order_documents(tree.children_after(prompt.head), prompt.documents)

    def plan(prompt: PlannedPrompt) -> Callable[[], object]:
        return lambda: plan_request(tree, prompt, fleet, policy)

    gc.collect()
    gc.freeze()
    return {
        "order_us": median_us([order(prompt) for prompt in prompts]),
        "plan_us": median_us([plan(prompt) for prompt in prompts]),
        "nodes": len(tree),
    }


def savings(overlap: float, capacity: int, questions: int, seed: int) -> dict[str, int]:
    """Return tokens that each way of ordering saves on the trees of our order."""
    tree = KnowledgeTree(1_000_000)
    cache = PredictedCache(tree, ENGINE, capacity_tokens=capacity, block_tokens=1)
    saved = dict.fromkeys(("rank", "algorithm_1", "ours", "oracle"), 0)
    for number, question in enumerate(bursts(BurstShape(overlap), questions, seed)):
        documents = [document(one) for one in question]
        start = tree.children_after((HEAD,))
        found = order_documents(start, documents)
        saved["rank"] += found.rank_cached_tokens
        saved["ours"] += found.cached_tokens
        saved["algorithm_1"] += leading_tokens(start, documents, greedy_order(start, documents))
        saved["oracle"] += max(
            leading_tokens(start, documents, order) for order in permutations(range(len(documents)))
        )
        ordered = [documents[rank] for rank in found.order]
        cache.predict(
            [HEAD, *(one.chunks[0] for one in ordered)],
            [HEAD_TOKENS, *(one.num_tokens[0] for one in ordered)],
            float(number),
        )
    return saved


def main() -> None:
    quick = is_quick(__doc__, "fewer nodes and questions")
    nodes, questions = (200_000, 300) if quick else (1_000_000, 1000)
    totals: Counter[str] = Counter()
    for overlap in OVERLAPS:
        for capacity in CAPACITIES:
            totals.update(savings(overlap, capacity, questions, SEED))
    figures = times_us(nodes, questions, SEED) | {
        "greedy_over_oracle": round(totals["ours"] / totals["oracle"], 4),
        "algorithm_1_over_oracle": round(totals["algorithm_1"] / totals["oracle"], 4),
        "rank_over_oracle": round(totals["rank"] / totals["oracle"], 4),
        "engines": ENGINES,
        "loop_us": median_us([lambda: sum(n * n for n in range(1000))] * 100),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
