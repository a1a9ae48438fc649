"""Measures what cache-aware reordering of waiting questions gains and costs, in a real engine.

Two gateways share an engine and a cache store that hold a part of the documents' KV: one composes
priorities with a window, one without. Turns alternate, with the same questions at the same times
(open loop). Questions ask for documents of skewed popularity. The documents after the first follow
from it most of the time, as results of a search do.

At ABOVE times the capacity (RAGCache section 7.4, Fig. 21: 1.2 to 2.1):

- ``without_over_with_mean``: mean time to the first token without reordering over that with it, and
  ``without_over_with_p99``, of all rounds.
- ``longest_wait_over_window_bound``: longest time to the first token with reordering over the
  longest one without it plus the window, of the round in which that is highest.
- ``longest_overtaking_over_window``: how much later than another question one was sent that got its
  first token before it, at most, over the window.
- ``computed_share``: prompt tokens that the engine computed, of all. Reordering lowers it, because
  questions use KV before it is evicted.
- ``preemptions``: requests that vLLM preempted.

``below_saturation_ratio`` is the ratio of means at BELOW times the capacity.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from bench.support.gateway_load.simulated_parts import HOST, start_gateway
from bench.support.gateway_load.stand_ins import FixedRetriever, serve_parts
from bench.support.program import options, print_figures, rounded, say
from harness.processes import Engine, free_port, running_cachestore, running_engine
from harness.tiny_model import make_tiny_model
from ragcache_gateway.prompts.tokenizer import load_tokenizer
from ragcache_wire.v1 import retriever_pb2 as pb

WITHOUT, WITH = "without", "with"
NUM_DOCUMENTS: Final = 200
SKEW: Final = 1.0
"""Exponent of the Zipf distribution of a question's first document."""

FOLLOWS: Final = 0.7
"""Probability that a further document is the one that follows from the first."""

DOCUMENTS: Final = 3
DOCUMENT_TOKENS: Final = 256
MAX_LENGTH: Final = 2048
ANSWER_TOKENS: Final = 4
ENGINE_BLOCKS: Final = 160
"""Blocks of 128 tokens in the engine: about 24 prompts."""

STORE_BYTES: Final = 64 << 20
"""Of each of the two tiers: about 32 documents of 2 MiB."""

ABOVE, BELOW = 2.0, 0.6
"""Questions per second over the capacity. At 1.3 times the queue of a short run is too short for an
order to matter."""

Trace = list[tuple[float, tuple[int, ...]]]
"""Seconds from the start at which each question is sent, and its documents, best rank first."""


def make_trace(seed: int, count: int, per_s: float) -> Trace:
    """Return questions with exponential gaps. Equal arguments give equal traces."""
    rng = random.Random(seed)
    weights = [1 / (rank + 1) ** SKEW for rank in range(NUM_DOCUMENTS)]
    trace, at_s = [], 0.0
    for _ in range(count):
        at_s += rng.expovariate(per_s)
        [first] = rng.choices(range(NUM_DOCUMENTS), weights)
        chosen = [first]
        while len(chosen) < DOCUMENTS:
            following = (7 * first + 13 * len(chosen)) % NUM_DOCUMENTS
            if rng.random() >= FOLLOWS or following in chosen:
                following = rng.choice([n for n in range(NUM_DOCUMENTS) if n not in chosen])
            chosen.append(following)
        trace.append((at_s, tuple(chosen)))
    return trace


