"""Measures what computing a prompt while its search runs saves and costs, in a real engine.

Two gateways share an engine, a cache store and a retriever: one with ``speculation: auto``, one
with ``off``. Their turns alternate. All prompts are new to the engine.

First the retriever is the real process, and a cross-encoder of the size of ms-marco-MiniLM-L6
reranks on one core, so that early stages come long before the final one. Its head is random. A
word in a question lets it keep the order of the search (``reranking_retriever``).

- ``ttft_gain_real_stage``: median time to the first token with ``off`` over that with ``auto``, if
  the order is kept as often as a real reranker keeps it at most (REAL_KEPT_SHARE).
  ``real_stage_by_kept_share`` has the same for other shares.
- ``early_equals_final_share``: share of questions whose hits the reranker left in their order.
- ``slow_stage_ms``: median time from the last early stage to the final one.

Then the retriever repeats recorded searches of a real index, with the probabilities that it has
learned. A search that scans all vectors takes as long as the prefill of a prompt, and one that
scans a share of them takes this share of the time. A stage comes after the share of the time that
it has scanned:

* ``ttft_gain``: median time to the first token with ``off`` over that with ``auto``, by vector
  search ratio, one question at a time (RAGCache Fig. 22). ``ttft_gain_full_search`` is that of
  searches of all vectors.
* ``final_progress``: mean share of a search after which its hits are final.
* ``wasted_prefill_share``: tokens of guesses that the prompts of their questions do not begin with,
  by the gateway's count, over the tokens of all these prompts.
* ``second_request_share``: time to the first token of a prompt that a request of one token has
  computed, over that of a new prompt. A guess is such a request. A guess that were a whole answer
  would save at most this share of a prefill.
* ``throughput_ratio_at_saturation``: answers per second with ``auto`` over those with ``off``, with
  more questions at once than the engine can answer in time.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import contextlib
import json
import statistics
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.support.gateway_load.simulated_parts import HOST, start_gateway
from bench.support.gateway_load.stand_ins import FixedRetriever, serve_parts
from bench.support.number_type import fast_number_type
from bench.support.program import options, print_figures, say
from bench.support.recorded_searches import final_progress, record_searches
from bench.support.retrieval.retriever_process import RunningRetriever
from bench.support.staged.reranked import add_collection, reranking_retriever
from harness.processes import Engine, free_port, running_cachestore, running_engine
from ragcache_cli.models.cache import fetch_model
from ragcache_gateway.prompts.tokenizer import ChatTokenizer, load_tokenizer
from ragcache_retriever.search.vector_index import IndexStage
from ragcache_wire.v1 import retriever_pb2 as pb

OFF, AUTO = "off", "auto"
SHARES = (0.125, 0.25, 0.5, 1.0)
FULL = 1.0
TOP_K = 10
PROMPT_TOKENS = 640
"""Of all chunks of a prompt."""

REAL_KEPT_SHARE = 0.2
"""Share of questions whose order a real reranker keeps at most: ``same_order_share_dense`` of four
hits, by ``bench.retrieval_quality --quick``."""

KEPT_SHARES, QUICK_KEPT_SHARES = (REAL_KEPT_SHARE, 0.5, 1.0), (REAL_KEPT_SHARE, 1.0)

CLIENTS = 6
"""Questions at once at saturation."""

ANSWER_TOKENS = 4
_RUNNING = "vllm:num_requests_running"
_WORDS = """
account answer archive budget build cable change client cloud copy cost data date device disk engine
error event field file graph group host image index input layer limit list log market
""".split()  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class StagedQuestion:
    """What a question's text says of its search.

    Attributes:
        share: Vector search ratio.
        number: Number of the recorded search.
        duration_s: Time of the whole search.
        name: Makes the tokens of the question's chunks unique.
    """

    share: float
    number: int
    duration_s: float
    name: str = field(default_factory=lambda: uuid.uuid4().hex[:8])


class StagedRetriever(FixedRetriever):
    """Repeats the stages of recorded searches.

    A stage comes when the share of the duration has passed that it had scanned, as in a search
    whose time is that of comparing vectors.

    Args:
        recorded: Stages of searches, by vector search ratio.
    """

    def __init__(
        self, recorded: dict[float, list[Sequence[IndexStage]]], tokenizer: ChatTokenizer
    ) -> None:
        super().__init__(tokenizer)
        self._recorded = recorded
        self._words = list({tokenizer.encode_chunk(word)[0]: None for word in _WORDS})
        self._separator = list(tokenizer.encode_chunk("a")[1:])

    async def Search(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        question = StagedQuestion(**json.loads(request.query))
        loop = asyncio.get_running_loop()
        began = loop.time()
        for stage in self._recorded[question.share][question.number]:
            await asyncio.sleep(began + stage.progress * question.duration_s - loop.time())
            yield pb.SearchStage(
                hits=[self._hit(question.name, row) for row in stage.rows],
                final=stage.final,
                progress=stage.progress,
                search_us=round(1e6 * stage.progress * question.duration_s),
                final_probability=stage.final_probability,
            )

    def _hit(self, name: str, row: int) -> pb.Hit:
        text = f"{name} {row}"
        digits = int.from_bytes(text.encode(), "big")
        words = []
        while digits:
            digits, word = divmod(digits, len(self._words))
            words.append(self._words[word])
        length = PROMPT_TOKENS // TOP_K - len(self._separator)
        ids = (words * (length // len(words) + 1))[:length] + self._separator
        return pb.Hit(
            chunk=pb.Chunk(
                id=f"{text}#0",
                document_id=text,
                text=text,
                content_hash=text,
                token_ids=array.array("I", ids).tobytes(),
                tokenizer_identity=self._tokenizer.identity,
            ),
            score=1.0,
        )


@dataclass(slots=True)
class Contestant:
    """A gateway, and what was measured of it. ``ttft_s`` is by vector search ratio."""

    client: httpx.AsyncClient
    ttft_s: dict[float, list[float]] = field(default_factory=dict)
    answers: int = 0
    busy_s: float = 0.0


@dataclass(slots=True)
class Site:
    """The gateways and the engine behind them."""

    contestants: dict[str, Contestant]
    engine: httpx.AsyncClient
    prefill_s: float = 0.0

    async def counters(self) -> dict[str, float]:
        """Return vLLM's counters and gauges as of its last step."""
        lines = (await self.engine.get("/metrics")).text.splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name.split("{")[0]: float(value) for name, value in pairs}

    async def wait_until_idle(self) -> None:
        """Wait until the engine computes no more."""
        while (await self.counters())[_RUNNING]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Behind:
    """What the gateways have behind them. ``store``: address of the cache store."""

    model: Path
    engine: Engine
    store: str


