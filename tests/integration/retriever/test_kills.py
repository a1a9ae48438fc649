"""A retriever that is killed at any moment keeps what it acknowledged, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
import pytest

from ragcache_core.errors import NotFound, RagCacheError
from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.knowledge_base.indexes import GenerationIndexes
from ragcache_retriever.search.indexes import SegmentedIndexes
from ragcache_retriever.search.segmented_index import IndexOptions
from ragcache_retriever.store.sqlite.document_store import SqliteDocumentStore
from ragcache_retriever.store.sqlite.files.backup import INDEXES_FOLDER, check_copy
from ragcache_retriever.store.sqlite.files.check import find_damage
from ragcache_retriever.store.sqlite.files.reserve import DiskReserve
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb
from tests.helpers.retriever_parts import index_threads

NUM_WRITERS = 4
DOCUMENTS_OF_A_WRITER = 6
START_TIMEOUT_S = 120
MAX_LIFE_S = 2.0
SIZES = (24, 48, 64)


@dataclass
class Expected:
    """What each document may be: texts, or None for absent. A pending change adds one."""

    documents: dict[str, set[str | None]] = field(default_factory=dict)
    num_acknowledged: int = 0

    def begin(self, name: str, text: str | None) -> None:
        self.documents.setdefault(name, {None}).add(text)

    def acknowledge(self, name: str, text: str | None) -> None:
        self.documents[name] = {text}
        self.num_acknowledged += 1


@contextlib.asynccontextmanager
async def running(
    folder: Path, model: Path
) -> AsyncIterator[tuple[asyncio.subprocess.Process, RetrieverClient]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.helpers.retriever_process", str(folder), str(model)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            port = int(await process.stdout.readline())
        client = RetrieverClient(f"127.0.0.1:{port}")
        yield process, client
        await client.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def write(
    client: RetrieverClient, expected: Expected, writer: int, rng: random.Random
) -> None:
    """Change documents until the retriever is gone."""
    with contextlib.suppress(RagCacheError, grpc.RpcError):
        for version in itertools.count():
            name = f"{writer}-{rng.randrange(DOCUMENTS_OF_A_WRITER)}"
            if rng.random() < 0.3:
                expected.begin(name, None)
                with contextlib.suppress(NotFound):
                    await client.delete_document("default", name)
                expected.acknowledge(name, None)
                continue
            words = [f"word{rng.randrange(40)}" for _ in range(rng.randrange(20, 150))]
            text = f"{name} {version} {rng.random()}. " + ". ".join(words)
            expected.begin(name, text)
            await client.upsert_document(pb.Document(collection="default", id=name, text=text))
            expected.acknowledge(name, text)


async def change_chunking(client: RetrieverClient, rng: random.Random) -> None:
    with contextlib.suppress(RagCacheError, grpc.RpcError):
        while True:
            await asyncio.sleep(rng.random())
            chunking = pb.Chunking(size_tokens=rng.choice(SIZES), overlap_tokens=0)
            await client.put_collection(pb.Collection(name="default", chunking=chunking))


async def back_up(client: RetrieverClient, path: Path) -> None:
    """Take backups, and check those that are complete."""
    with contextlib.suppress(grpc.RpcError):
        while True:
            parts = [part async for part in client._stub.Backup(pb.BackupRequest(), timeout=60)]
            await asyncio.to_thread(path.write_bytes, b"".join(part.data for part in parts))
            await asyncio.to_thread(check_copy, path)


async def check(client: RetrieverClient, expected: Expected) -> None:
    """Compare the documents with what may be there, and make that certain."""
    page = await client.list_documents("default", page_size=1000)
    stored: dict[str, str | None] = {
        one.id: (await client.get_document("default", one.id)).text for one in page.documents
    }
    for name, possible in expected.documents.items():
        assert stored.get(name) in possible
        expected.documents[name] = {stored.get(name)}
    assert stored.keys() <= expected.documents.keys()


def check_files(folder: Path) -> None:
    """Check the database and the index of a killed process."""
    store = SqliteDocumentStore(folder, DiskReserve(folder, 0))
    try:
        assert find_damage(store.database.path, threading.Event()) is None
        for collection in store.collections().values():
            documents = store.database.query("SELECT count(*) FROM documents")[0][0]
            assert collection.num_documents == documents
            for generation in collection.generations:
                counted = store.database.query(
                    "SELECT count(*), count(DISTINCT document) FROM chunks WHERE generation = ?",
                    (generation.row,),
                )
                assert counted == [(generation.num_chunks, generation.num_documents)]
                table = f"lexical_{generation.row}"
                store.database.query(f"INSERT INTO {table} ({table}) VALUES ('integrity-check')")
                check_index(store, folder, generation.row, generation.recipe.dimension)
    finally:
        store.close()


def check_index(store: SqliteDocumentStore, folder: Path, generation: int, dimension: int) -> None:
    """Compare the index that was on disk, once reconciled, with the stored vectors."""
    files = SegmentedIndexes(folder / INDEXES_FOLDER, IndexOptions(), index_threads())
    indexes = GenerationIndexes(store, files)
    indexes.open(generation, dimension, IndexKind.AUTO)
    rows = store.rows(generation)
    with indexes.using(generation) as index:
        assert index.rows().tolist() == rows.tolist()
        if len(rows):
            stored_rows, vectors = store.vectors_after(generation, 0, len(rows))
            assert stored_rows.tolist() == rows.tolist()
            query = vectors[len(rows) // 2]
            *_, final = index.search(query, 20)
            scores = vectors @ query
            best = np.lexsort((rows, -scores))[:20]
            assert np.allclose(final.scores, scores[best], atol=1e-5)
    indexes.close()


async def kill_often(folder: Path, model: Path, num_kills: int, seed: int) -> int:
    rng, expected = random.Random(seed), Expected()
    for _ in range(num_kills):
        async with running(folder, model) as (process, client):
            await check(client, expected)
            tasks = [
                asyncio.create_task(write(client, expected, writer, rng))
                for writer in range(NUM_WRITERS)
            ]
            tasks.append(asyncio.create_task(change_chunking(client, rng)))
            tasks.append(asyncio.create_task(back_up(client, folder.with_suffix(".backup"))))
            await asyncio.sleep(rng.uniform(0.2, MAX_LIFE_S))
            process.send_signal(signal.SIGKILL)
            await process.wait()
            async with asyncio.timeout(60):
                await asyncio.gather(*tasks)
        check_files(folder)
    async with running(folder, model) as (_, client):
        await check(client, expected)
        async with asyncio.timeout(60):
            while (await client.get_collection("default")).HasField("remake"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await check(client, expected)
    return expected.num_acknowledged


@pytest.mark.timeout(600)
async def test_kills_lose_nothing_that_was_acknowledged(tmp_path: Path, tiny_model: Path) -> None:
    assert await kill_often(tmp_path / "data", tiny_model, num_kills=6, seed=1) > 20


@pytest.mark.slow
@pytest.mark.timeout(3000)
async def test_fifty_kills_lose_nothing_that_was_acknowledged(
    tmp_path: Path, tiny_model: Path
) -> None:
    assert await kill_often(tmp_path / "data", tiny_model, num_kills=50, seed=2) > 200