class NumberedRetriever(FixedRetriever):
    """Returns the documents whose numbers the query begins with."""

    async def Search(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        numbers = [int(word) for word in request.query.split()[:DOCUMENTS]]
        hits = [
            pb.Hit(chunk=self._chunk_of(number, DOCUMENT_TOKENS), score=1 - rank / 100)
            for rank, number in enumerate(numbers)
        ]
        yield pb.SearchStage(hits=hits, final=True, progress=1)


@dataclass(frozen=True, slots=True)
class Asked:
    """A question and its answer; seconds are since the start of its turn."""

    sent_s: float
    first_token_s: float
    prompt_tokens: int
    computed_tokens: int

    @property
    def waited_s(self) -> float:
        return self.first_token_s - self.sent_s


@dataclass(slots=True)
class Turns:
    """Answers of one gateway, by round."""

    rounds: list[list[Asked]] = field(default_factory=list)
    preemptions: int = 0

    @property
    def asked(self) -> list[Asked]:
        return [one for answers in self.rounds for one in answers]

    @property
    def mean_s(self) -> float:
        return statistics.fmean(one.waited_s for one in self.asked)

    @property
    def p99_s(self) -> float:
        waits = sorted(one.waited_s for one in self.asked)
        return waits[int(0.99 * (len(waits) - 1))]

    @property
    def computed_share(self) -> float:
        computed = sum(one.computed_tokens for one in self.asked)
        return computed / sum(one.prompt_tokens for one in self.asked)


def longest_overtaking_s(answers: Sequence[Asked]) -> float:
    """Return how much later than another question one was sent whose first token came earlier."""
    longest_s, by_first_token = 0.0, sorted(answers, key=lambda one: one.first_token_s)
    last_sent_s = 0.0
    for one in by_first_token:
        last_sent_s = max(last_sent_s, one.sent_s)
        longest_s = max(longest_s, last_sent_s - one.sent_s)
    return longest_s


@dataclass(frozen=True, slots=True)
class Site:
    """Clients of both gateways and of the engine behind them."""

    gateways: dict[str, httpx.AsyncClient]
    engine: httpx.AsyncClient

    async def preemptions(self) -> int:
        lines = (await self.engine.get("/metrics")).text.splitlines()
        found = [line for line in lines if line.startswith("vllm:num_preemptions_total")]
        return round(sum(float(line.rpartition(" ")[2]) for line in found))

    async def turn(self, name: str, trace: Trace, turns: Turns) -> None:
        """Send the questions of a trace to a gateway, each at its time."""
        before = await self.preemptions()
        began_s = time.monotonic()

        async def ask(at_s: float, documents: Sequence[int], number: int) -> Asked:
            await asyncio.sleep(began_s + at_s - time.monotonic())
            question = f"{' '.join(map(str, documents))} is question {number}"
            return await _ask(self.gateways[name], question, began_s, at_s)

        answers = await asyncio.gather(*(ask(*one, i) for i, one in enumerate(trace)))
        turns.rounds.append(list(answers))
        turns.preemptions += await self.preemptions() - before


async def _ask(client: httpx.AsyncClient, question: str, began_s: float, at_s: float) -> Asked:
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ragcache": {"top_k": DOCUMENTS, "rewrite": "off"},
    }
    first_s, usage = None, None
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.status_code != httpx.codes.OK:
            raise RuntimeError(f"the gateway said {reply.status_code}: {await reply.aread()!r}")
        async for line in reply.aiter_lines():
            # vLLM sends nothing before the first token. The text of a random one may be empty.
            if first_s is None and line.startswith("data: "):
                first_s = time.monotonic() - began_s
            if '"usage":{' in line:
                usage = json.loads(line.removeprefix("data: "))["usage"]
    if first_s is None or usage is None:
        raise RuntimeError("an answer had no token or no usage")
    computed = usage["ragcache"]["computed_tokens"]
    return Asked(at_s, first_s, usage["prompt_tokens"], computed)


@contextlib.asynccontextmanager
async def running_site(folder: Path, window_ms: int) -> AsyncIterator[Site]:
    """Run both gateways, with all that is behind them."""
    # A size at which computing a prompt takes most of the time.
    model = make_tiny_model(
        folder / "model", layers=8, hidden=512, heads=8, kv_heads=4, max_length=MAX_LENGTH
    )
    port = free_port()
    retriever = await serve_parts(port, NumberedRetriever(load_tokenizer(model)))  # type: ignore[abstract]  # other calls are not served
    with _running_engine(folder, model) as (engine, store):
        say("the engine is up")
        async with contextlib.AsyncExitStack() as stack:
            clients = {}
            records = (engine.records or "").rpartition(":")[2]
            for name, window in ((WITHOUT, 0), (WITH, window_ms)):
                clients[name] = await start_gateway(
                    stack,
                    folder,
                    name,
                    RAGCACHE_REORDERING_WINDOW_MS=str(window),
                    RAGCACHE_RETRIEVER=f"{HOST}:{port}",
                    RAGCACHE_ENGINES=f"{engine.url};records={records}",
                    RAGCACHE_CACHESTORE=store,
                    RAGCACHE_MODEL=str(model),
                    RAGCACHE_MAX_MODEL_LEN=str(MAX_LENGTH),
                    RAGCACHE_MAX_QUESTIONS="1024",
                )
            opened = [
                await stack.enter_async_context(
                    httpx.AsyncClient(base_url=url, trust_env=False, timeout=600, limits=_NO_LIMITS)
                )
                for url in (*clients.values(), engine.url)
            ]
            yield Site(dict(zip(clients, opened, strict=False)), opened[-1])
    await retriever.stop()