@contextlib.asynccontextmanager
async def running_site(folder: Path, behind: Behind, retriever: str) -> AsyncIterator[Site]:
    """Run both gateways.

    Args:
        folder: Has their logs.
        retriever: Its address.
    """
    engine = behind.engine
    async with contextlib.AsyncExitStack() as stack:
        records = "" if engine.records is None else engine.records.rpartition(":")[2]
        clients = {}
        for name in (OFF, AUTO):
            clients[name] = await start_gateway(
                stack,
                folder,
                name,
                RAGCACHE_SPECULATION=name,
                RAGCACHE_RETRIEVER=retriever,
                RAGCACHE_ENGINES=f"{engine.url};records={records}",
                RAGCACHE_CACHESTORE=behind.store,
                RAGCACHE_MODEL=str(behind.model),
                RAGCACHE_MODEL_DTYPE=fast_number_type(),
                RAGCACHE_MAX_MODEL_LEN="4096",
            )
        off, auto, server = [
            await stack.enter_async_context(
                httpx.AsyncClient(base_url=url, trust_env=False, timeout=600)
            )
            for url in (*clients.values(), engine.url)
        ]
        yield Site({OFF: Contestant(off), AUTO: Contestant(auto)}, server)


async def ask(contestant: Contestant, question: StagedQuestion) -> float:
    """Ask one question of the staged retriever."""
    return await _first_token_s(contestant, json.dumps(asdict(question)), top_k=TOP_K)


