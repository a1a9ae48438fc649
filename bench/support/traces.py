"""Sequences of requests for cache policies, and their replay as in a tier of the store.

They are from public data, or generated. A request is a list of accesses in prompt order. Times are
the data's own (Mooncake), else Poisson arrivals from a seeded generator.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ragcache_core.eviction import EvictionCandidate, EvictionPolicy
from ragcache_core.eviction.admission import Admission
from ragcache_core.store_api import VariantUse
from ragcache_core.tiering.waiting_holds import HELD_SHARE

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
MOONCAKE = "mooncake/conversation_trace.jsonl.gz"
RETRIEVED = {
    "multihoprag": "psirag_retrieved/multihoprag_summary.json",
    "2wiki": "psirag_retrieved/2wikimultihopqa_summary.json",
}
BLOCK_TOKENS = 512  # of a Mooncake hash id
TOKENS_PER_WORD = 1.3  # the passages are texts; no tokenizer is needed to compare policies
REQUESTS_PER_S = 0.8  # RAGCache's rate (§7.3), where the data has no times
BYTES_PER_TOKEN = 131_072  # of an 8B model with 8 KV heads in bf16


_WEIGHTS = 7e9
_LAYERS, _WIDTH = 32, 4096
_OPERATIONS_PER_S = 60e12


def computed_prefill_s(cached: int, uncached: int) -> float:
    """Return T(cached, uncached) of a 7B model at 60 TFLOP/s, from tokens.

    It is computed and not measured, so that replaying a trace needs no engine: 2 operations per
    weight and token, and 4 per layer, dimension and pair in attention. Only ratios are reported.

    Source: RAGCache section 5.1.
    """
    pairs = uncached * cached + uncached * uncached / 2
    return (2 * _WEIGHTS * uncached + 4 * _LAYERS * _WIDTH * pairs) / _OPERATIONS_PER_S


@dataclass(frozen=True, slots=True)
class Access:
    """One chunk of a request.

    key: of the chunk in ``blend``, of the chunk after its prefix in ``exact``. parent: key of the
    access before it (``exact`` only). cost_s: computing it after everything before it. chunk:
    number of the chunk.
    """

    key: int
    parent: int | None
    num_tokens: int
    cost_s: float
    chunk: int = 0

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * BYTES_PER_TOKEN


@dataclass(frozen=True, slots=True)
class Request:
    """accesses: distinct keys, in prompt order."""

    time_s: float
    accesses: tuple[Access, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """exact: entries are nodes of a knowledge tree, a hit needs all parents."""

    name: str
    exact: bool
    requests: tuple[Request, ...]

    def footprint_bytes(self) -> int:
        """Bytes of everything asked for, once."""
        sizes = {a.key: a.num_bytes for request in self.requests for a in request.accesses}
        return sum(sizes.values())

    def second_half(self) -> Trace:
        """Return the requests to report. Settings were tuned on the others."""
        return Trace(self.name, self.exact, self.requests[len(self.requests) // 2 :])


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A request as the data has it: (name of the chunk, tokens) in prompt order."""

    time_s: float
    chunks: tuple[tuple[str, int], ...]


def load_traces(data: Path, quick: bool) -> list[Trace]:
    """Every sequence in both modes. Without data, or if quick, mostly a generated one."""
    prompts: dict[str, list[_Prompt]] = {}
    for name, path in RETRIEVED.items():
        if (data / path).exists():
            prompts[name] = _retrieved(data / path)
    if (data / MOONCAKE).exists() and not quick:
        prompts["mooncake"] = list(_mooncake(data / MOONCAKE))
    if quick or not prompts:
        prompts["generated"] = _generated(random.Random(4), num_requests=600)
    return [
        _trace(name, exact, requests)
        for name, requests in prompts.items()
        for exact in (True, False)
    ]


def _trace(name: str, exact: bool, prompts: Iterable[_Prompt]) -> Trace:
    numbers: dict[object, int] = {}
    chunks: dict[str, int] = {}
    requests = []
    for prompt in prompts:
        accesses: dict[int, Access] = {}
        position = 0
        parent: int | None = None
        for chunk, num_tokens in prompt.chunks:
            name_of = (parent, chunk) if exact else chunk
            key = numbers.setdefault(name_of, len(numbers))
            if key not in accesses:
                cost_s = computed_prefill_s(position, num_tokens)
                number = chunks.setdefault(chunk, len(chunks))
                accesses[key] = Access(key, parent, num_tokens, cost_s, number)
            position += num_tokens
            parent = key if exact else None
        requests.append(Request(prompt.time_s, tuple(accesses.values())))
    return Trace(name, exact, tuple(requests))


