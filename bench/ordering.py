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
questions (``bench/support/ordering/bursts.py``). ``--sequences`` adds recorded traces from the
folder ``--data``: RAGPulse, with drawn tokens, and the passages of PSI-RAG.

``p50_rank_over_ours`` is the quotient of the median times to first token at an overlap of 0.6, with
the interval of a bootstrap over requests. ``agreement`` is the share of greedy answers that equal
those of ``no_cache``. ``saved`` is 1 - T/T_no_cache of each request, as in Table 7.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a program

import httpx
import numpy as np

from bench.contestants.contestant import Absent
from bench.support.number_type import fast_number_type
from bench.support.ordering.bursts import BurstShape, bursts, mean_jaccard
from bench.support.ordering.contestants import (
    ALL,
    NO_CACHE,
    OURS,
    RANK,
    Ordering,
    make_ordering,
    reordered,
)
from bench.support.ordering.facts import Facts
from bench.support.sequences.bootstrap import interval, quantile_ratio
from bench.support.sequences.prompts import SequenceRequest, Vocabulary
from bench.support.sequences.recorded import RECORDED, load_recorded
from bench.support.sequences.turns import turns
from harness.completion import complete
from harness.processes import launch_engine, wait_for_engine
from harness.vllm_plugin import WAITS_ASLEEP, plugin_settings
from ragcache_cli.models.cache import fetch_model
from ragcache_kv.model_folder import load_model_folder
from ragcache_kv.values.layout import value_bytes

DATA_VARIABLE = "RAGCACHE_BENCH_DATA"
MODEL = "smollm2"
OVERLAPS = (0.0, 0.2, 0.4, 0.6, 0.8)
WANTED_OVERLAP = 0.6
CONCURRENCIES = (1, 2, 4, 8)
MAX_LENGTH = 4096
_CPU_BLOCK_TOKENS = 128  # vLLM's default on a CPU, which the operator keeps


@dataclass(frozen=True, slots=True)
class Asked:
    """One measured request. Times are in seconds."""

    order_s: float
    build_s: float
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    answer: tuple[int, ...]


@dataclass(slots=True)
class Contestant:
    """One way of ordering, and what it was measured at."""

    name: str
    ordering: Ordering
    salt: str = field(default_factory=lambda: uuid.uuid4().hex)
    asked: list[Asked] = field(default_factory=list)


class OrderingBenchmark:
    """Asks traces of requests in one engine."""

    def __init__(self, url: str, arguments: argparse.Namespace, cache_tokens: int) -> None:
        self._url = url
        self._arguments = arguments
        self._cache_tokens = cache_tokens
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
                ordering = make_ordering(name, capacity, self._arguments.block_size)
            except Absent as absent:
                self.skipped[name] = str(absent)
            else:
                contestants[name] = Contestant(name, ordering)
        blocks = turns(tuple(contestants), range(len(requests)), self._arguments.block)
        for number, block in enumerate(blocks):
            for turn in block:
                contestant = contestants[turn.contestant]
                asked = [requests[index] for index in turn.requests]
                for first in range(0, len(asked), concurrency):
                    self._ask_together(contestant, asked[first : first + concurrency])
                times_ms = [1e3 * one.ttft_s for one in contestant.asked[-len(asked) :]]
                median_ms = statistics.median(times_ms)
                _log(f"block {number}, {turn.contestant}: median {median_ms:.0f} ms")
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

        def ask(token_ids: list[int]) -> tuple[float, int, tuple[int, ...]]:
            salt = uuid.uuid4().hex if contestant.name == NO_CACHE else contestant.salt
            answer = complete(
                self._url,
                token_ids,
                max_tokens=self._arguments.answer_tokens,
                cache_salt=salt,
                usage=True,
                client=self._client,
            )
            return answer.ttft_s, answer.cached_tokens, answer.token_ids

        with ThreadPoolExecutor(len(prepared)) as threads:
            answers = list(threads.map(ask, [token_ids for _, token_ids, _, _ in prepared]))
        for (ordered, token_ids, order_s, build_s), answer in zip(prepared, answers, strict=True):
            ttft_s, cached, generated = answer
            contestant.ordering.computed(ordered, cached, sent_s)
            contestant.asked.append(
                Asked(order_s, build_s, ttft_s, len(token_ids), cached, generated)
            )


