"""Measures how fast chunks are computed ahead of questions, and how much that delays questions.

A real gateway computes the chunks of written documents in a real engine with a real cache store.
The plain rate is that of the same engine for prompts of the same lengths without a plan, uncut. It
is measured before, between and after the documents, so that a noisy machine hurts both alike.

- ``precompute_tokens_over_prefill_rate``: tokens of chunks computed ahead per second, from the
  first write until the last chunk is complete, over the plain rate. Template and repeated chunks do
  not count.
- ``over_prefill_rate_in_slices``: the same by the time of the slices alone, without the time
  between them.
- ``idle_ttft_ms`` and ``busy_ttft_ms``: time to the first token of short questions, without
  documents to compute and with them, and ``delay_ms`` their difference; means and 95th percentiles.
  The questions come at random times (``poisson``) or at regular ones.

The retriever is a stand-in that cuts documents into paragraphs: its embedder would compete with the
engine for cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a program

from bench.support.number_type import fast_number_type
from bench.support.processes import COMPUTES_PLAIN, Engine, running_cachestore, running_engine
from ragcache_core.errors import InvalidInput
from ragcache_gateway.app import create_app
from ragcache_gateway.engines.prefill_costs import profile_of
from ragcache_gateway.prompts.builder import PromptBuilder
from ragcache_gateway.prompts.tokenizer import load_tokenizer
from ragcache_kv.model_folder import load_model_folder
from ragcache_wire.clients.engine_client import EngineClient
from ragcache_wire.v1 import retriever_pb2
from ragcache_wire.watched.members import FixedMembers
from tests.helpers.gateway_fakes import CONFIG, FakeRetriever, serving, serving_retriever

MAX_LENGTH = 4096
CHUNK_WORDS = 150
CHUNKS_PER_DOCUMENT = 8
DOCUMENT_TOKENS = 1250
"""About as many tokens as a document has."""

PLAIN_TOKENS = 2048
"""Length of a plain prefill: that of a sequence."""

WORDS = """
account answer archive backup budget build cable change client cloud cluster copy cost daily data
date delay device disk engine error event failure field file flag folder graph group host image
index input key layer limit link list log machine market memory message meter model module network
node note number order owner packet page part path plan point pool port power price process query
queue range rate record region report request result road role route rule sample scale schedule
sector series server service shift signal site source space state step storage stream string supply
""".split()  # noqa: SIM905


class ParagraphRetriever(FakeRetriever):
    """Cuts documents into paragraphs, which have no neighbours."""

    async def UpsertDocument(self, request: Any, context: Any) -> Any:  # noqa: N802
        reply = await super().UpsertDocument(request, context)
        return retriever_pb2.UpsertDocumentReply(
            document=reply.document, changed=True, chunks=request.document.text.split("\n\n")
        )

    async def GetSimilarChunks(self, request: Any, context: Any) -> Any:  # noqa: N802
        paragraphs = self.documents[request.id].text.split("\n\n")
        return retriever_pb2.GetSimilarChunksReply(
            chunks=[retriever_pb2.SimilarChunks() for _ in paragraphs]
        )


@dataclass
class Site:
    """A gateway in this process, and the engine behind it."""

    engine: Engine
    gateway: httpx.AsyncClient
    plain: httpx.AsyncClient
    prompts: PromptBuilder
    rng: random.Random

    def text(self, num_words: int) -> str:
        """Make a text that no other text equals."""
        return " ".join(self.rng.choices(WORDS, k=num_words)).capitalize() + "."

    def document(self) -> str:
        """Make a document."""
        return "\n\n".join(self.text(CHUNK_WORDS) for _ in range(CHUNKS_PER_DOCUMENT))

    async def counters(self) -> dict[str, float]:
        """Return the gateway's counters, summed over labels."""
        found: dict[str, float] = {}
        for line in (await self.gateway.get("/metrics")).text.splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = name.split("{")[0].removeprefix("ragcache_gateway_")
                found[name] = found.get(name, 0.0) + float(value)
        return found