_NO_LIMITS: Final = httpx.Limits(max_connections=None)


@contextlib.contextmanager
def _running_engine(folder: Path, model: Path) -> Iterator[tuple[Engine, str]]:
    with (
        running_cachestore(
            folder / "store", memory_bytes=STORE_BYTES, disk_bytes=STORE_BYTES
        ) as store,
        running_engine(
            *(folder / "engine", model, store.address),
            *("--num-gpu-blocks-override", str(ENGINE_BLOCKS)),
            max_length=MAX_LENGTH,
            settings={"RAGCACHE_LOAD_ALWAYS": "off"},
        ) as engine,
    ):
        yield engine, store.address


async def capacity(site: Site, count: int) -> float:
    """Return the questions per second that are answered at saturation, with caches in use."""
    await site.turn(WITHOUT, make_trace(1, count, 1e6), Turns())
    began_s = time.monotonic()
    await site.turn(WITHOUT, make_trace(2, count, 1e6), Turns())
    return count / (time.monotonic() - began_s)


async def measure_load(
    site: Site, per_s: float, count: int, rounds: int, seed: int
) -> dict[str, Turns]:
    """Ask the same questions of both gateways, in turns: with, without, without, with."""
    found = {WITH: Turns(), WITHOUT: Turns()}
    for number in range(rounds):
        trace = make_trace(seed + number, count, per_s)
        for name in (WITHOUT, WITH) if number % 2 else (WITH, WITHOUT):
            await site.turn(name, trace, found[name])
            mean_s = statistics.fmean(one.waited_s for one in found[name].rounds[-1])
            say(f"{per_s:.2f} questions/s {name}: mean {mean_s:.2f} s to the first token")
    return found


async def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    async with running_site(folder, given.window_ms) as site:
        per_s = await capacity(site, given.questions)
        say(f"the capacity is {per_s:.2f} questions/s")
        above = await measure_load(site, ABOVE * per_s, given.questions, given.rounds, 10)
        below = await measure_load(site, BELOW * per_s, given.questions_below, given.rounds, 100)
    window_s = given.window_ms / 1e3
    bounds = [
        max(a.waited_s for a in ours) / (max(a.waited_s for a in theirs) + window_s)
        for ours, theirs in zip(above[WITH].rounds, above[WITHOUT].rounds, strict=True)
    ]
    overtaking_s = max(map(longest_overtaking_s, above[WITH].rounds))
    return {
        "without_over_with_mean": round(above[WITHOUT].mean_s / above[WITH].mean_s, 3),
        "without_over_with_p99": round(above[WITHOUT].p99_s / above[WITH].p99_s, 3),
        "longest_wait_over_window_bound": round(max(bounds), 3),
        "longest_overtaking_over_window": round(overtaking_s / window_s, 3),
        "below_saturation_ratio": round(below[WITHOUT].mean_s / below[WITH].mean_s, 3),
        "below_saturation_p99_ratio": round(below[WITHOUT].p99_s / below[WITH].p99_s, 3),
        "mean_s": rounded({name: turns.mean_s for name, turns in above.items()}, 3),
        "mean_below_s": rounded({name: turns.mean_s for name, turns in below.items()}, 3),
        "computed_share": rounded({name: one.computed_share for name, one in above.items()}, 3),
        "preemptions": {name: turns.preemptions for name, turns in above.items()},
        "capacity_per_s": round(per_s, 3),
        "window_ms": given.window_ms,
        "questions": given.questions,
        "rounds": given.rounds,
    }


def main() -> None:
    parser = options(__doc__, "under four minutes on two cores")
    parser.add_argument("--window-ms", type=int, default=10_000)
    given = parser.parse_args()
    given.questions, given.questions_below, given.rounds = (
        (80, 40, 2) if given.quick else (150, 100, 6)
    )
    print_figures(lambda folder: asyncio.run(measure(given, folder)))


if __name__ == "__main__":
    main()
