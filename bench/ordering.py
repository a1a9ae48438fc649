"""Measures what the order of documents saves, on vLLM with its own prefix cache and a real model.

RAGCache++ Tables 1, 3, 7, 8 and 12 in miniature. The contestants order the documents of the same
requests. ``no_cache`` and ``rank`` keep the ranks, and ``sorted`` sorts by name. ``recency`` puts
the documents first that were seen last. ``ours`` is the product's order over a predicted cache, and
``oracle`` tries all orders on a prediction of its own. ``contextpilot`` is ContextPilot's live
index. The engine is an unmodified vLLM. It reports the cached tokens of each prompt.

All contestants use one engine, each with a namespace of its own (``cache_salt``) in the prefix
cache. In each block of requests every contestant gets one turn, in rotating order.

The generated traces are bursts of ten questions about one topic with five documents of 200 tokens.
``overlap`` is the share of a question's documents that are taken from the one before it. As in
RAGCache++, others are the same by chance; ``jaccard`` is what both add up to. Ranks vary between
questions (``bench/support/bursts.py``).

``p50_rank_over_ours`` is the quotient of the median times to first token at an overlap of 0.6, with
the interval of a bootstrap over requests. ``agreement`` is the share of greedy answers that equal
those of ``no_cache``. ``saved`` is 1 - T/T_no_cache of each request, as in Table 7.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np

from bench.contestants.contestant import Absent
from bench.support.bursts import BurstShape, Facts, bursts, mean_jaccard
from bench.support.comparison import interval, quantile_ratio, turns
from bench.support.document_orders import (
    ALL,
    NO_CACHE,
    OURS,
    RANK,
    Ordering,
    make_ordering,
    reordered,
)
from bench.support.number_type import fast_number_type
from bench.support.program import options, print_figures, rounded, say
from bench.support.sequences.requests import SequenceRequest
from harness.completion import Completion, complete
from harness.processes import launch_engine, wait_for_engine
from harness.vllm_plugin import WAITS_ASLEEP, plugin_settings
from ragcache_cli.models.cache import fetch_model
from ragcache_kv.model.folder import load_model_folder
from ragcache_kv.values.layout import value_bytes

OVERLAPS = (0.0, 0.2, 0.4, 0.6, 0.8)
WANTED_OVERLAP = 0.6
CONCURRENCIES = (1, 2, 4, 8)
WARM_UP = 5
"""First requests that do not count."""

TURN_REQUESTS = 10
KV_CACHE_GIB = 4
BLOCK_TOKENS = 128
"""Of the prefix cache: vLLM's default on a CPU, which the operator keeps."""

SEED = 1


@dataclass(frozen=True, slots=True)
class Asked:
    order_s: float
    build_s: float
    prompt_tokens: int
    answer: Completion


@dataclass(slots=True)
class Contestant:
    """One way of ordering, and what it was measured at."""

    name: str
    ordering: Ordering
    salt: str = field(default_factory=lambda: uuid.uuid4().hex)
    asked: list[Asked] = field(default_factory=list)

    def ttft_s(self, warm_up: int) -> np.ndarray:
        return np.array([one.answer.ttft_s for one in self.asked[warm_up:]])


class OrderingBenchmark:
    """Asks traces of requests in one engine."""

    def __init__(self, url: str, cache_tokens: int, answer_tokens: int) -> None:
        self._url = url
        self._cache_tokens = cache_tokens
        self._answer_tokens = answer_tokens
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(verify=False, trust_env=False, limits=limits)
        self.skipped: dict[str, str] = {}

    def run(
        self, requests: Sequence[SequenceRequest], names: Sequence[str], concurrency: int = 1
    ) -> dict[str, Contestant]:
        """Ask a trace of every contestant, block by block in turns."""
        contestants: dict[str, Contestant] = {}
        capacity = self._cache_tokens // len(names)
        for name in names:
            try:
                contestants[name] = Contestant(name, make_ordering(name, capacity, BLOCK_TOKENS))
            except Absent as absent:
                self.skipped[name] = str(absent)
        blocks = turns(tuple(contestants), range(len(requests)), TURN_REQUESTS)
        for number, block in enumerate(blocks):
            for turn in block:
                asked = [requests[index] for index in turn.requests]
                for first in range(0, len(asked), concurrency):
                    self._ask_together(
                        contestants[turn.contestant], asked[first : first + concurrency]
                    )
            say(f"block {number} of {len(contestants)} contestants")
        return contestants

    def _ask_together(self, contestant: Contestant, requests: Sequence[SequenceRequest]) -> None:
        """Ask requests at once. All orders are chosen before one of them is computed."""
        prepared = []
        for request in requests:
            start = time.perf_counter()
            order = contestant.ordering.order(request)
            ordered_at = time.perf_counter()
            ordered = reordered(request, order)
            token_ids = list(ordered.token_ids)
            built_at = time.perf_counter()
            prepared.append((ordered, token_ids, ordered_at - start, built_at - ordered_at))
        sent_s = time.monotonic()

        def ask(token_ids: list[int]) -> Completion:
            return complete(
                self._url,
                token_ids,
                max_tokens=self._answer_tokens,
                cache_salt=uuid.uuid4().hex if contestant.name == NO_CACHE else contestant.salt,
                usage=True,
                client=self._client,
            )

        with ThreadPoolExecutor(len(prepared)) as threads:
            answers = list(threads.map(ask, [token_ids for _, token_ids, _, _ in prepared]))
        for (ordered, token_ids, order_s, build_s), answer in zip(prepared, answers, strict=True):
            contestant.ordering.computed(ordered, answer.cached_tokens, sent_s)
            contestant.asked.append(Asked(order_s, build_s, len(token_ids), answer))


