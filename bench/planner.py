"""Measures the planner: how long an order and a plan take, and what the order saves.

``order_us``: ordering five documents in a knowledge tree of ``nodes`` nodes.
``plan_us``: a whole plan over 16 engines in the same tree, with loads from two tiers.
``greedy_over_oracle``: saved tokens of the order over those of an exhaustive search, for each
request on the same tree. The tree is that of our own order, as a cache of limited size has it.
``algorithm_1_over_oracle`` is RAGCache++'s greedy walk on the same trees, and ``rank_over_oracle``
the retriever's order.

The traces are bursts of questions about one topic with shares of common documents from 0 to 0.8
(``bench/support/ordering/bursts.py``). Times are the median over questions of the least of several
rounds, because another program may run between two of them. The p99 is that of the same times.
``loop_us`` is the time of a list of 1,000 numbers, to compare machines with.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a program

from bench.support.ordering.bursts import BurstShape, bursts
from bench.support.ordering.orders import greedy_order, leading_tokens
from ragcache_core.cost.engine_costs import EngineCosts
from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.identity.keys import KEY_BYTES, ChunkKey
from ragcache_core.knowledge.knowledge_tree import KnowledgeTree
from ragcache_core.knowledge.predicted_cache import PredictedCache
from ragcache_core.planner.document_order import RankedDocument, order_documents
from ragcache_core.planner.planner import plan_request
from ragcache_core.planner.request_plan import PlannedEngine, PlannedPrompt, PlanPolicy

NODES, QUICK_NODES = 1_000_000, 200_000
ENGINES = 16
QUESTIONS, QUICK_QUESTIONS = 1000, 300
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


def measure(calls: Sequence[Callable[[], object]]) -> dict[str, float]:
    """Return median and p99 over the calls of each one's least time, in microseconds."""
    times_us = []
    for call in calls:
        rounds = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            call()
            rounds.append(1e6 * (time.perf_counter() - start))
        times_us.append(min(rounds))
    return {
        "p50": round(statistics.median(times_us), 1),
        "p99": round(statistics.quantiles(times_us, n=100)[98], 1),
    }


def times(nodes: int, questions: int, seed: int) -> dict[str, object]:
    """Measure orders and plans in a large tree."""
    tree, shape = large_tree(nodes, seed)
    asked = bursts(shape, questions, seed + 10_000)
    prompts = [
        PlannedPrompt((HEAD,), (HEAD_TOKENS,), [document(one) for one in question], TAIL_TOKENS)
        for question in asked
    ]
    fleet = engines()
    policies = {
        reuse: PlanPolicy("cached", reuse, None, 0.2, TOKEN_BYTES) for reuse in ("exact", "blend")
    }

    def order(prompt: PlannedPrompt) -> Callable[[], object]:
        return lambda: order_documents(tree.children_after(prompt.head), prompt.documents)

    def plan(prompt: PlannedPrompt, reuse: str) -> Callable[[], object]:
        return lambda: plan_request(tree, prompt, fleet, policies[reuse])

    gc.collect()
    gc.freeze()
    orders = [order_documents(tree.children_after(p.head), p.documents) for p in prompts]
    gained = sum(one.cached_tokens > one.rank_cached_tokens for one in orders)
    return {
        "nodes": len(tree),
        "reordered_share": round(gained / questions, 3),
        "order_us": measure([order(prompt) for prompt in prompts]),
        "plan_us": measure([plan(prompt, "exact") for prompt in prompts]),
        "plan_blend_us": measure([plan(prompt, "blend") for prompt in prompts]),
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer nodes and questions")
    parser.add_argument("--nodes", type=int, help=f"of the tree; {NODES} by default")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    questions = QUICK_QUESTIONS if arguments.quick else QUESTIONS
    totals = dict.fromkeys(("rank", "algorithm_1", "ours", "oracle"), 0)
    for overlap in OVERLAPS:
        for capacity in CAPACITIES:
            saved = savings(overlap, capacity, questions, arguments.seed)
            for name, tokens in saved.items():
                totals[name] += tokens
            shares = {k: round(v / saved["oracle"], 4) for k, v in saved.items() if k != "oracle"}
            print(json.dumps({"overlap": overlap, "capacity_tokens": capacity, **shares}))
    nodes = arguments.nodes or (QUICK_NODES if arguments.quick else NODES)
    measured = times(nodes, questions, arguments.seed)
    print(json.dumps(measured))
    order_us, plan_us = measured["order_us"], measured["plan_us"]
    assert isinstance(order_us, dict)
    assert isinstance(plan_us, dict)
    print(
        json.dumps(
            {
                "order_us": order_us["p50"],
                "plan_us": plan_us["p50"],
                "greedy_over_oracle": round(totals["ours"] / totals["oracle"], 4),
                "algorithm_1_over_oracle": round(totals["algorithm_1"] / totals["oracle"], 4),
                "rank_over_oracle": round(totals["rank"] / totals["oracle"], 4),
                "nodes": measured["nodes"],
                "engines": ENGINES,
                "loop_us": measure([lambda: sum(n * n for n in range(1000))] * 100)["p50"],
            }
        )
    )


if __name__ == "__main__":
    main()