async def _first_token_s(contestant: Contestant, question: str, **search: Any) -> float:
    """Return the seconds to the first token as a client sees it."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "ragcache": {"reuse": "exact", **search},
    }
    began = time.monotonic()
    first_s = None
    async with contestant.client.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.status_code != httpx.codes.OK:
            raise RuntimeError(f"the gateway said {reply.status_code}: {await reply.aread()!r}")
        async for line in reply.aiter_lines():
            if first_s is None and '"content":"' in line and '"content":""' not in line:
                first_s = time.monotonic() - began
    if first_s is None:
        raise RuntimeError("an answer had no token")
    return first_s


async def measure_prefill(site: Site, count: int) -> float:
    """Set the time of a prefill, and return the share of it that a second request takes."""
    contestant = site.contestants[OFF]
    await ask(contestant, StagedQuestion(FULL, 0, 0.0))  # warms up
    first_s, second_s = [], []
    for number in range(count):
        question = StagedQuestion(FULL, number, 0.0)
        first_s.append(await ask(contestant, question))
        second_s.append(await ask(contestant, question))
    site.prefill_s = statistics.median(first_s)
    return statistics.median(second_s) / site.prefill_s


async def measure_ttft(site: Site, count: int) -> None:
    """Ask questions one at a time, in turns."""
    for number in range(count):
        for share in SHARES:
            names = (OFF, AUTO) if number % 2 else (AUTO, OFF)
            for name in names:
                contestant = site.contestants[name]
                await site.wait_until_idle()
                question = StagedQuestion(share, number, share * site.prefill_s)
                ttft_s = await ask(contestant, question)
                contestant.ttft_s.setdefault(share, []).append(ttft_s)
        say(f"{number + 1} of {count} questions of each share")


async def measure_throughput(site: Site, options: argparse.Namespace) -> None:
    """Ask many questions at once, in turns: off, auto, auto, off."""
    for name in (OFF, AUTO, AUTO, OFF) * options.rounds:
        await _saturate(site, name, options)


async def _saturate(site: Site, name: str, options: argparse.Namespace) -> None:
    contestant = site.contestants[name]
    left = iter(range(options.answers))

    async def client() -> None:
        for number in left:
            await ask(contestant, StagedQuestion(FULL, number % options.recorded, site.prefill_s))

    await site.wait_until_idle()
    began = time.monotonic()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    contestant.busy_s += time.monotonic() - began
    contestant.answers += options.answers
    say(f"{name}: {contestant.answers / contestant.busy_s:.2f} answers/s at saturation")


async def counted(contestant: Contestant, name: str) -> dict[str, float]:
    """Return a counter of a gateway by its label."""
    lines = (await contestant.client.get("/metrics")).text.splitlines()
    wanted = f"ragcache_gateway_speculation_{name}_total"
    pairs = [line.rsplit(" ", 1) for line in lines if line.startswith(wanted)]
    return {
        key.removeprefix(wanted)[1:-1].partition("=")[2].strip('"'): float(value)
        for key, value in pairs
    }


async def measure(site: Site, options: argparse.Namespace) -> dict[str, Any]:
    second_share = await measure_prefill(site, options.questions)
    say(f"a prefill takes {site.prefill_s:.2f} s")
    await measure_ttft(site, options.questions)
    off, auto = (site.contestants[name] for name in (OFF, AUTO))
    medians_s = {
        name: {share: statistics.median(found) for share, found in contestant.ttft_s.items()}
        for name, contestant in site.contestants.items()
    }
    gains = {
        str(share): round(medians_s[OFF][share] / medians_s[AUTO][share], 3) for share in SHARES
    }
    guesses = await counted(auto, "guesses")
    wasted_tokens = (await counted(auto, "wasted_tokens"))[""]
    prompt_tokens = sum(map(len, auto.ttft_s.values())) * PROMPT_TOKENS
    await measure_throughput(site, options)
    off_per_s, auto_per_s = (one.answers / one.busy_s for one in (off, auto))
    return {
        "ttft_gain_full_search": gains[str(FULL)],
        "ttft_gain": gains,
        "ttft_ms": {
            name: {str(share): round(1e3 * median_s) for share, median_s in found.items()}
            for name, found in medians_s.items()
        },
        "wasted_prefill_share": round(wasted_tokens / prompt_tokens, 4),
        "second_request_share": round(second_share, 3),
        "throughput_ratio_at_saturation": round(auto_per_s / off_per_s, 3),
        "answers_per_s_at_saturation": round(off_per_s, 3),
        "prefill_ms": round(1e3 * site.prefill_s),
        "guesses": guesses,
        "guesses_at_saturation": {
            name: value - guesses.get(name, 0.0)
            for name, value in (await counted(auto, "guesses")).items()
        },
    }


async def measure_real_stage(
    site: Site, running: RunningRetriever, kept_share: float, num_pairs: int
) -> dict[str, Any]:
    """Ask questions one at a time, in turns. Each is about documents of its own.

    Args:
        kept_share: Share of questions whose order the reranker keeps.
    """
    collection = await add_collection(running, kept_share, num_pairs)
    before = await counted(site.contestants[AUTO], "guesses")
    ttft_s: dict[str, list[float]] = {OFF: [], AUTO: []}
    for number, pair in enumerate(collection.pairs):
        names = (OFF, AUTO) if number % 2 else (AUTO, OFF)
        for name, question in zip(names, pair, strict=True):
            await site.wait_until_idle()
            contestant = site.contestants[name]
            ttft_s[name].append(
                await _first_token_s(contestant, question, collection=collection.name)
            )
    off_s, auto_s = (statistics.median(ttft_s[name]) for name in (OFF, AUTO))
    after = await counted(site.contestants[AUTO], "guesses")
    say(f"order kept of {kept_share:.0%}: {off_s:.2f} s off, {auto_s:.2f} s auto")
    return {
        "ttft_gain": round(off_s / auto_s, 3),
        "ttft_ms": {OFF: round(1e3 * off_s), AUTO: round(1e3 * auto_s)},
        "early_equals_final_share": round(collection.same_share, 3),
        "slow_stage_ms": round(1e3 * collection.slow_stage_s),
        "guesses": {name: value - before.get(name, 0.0) for name, value in after.items()},
    }


async def real_stages(
    folder: Path, behind: Behind, kept_shares: Sequence[float], num_pairs: int
) -> dict[str, Any]:
    """Measure the real retriever with a reranker that keeps the order of some questions."""
    async with (
        reranking_retriever(folder, behind.model) as running,
        running_site(folder, behind, running.address) as site,
    ):
        say("the retriever is up")
        found = {
            share: await measure_real_stage(site, running, share, num_pairs)
            for share in kept_shares
        }
    real = found[REAL_KEPT_SHARE]
    return {
        "ttft_gain_real_stage": real["ttft_gain"],
        "early_equals_final_share": real["early_equals_final_share"],
        "slow_stage_ms": real["slow_stage_ms"],
        "real_stage_by_kept_share": {str(share): one for share, one in found.items()},
    }


async def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    recorded = record_searches(SHARES, options.recorded)
    say("searches are recorded")
    model = fetch_model("smollm2")
    retriever = StagedRetriever(recorded, load_tokenizer(model))  # type: ignore[abstract]  # other calls are not served
    with (
        running_cachestore(folder / "store") as store,
        running_engine(
            *(folder / "engine", model, store.address),
            number_type=fast_number_type(),
        ) as engine,
    ):
        say("the engine is up")
        behind = Behind(model, engine, store.address)
        found = await real_stages(folder, behind, options.kept_shares, options.pairs)
        port = free_port()
        parts = await serve_parts(port, retriever)
        async with running_site(folder, behind, f"{HOST}:{port}") as site:
            found |= await measure(site, options)
        await parts.stop()
    return found | {
        "final_progress": {
            str(share): round(statistics.fmean(map(final_progress, searches)), 3)
            for share, searches in recorded.items()
        },
        "prompt_tokens": PROMPT_TOKENS,
        "questions": options.questions,
        "clients": CLIENTS,
    }


def main() -> None:
    given = options(__doc__, "under four minutes on two cores").parse_args()
    # Of each vector search ratio and gateway; answers and pairs of turns at saturation.
    given.questions, given.answers, given.rounds = (3, 12, 1) if given.quick else (20, 30, 2)
    given.kept_shares, given.pairs = (QUICK_KEPT_SHARES, 10) if given.quick else (KEPT_SHARES, 40)
    given.recorded = max(given.questions, 20)
    print_figures(lambda folder: asyncio.run(run(given, folder)))


if __name__ == "__main__":
    main()