def figures(contestants: Mapping[str, Contestant], warm_up: int) -> dict[str, dict[str, object]]:
    """Return the figures of Tables 1, 3 and 7, and the agreement of answers, by contestant."""
    found = {}
    baseline = contestants[NO_CACHE].asked[warm_up:] if NO_CACHE in contestants else []
    for name, contestant in contestants.items():
        asked = contestant.asked[warm_up:]
        ttft_ms = np.array([1e3 * one.ttft_s for one in asked])
        row: dict[str, object] = {
            "p50_ms": round(float(np.median(ttft_ms)), 1),
            "p95_ms": round(float(np.quantile(ttft_ms, 0.95)), 1),
            "mean_ms": round(float(ttft_ms.mean()), 1),
            "cached_share": round(
                sum(one.cached_tokens for one in asked) / sum(one.prompt_tokens for one in asked), 4
            ),
            "order_us": round(1e6 * statistics.median(one.order_s for one in asked), 1),
            "build_us": round(1e6 * statistics.median(one.build_s for one in asked), 1),
        }
        if baseline and name != NO_CACHE:
            saved = [1 - a.ttft_s / b.ttft_s for a, b in zip(asked, baseline, strict=True)]
            row["saved_p50"] = round(float(np.median(saved)), 4)
            row["saved_mean"] = round(float(np.mean(saved)), 4)
            row["saved_p95"] = round(float(np.quantile(saved, 0.95)), 4)
            row["benefit_share"] = round(sum(one > 0.05 for one in saved) / len(saved), 4)
            equal = [a.answer == b.answer for a, b in zip(asked, baseline, strict=True)]
            row["agreement"] = round(sum(equal) / len(equal), 4)
        found[name] = row
    return found