@contextlib.asynccontextmanager
async def running_site(
    folder: Path, model: Path, engine: Engine, store: str
) -> AsyncIterator[Site]:
    """Start a gateway that computes chunks ahead."""
    async with contextlib.AsyncExitStack() as stack:
        retriever = ParagraphRetriever()  # type: ignore[abstract]  # other calls are not served
        address = await stack.enter_async_context(serving_retriever(retriever))
        config = CONFIG.replace(
            model=str(model),
            model_name="model",
            max_model_len=MAX_LENGTH,
            retriever=address,
            cachestore=FixedMembers((store,)),
            engines=(engine.address,),
            engine_watch_s=5.0,
            reuse="blend",
            precompute=True,
            log_level="warning",
        )
        space = load_model_folder(str(model)).space(fast_number_type())
        app = create_app(config, space, prompt_builder(model))
        port = await stack.enter_async_context(serving(app))
        options: dict[str, Any] = {"trust_env": False, "timeout": 120}
        yield Site(
            engine,
            await stack.enter_async_context(
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", **options)
            ),
            await stack.enter_async_context(httpx.AsyncClient(base_url=engine.url, **options)),
            prompt_builder(model),
            random.Random(time.time_ns()),
        )


def prompt_builder(model: Path) -> PromptBuilder:
    """Return a builder of prompts for a model."""
    return PromptBuilder(
        load_tokenizer(model), max_model_len=MAX_LENGTH, default_max_tokens=64, cache_bytes=1 << 20
    )