def figures(contestants: Mapping[str, Contestant]) -> dict[str, dict[str, float]]:
    """Return the figures of Tables 1, 3 and 7, and the agreement of answers, by contestant."""
    baseline = contestants[NO_CACHE]
    found = {}
    for name, contestant in contestants.items():
        asked = contestant.asked[WARM_UP:]
        ttft_ms = 1e3 * contestant.ttft_s(WARM_UP)
        row = {
            "p50_ms": float(np.median(ttft_ms)),
            "p95_ms": float(np.quantile(ttft_ms, 0.95)),
            "mean_ms": float(ttft_ms.mean()),
            "cached_share": sum(one.answer.cached_tokens for one in asked)
            / sum(one.prompt_tokens for one in asked),
            "order_us": 1e6 * statistics.median(one.order_s for one in asked),
            "build_us": 1e6 * statistics.median(one.build_s for one in asked),
        }
        if name != NO_CACHE:
            saved = 1 - contestant.ttft_s(WARM_UP) / baseline.ttft_s(WARM_UP)
            pairs = zip(asked, baseline.asked[WARM_UP:], strict=True)
            row |= {
                "saved_p50": float(np.median(saved)),
                "saved_mean": float(saved.mean()),
                "saved_p95": float(np.quantile(saved, 0.95)),
                "benefit_share": float((saved > 0.05).mean()),
                "agreement": statistics.fmean(
                    one.answer.token_ids == other.answer.token_ids for one, other in pairs
                ),
            }
        found[name] = rounded(row)
    return found


def rank_over_ours(contestants: Mapping[str, Contestant], warm_up: int) -> dict[str, object]:
    """Return the quotient of the medians with its interval."""
    rank, ours = (contestants[name].ttft_s(warm_up) for name in (RANK, OURS))
    low, high = interval(quantile_ratio(rank, ours, 0.5), len(rank))
    ratio = float(np.median(rank) / np.median(ours))
    return {"p50": round(ratio, 3), "interval": [round(low, 3), round(high, 3)]}


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    started = time.monotonic()
    model = fetch_model("smollm2")
    space = load_model_folder(str(model)).space(fast_number_type())
    cache_tokens = (KV_CACHE_GIB << 30) // value_bytes(space, 1)
    settings = plugin_settings(folder / "plugin", WAITS_ASLEEP) | {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB)
    }
    engine = launch_engine(
        *(folder, model, None, "--block-size", str(BLOCK_TOKENS)),
        settings=settings,
        number_type=fast_number_type(),
    )
    facts = Facts(model, SEED)
    result: dict[str, object] = {}
    sweep: dict[str, object] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(engine.service.stop)
        wait_for_engine(engine)
        say(f"the engine is up after {time.monotonic() - started:.0f} s")
        benchmark = OrderingBenchmark(engine.url, cache_tokens, arguments.answer_tokens)
        for overlap in arguments.overlaps:
            shape = BurstShape(overlap)
            requests = facts.requests(shape, arguments.requests)
            is_wanted = overlap == WANTED_OVERLAP
            contestants = benchmark.run(requests, ALL if is_wanted else (NO_CACHE, RANK, OURS))
            quotient = rank_over_ours(contestants, WARM_UP)
            rows = figures(contestants)
            sweep[str(overlap)] = {
                "jaccard": round(mean_jaccard(bursts(shape, arguments.requests, SEED)), 3),
                "p50_rank_over_ours": quotient,
                "contestants": rows,
            }
            if is_wanted:
                result["p50_rank_over_ours"] = quotient["p50"]
                result["p50_rank_over_ours_interval"] = quotient["interval"]
                result["agreement"] = {
                    name: row["agreement"] for name, row in rows.items() if "agreement" in row
                }
        result["overlaps"] = sweep
        requests = facts.requests(BurstShape(WANTED_OVERLAP), arguments.concurrent_requests)
        result["concurrent"] = {
            str(one): rank_over_ours(benchmark.run(requests, (RANK, OURS), one), 0)
            for one in arguments.concurrencies
        }
    return result | {
        "skipped": benchmark.skipped,
        "block_size": BLOCK_TOKENS,
        "requests": arguments.requests,
        "took_s": round(time.monotonic() - started, 1),
    }


def main() -> None:
    parser = options(__doc__, "one overlap and fewer requests, 4 minutes")
    option = parser.add_argument
    option("--overlaps", nargs="+", type=float, default=list(OVERLAPS))
    option("--concurrencies", nargs="*", type=int, default=list(CONCURRENCIES))
    option("--requests", type=int, default=200, help="of each trace")
    option("--answer-tokens", type=int, default=8)
    arguments = parser.parse_args()
    arguments.concurrent_requests = 100
    if arguments.quick:
        arguments.overlaps, arguments.concurrencies = [WANTED_OVERLAP], [4]
        arguments.requests, arguments.concurrent_requests = 20, 8
        arguments.answer_tokens = 4
    if WANTED_OVERLAP not in arguments.overlaps:
        parser.error(f"--overlaps needs {WANTED_OVERLAP}, which the main figure is of")
    print_figures(lambda folder: run(arguments, folder))


if __name__ == "__main__":
    main()