def rank_over_ours(contestants: Mapping[str, Contestant], warm_up: int) -> dict[str, object]:
    """Return the quotient of the medians with its interval."""
    rank, ours = (
        np.array([one.ttft_s for one in contestants[name].asked[warm_up:]]) for name in (RANK, OURS)
    )
    low, high = interval(quantile_ratio(rank, ours, 0.5), len(rank))
    ratio = float(np.median(rank) / np.median(ours))
    return {"p50": round(ratio, 3), "interval": [round(low, 3), round(high, 3)]}


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Measure and return the figures of the JSON line."""
    started = time.monotonic()
    model = fetch_model(MODEL)
    space = load_model_folder(str(model)).space(fast_number_type())
    cache_tokens = (arguments.kv_cache_gib << 30) // value_bytes(space, 1)
    settings = plugin_settings(folder / "plugin", WAITS_ASLEEP) | {
        "VLLM_CPU_KVCACHE_SPACE": str(arguments.kv_cache_gib)
    }
    engine = launch_engine(
        folder,
        model,
        None,
        *("--block-size", str(arguments.block_size)),
        max_length=MAX_LENGTH,
        settings=settings,
        number_type=fast_number_type(),
    )
    with contextlib.ExitStack() as stack:
        stack.callback(engine.service.stop)
        wait_for_engine(engine)
        _log(f"the engine is up after {time.monotonic() - started:.0f} s")
        benchmark = OrderingBenchmark(engine.url, arguments, cache_tokens)
        facts = Facts(model, arguments.seed)
        result: dict[str, object] = {}
        sweep: dict[str, object] = {}
        for overlap in arguments.overlaps:
            requests = facts.requests(BurstShape(overlap), arguments.requests)
            names = arguments.contestants if overlap == WANTED_OVERLAP else (NO_CACHE, RANK, OURS)
            contestants = benchmark.run(requests, names)
            quotient = rank_over_ours(contestants, arguments.warm_up)
            rows = figures(contestants, arguments.warm_up)
            jaccard = mean_jaccard(bursts(BurstShape(overlap), arguments.requests, arguments.seed))
            sweep[str(overlap)] = {
                "jaccard": round(jaccard, 3),
                "p50_rank_over_ours": quotient,
                "contestants": rows,
            }
            _log(f"overlap {overlap}: {json.dumps(sweep[str(overlap)])}")
            if overlap == WANTED_OVERLAP:
                result["p50_rank_over_ours"] = quotient["p50"]
                result["p50_rank_over_ours_interval"] = quotient["interval"]
                result["agreement"] = {
                    name: row["agreement"] for name, row in rows.items() if "agreement" in row
                }
        result["overlaps"] = sweep
        result["concurrent"] = {
            str(concurrency): rank_over_ours(
                benchmark.run(
                    facts.requests(BurstShape(WANTED_OVERLAP), arguments.concurrent_requests),
                    (RANK, OURS),
                    concurrency,
                ),
                0,
            )
            for concurrency in arguments.concurrencies
        }
        result["sequences"] = {
            name: _sequence(benchmark, name, model, arguments) for name in arguments.sequences
        }
    return result | {
        "skipped": benchmark.skipped,
        "block_size": arguments.block_size,
        "requests": arguments.requests,
        "took_s": round(time.monotonic() - started, 1),
    }


def recorded_requests(
    name: str, model: Path, arguments: argparse.Namespace
) -> list[SequenceRequest]:
    """Return the requests of a recorded sequence that the model takes, and that have passages."""
    max_tokens = MAX_LENGTH - arguments.answer_tokens
    size = int(load_model_folder(str(model)).config["vocab_size"])
    recorded = load_recorded(
        name,
        Path(arguments.data),
        model,
        Vocabulary(size, arguments.seed),
        scale=arguments.scale,
        max_tokens=max_tokens,
    )
    requests = recorded.requests(arguments.first, arguments.requests)
    return [one for one in requests if one.passages and one.num_tokens <= max_tokens]


def _sequence(
    benchmark: OrderingBenchmark, name: str, model: Path, arguments: argparse.Namespace
) -> dict[str, object]:
    requests = recorded_requests(name, model, arguments)
    contestants = benchmark.run(requests, (NO_CACHE, RANK, OURS))
    return {
        "requests": len(requests),
        "p50_rank_over_ours": rank_over_ours(contestants, arguments.warm_up),
        "contestants": figures(contestants, arguments.warm_up),
    }


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    option = parser.add_argument
    option("--quick", action="store_true", help="one overlap and fewer requests, 4 minutes")
    option("--overlaps", nargs="+", type=float, default=list(OVERLAPS))
    option("--contestants", nargs="+", choices=ALL, default=list(ALL))
    option("--concurrencies", nargs="*", type=int, default=list(CONCURRENCIES))
    option("--sequences", nargs="*", choices=RECORDED, default=[])
    option("--data", default=os.environ.get(DATA_VARIABLE), help=f"or {DATA_VARIABLE}")
    option("--scale", type=float, default=1.0, help="factor of RAGPulse's lengths")
    option("--first", type=int, default=0, help="first request of a recorded trace")
    option("--requests", type=int, default=200, help="of each trace")
    option("--concurrent-requests", type=int, default=100)
    option("--warm-up", type=int, default=5, help="first requests that do not count")
    option("--block", type=int, default=10, help="requests of a turn")
    option("--block-size", type=int, default=_CPU_BLOCK_TOKENS, help="of the prefix cache")
    option("--answer-tokens", type=int, default=8)
    option("--kv-cache-gib", type=int, default=4)
    option("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.overlaps, arguments.concurrencies = [WANTED_OVERLAP], [4]
        arguments.requests, arguments.concurrent_requests = 40, 20
        arguments.answer_tokens = 4
    if arguments.sequences and arguments.data is None:
        parser.error(f"--sequences needs --data or {DATA_VARIABLE}")
    if WANTED_OVERLAP not in arguments.overlaps:
        parser.error(f"--overlaps needs {WANTED_OVERLAP}, which the main figure is of")
    if {NO_CACHE, RANK, OURS} - set(arguments.contestants):
        parser.error("--contestants needs no_cache, rank and ours")
    return arguments


def main() -> None:
    arguments = parse()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(arguments, Path(folder))))


if __name__ == "__main__":
    main()