def _mooncake(path: Path) -> Iterable[_Prompt]:
    """Mooncake's conversations: blocks of 512 tokens named by their prefix."""
    with gzip.open(path, "rt") as lines:
        for line in lines:
            record = json.loads(line)
            chunks = tuple((str(block), BLOCK_TOKENS) for block in record["hash_ids"])
            yield _Prompt(record["timestamp"] / 1000.0, chunks)


def _retrieved(path: Path) -> list[_Prompt]:
    """Passages that a retriever returned for real questions, in rank order."""
    arrivals = _poisson(random.Random(4))
    return [
        _Prompt(
            next(arrivals),
            tuple(
                (
                    hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
                    max(1, round(len(text.split()) * TOKENS_PER_WORD)),
                )
                for text in passages
            ),
        )
        for passages in json.loads(path.read_text())["retrieved_docs"]
    ]


def _generated(rng: random.Random, num_requests: int) -> list[_Prompt]:
    """Five chunks a request by Zipf's law over 1,500, whose popular end drifts.

    The more popular chunk of a request comes first in two prompts of three, so that prefixes recur.
    """
    num_chunks = 1500
    sizes = [rng.randrange(60, 600) for _ in range(num_chunks)]
    weights = [1.0 / (rank + 1) for rank in range(num_chunks)]
    order = list(range(num_chunks))
    arrivals = _poisson(rng)
    prompts = []
    for number in range(num_requests):
        if number % 50 == 49:  # something new becomes popular
            order.insert(rng.randrange(20), order.pop(rng.randrange(num_chunks)))
        ranks = list(dict.fromkeys(rng.choices(range(num_chunks), weights, k=5)))
        if rng.random() < 2 / 3:
            ranks.sort()
        chunks = tuple((str(order[rank]), sizes[order[rank]]) for rank in ranks)
        prompts.append(_Prompt(next(arrivals), chunks))
    return prompts


def _poisson(rng: random.Random) -> Iterator[float]:
    now = 0.0
    while True:
        now += rng.expovariate(REQUESTS_PER_S)
        yield now


CONTEXT_IMPACT = 0.7
"""Cache-Craft's CCI, in [0.5, 1): the data has no attention, so all chunks get the same."""


@dataclass(slots=True)
class Tally:
    """The savings of a replay; seconds are computed ones."""

    tokens: int = 0
    hit_tokens: int = 0
    cost_s: float = 0.0
    saved_s: float = 0.0
    written_bytes: int = 0

    @property
    def by_compute(self) -> float:
        return self.saved_s / self.cost_s


class Replay:
    """One tier of ``capacity_bytes``.

    Args:
        lookahead: Number of later requests that wait in a queue. What they need is admitted and
            not evicted, up to the share of the tier that a store holds for waiting requests.
    """

    def __init__(
        self,
        policy: EvictionPolicy[int],
        admission: Admission[int],
        capacity_bytes: int,
        lookahead: int = 0,
    ) -> None:
        self._policy = policy
        self._admission = admission
        self._lookahead = lookahead
        self._max_held_bytes = int(capacity_bytes * HELD_SHARE)
        self._held: set[int] = set()
        self._free_bytes = capacity_bytes
        self._sizes: dict[int, int] = {}
        self._prefixes: dict[int, frozenset[int]] = {}  # the chunks before it at its computation

    def run(self, trace: Trace) -> Tally:
        """Replay every request: count and touch stored chunks, compute and offer the others."""
        tally = Tally()
        for number, request in enumerate(trace.requests):
            asked = {access.key for access in request.accesses}
            later = trace.requests[number + 1 : number + 1 + self._lookahead]
            self._held = self._needed_by(later, asked)
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

    def _needed_by(self, waiting: Sequence[Request], asked: set[int]) -> set[int]:
        """Return which keys waiting requests need, the first ones if not all may be held.

        Only those are held that are stored or computed now.
        """
        sizes: dict[int, int] = {}
        held_bytes = 0
        for request in waiting:
            for access in request.accesses:
                if access.key not in sizes and (access.key in asked or access.key in self._policy):
                    held_bytes += access.num_bytes
                    if held_bytes > self._max_held_bytes:
                        return set(sizes)
                    sizes[access.key] = access.num_bytes
        return set(sizes)

    def _offer(
        self, key: int, candidate: EvictionCandidate[int], now: float, asked: set[int]
    ) -> bool:
        """Insert an entry if it is admitted and fits; chunks of the request are leased."""

        def may(victim: int) -> bool:
            return victim not in asked and victim not in self._held

        worth = None
        if self._free_bytes < candidate.num_bytes:
            cheapest = self._policy.advance_to_victim(may)
            if cheapest is None:
                return False
            worth = self._policy.priority(cheapest, now)
        is_admitted = self._admission.admits(key, candidate, now, worth)
        if not is_admitted and key not in self._held:
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