async def wait_until(happened: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition, without much load on the machine."""
    deadline = time.monotonic() + 600
    while not await happened():
        if time.monotonic() > deadline:
            raise RuntimeError("nothing happened for ten minutes")
        await asyncio.sleep(0.05)


async def plain_rate(site: Site, num_prompts: int) -> float:
    """Return the tokens per second of uncut prefills without a plan."""
    tokens = 0
    began = time.monotonic()
    for _ in range(num_prompts):
        ids = site.prompts.encode_chunk(site.text(2 * PLAIN_TOKENS))[:PLAIN_TOKENS]
        body = {"model": "model", "prompt": ids, "max_tokens": 1, "temperature": 0}
        (await site.plain.post("/v1/completions", json=body)).raise_for_status()
        tokens += len(ids)
    return tokens / (time.monotonic() - began)


async def write_documents(site: Site, count: int) -> None:
    """Write documents, which the gateway then computes."""
    for _ in range(count):
        body = {"id": f"{site.rng.getrandbits(64)}.md", "text": site.document()}
        (await site.gateway.post("/v1/documents", json=body)).raise_for_status()


async def wait_until_computed(site: Site) -> None:
    """Wait until no chunk is queued."""

    async def is_over() -> bool:
        return (await site.counters())["precompute_waiting_chunks"] == 0

    await wait_until(is_over)


async def precompute_rates(site: Site, num_documents: int) -> tuple[float, float]:
    """Return tokens per second from the first write on, and by the slices' time alone."""
    before = await site.counters()
    began = time.monotonic()
    await write_documents(site, num_documents)
    await wait_until_computed(site)
    seconds = time.monotonic() - began
    after = await site.counters()
    tokens = after["precomputed_tokens_total"] - before["precomputed_tokens_total"]
    slices_s = after["precompute_seconds_total"] - before["precompute_seconds_total"]
    return tokens / seconds, tokens / slices_s


async def question_ttfts(site: Site, gaps_s: Sequence[float]) -> list[float]:
    """Ask short questions one after the other, and return the seconds to their first tokens."""
    found = []
    for gap_s in gaps_s:
        await asyncio.sleep(gap_s)
        body = {
            "messages": [{"role": "user", "content": site.text(8)}],
            "max_tokens": 1,
            "temperature": 0,
            "ragcache": {"reuse": "exact"},
        }
        reply = (await site.gateway.post("/v1/chat/completions", json=body)).raise_for_status()
        found.append(reply.json()["ragcache"]["timing_ms"]["first_token"] / 1e3)
    return found


def draw_gaps(rng: random.Random, arrivals: str, count: int, mean_s: float) -> list[float]:
    """Draw the times between an answer and the next question."""
    if arrivals == "poisson":
        return [rng.expovariate(1 / mean_s) for _ in range(count)]
    return [mean_s * rng.uniform(0.95, 1.05) for _ in range(count)]


def summary(prefix: str, seconds: Sequence[float]) -> dict[str, float]:
    """Return mean and 95th percentile in milliseconds."""
    ordered = sorted(seconds)
    return {
        f"{prefix}_mean": round(1e3 * statistics.fmean(ordered), 1),
        f"{prefix}_p95": round(1e3 * ordered[int(0.95 * (len(ordered) - 1))], 1),
    }


async def measure(site: Site, options: argparse.Namespace) -> dict[str, Any]:
    """Run the whole measurement."""
    await wait_until(lambda: _is_ready(site))
    await plain_rate(site, 1)
    await precompute_rates(site, 1)  # warms up both
    plain, ahead, in_slices = [], [], []
    for _ in range(options.rounds):
        plain.append(await plain_rate(site, options.documents // 2))
        rates = await precompute_rates(site, options.documents)
        ahead.append(rates[0])
        in_slices.append(rates[1])
    plain.append(await plain_rate(site, options.documents // 2))
    plain_mean = statistics.harmonic_mean(plain)
    ahead_mean = statistics.harmonic_mean(ahead)
    result: dict[str, Any] = {
        "precompute_tokens_over_prefill_rate": round(ahead_mean / plain_mean, 3),
        "over_prefill_rate_in_slices": round(statistics.harmonic_mean(in_slices) / plain_mean, 3),
        "prefill_tokens_per_s": [round(rate) for rate in plain],
        "precompute_tokens_per_s": [round(rate) for rate in ahead],
    }
    for arrivals in options.arrivals:
        gaps_s = draw_gaps(site.rng, arrivals, options.questions, options.gap_s)
        idle = await question_ttfts(site, gaps_s)
        before = await site.counters()
        seconds = sum(gaps_s) + sum(idle)
        await write_documents(site, 1 + int(1.5 * seconds * ahead_mean / DOCUMENT_TOKENS))
        began = time.monotonic()
        busy = await question_ttfts(site, gaps_s)
        seconds = time.monotonic() - began
        after = await site.counters()
        if after["precompute_waiting_chunks"] == 0:
            result["note"] = "all chunks were computed before the last question"
        tokens = after["precomputed_tokens_total"] - before["precomputed_tokens_total"]
        result[arrivals] = {
            **summary("idle_ttft_ms", idle),
            **summary("busy_ttft_ms", busy),
            **summary("delay_ms", [b - a for a, b in zip(sorted(idle), sorted(busy), strict=True)]),
            "precompute_tokens_per_s": round(tokens / seconds),
        }
        await wait_until_computed(site)
    assert site.engine.records is not None
    client = EngineClient(site.engine.records)
    profile = profile_of((await client.costs()).prefill)
    await client.close()
    if profile is not None:
        result["pass_ms_by_tokens"] = {
            tokens: round(1e3 * profile.predict(1024, tokens), 1)
            for tokens in (1, 128, 256, 512, 1024)
        }
    return result


async def _is_ready(site: Site) -> bool:
    return (await site.gateway.get("/v1/status")).status_code == 200


def default_model() -> Path:
    """Return the folder of the model that `ragcache model fetch smollm2` has fetched."""
    from ragcache_cli.models.cache import find_model  # noqa: PLC0415  other models do not need it

    found = find_model("smollm2")
    if found is None:
        raise InvalidInput("--model", "is not given", "run `ragcache model fetch smollm2` first")
    return found


def main() -> None:
    """Print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under four minutes on two cores")
    parser.add_argument("--model", type=Path, help="folder of a model; default: smollm2")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--documents", type=int, help="per round")
    parser.add_argument("--questions", type=int)
    parser.add_argument("--gap-s", type=float, default=0.8, help="mean time between questions")
    parser.add_argument("--arrivals", nargs="*", choices=("poisson", "regular"))
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 5)
    options.documents = options.documents or (6 if options.quick else 12)
    options.questions = options.questions or (16 if options.quick else 60)
    if options.arrivals is None:
        options.arrivals = ["poisson", "regular"]
    model = options.model or default_model()
    arguments = ("--scheduling-policy", "priority")
    settings = {**COMPUTES_PLAIN, "RAGCACHE_LOAD_ALWAYS": "off"}
    with (
        tempfile.TemporaryDirectory() as folder,
        running_cachestore(Path(folder) / "store", memory_bytes=512 << 20) as store,
        running_engine(
            *(Path(folder), model, store.address, *arguments),
            settings=settings,
            number_type=fast_number_type(),
        ) as engine,
    ):

        async def run() -> dict[str, Any]:
            async with running_site(Path(folder), model, engine, store.address) as site:
                return await measure(site, options)

        print(json.dumps(asyncio.run(run())))


if __name__ == "__main__":
    main()
