"""A retriever that is killed at any moment keeps what it acknowledged, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sqlite3
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest

from ragcache_core.errors import NotFound, RagCacheError, Unavailable
from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.knowledge_base.indexes import GenerationIndexes
from ragcache_retriever.search.faiss_index import FaissIndexes, IndexOptions
from ragcache_retriever.store.sqlite.document_store import SqliteStore, open_sqlite
from ragcache_retriever.store.sqlite.files.backup import INDEXES_FOLDER, check_backup
from ragcache_retriever.store.sqlite.files.damage import find_damage
from ragcache_retriever.store.sqlite.files.reserve import DiskReserve
from ragcache_retriever.store.sqlite.schema import FILE_NAME
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb
from tests.kit.retriever import build_thread
from tests.kit.wait import until

NUM_WRITERS = 4
DOCUMENTS_OF_A_WRITER = 6
START_TIMEOUT_S = 120
MAX_LIFE_S = 2.0
SIZES = (24, 48, 64)
TEMPORARY = ("temporary-0", "temporary-1")
"""Collections that are created and deleted all the time."""


@dataclass
class Expected:
    """What may be stored. A pending change adds a possibility.

    Attributes:
        documents: By collection and id: texts, or None for absent.
        collections: Whether each collection may exist.
    """

    documents: dict[tuple[str, str], set[str | None]] = field(default_factory=dict)
    collections: dict[str, set[bool]] = field(default_factory=lambda: {"default": {True}})
    num_acknowledged: int = 0
    num_deleted_collections: int = 0

    def begin(self, collection: str, name: str, text: str | None) -> None:
        self.documents.setdefault((collection, name), {None}).add(text)

    def acknowledge(self, collection: str, name: str, text: str | None) -> None:
        self.documents[collection, name] = {text}
        self.num_acknowledged += 1

    def begin_collection(self, name: str, exists: bool) -> None:
        self.collections.setdefault(name, {False}).add(exists)

    def acknowledge_collection(self, name: str, exists: bool) -> None:
        self.collections[name] = {exists}
        if not exists:
            self.num_deleted_collections += 1
            self.forget_documents(name)

    def forget_documents(self, collection: str) -> None:
        """Expect no document of a collection that is gone, nor after it is created again."""
        for key in self.documents:
            if key[0] == collection:
                self.documents[key] = {None}


@contextlib.asynccontextmanager
async def running(
    folder: Path, model: Path
) -> AsyncIterator[tuple[asyncio.subprocess.Process, RetrieverClient]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.kit.retriever_process", str(folder), str(model)),
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


async def upsert(
    client: RetrieverClient, expected: Expected, collection: str, name: str, rng: random.Random
) -> None:
    words = [f"word{rng.randrange(40)}" for _ in range(rng.randrange(20, 150))]
    text = f"{name} {rng.random()}. " + ". ".join(words)
    expected.begin(collection, name, text)
    await client.upsert_document(pb.Document(collection=collection, id=name, text=text))
    expected.acknowledge(collection, name, text)


async def write(
    client: RetrieverClient, expected: Expected, writer: int, rng: random.Random
) -> None:
    """Change documents until the retriever is gone."""
    with contextlib.suppress(RagCacheError, grpc.RpcError):
        while True:
            name = f"{writer}-{rng.randrange(DOCUMENTS_OF_A_WRITER)}"
            if rng.random() < 0.3:
                expected.begin("default", name, None)
                with contextlib.suppress(NotFound):
                    await client.delete_document("default", name)
                expected.acknowledge("default", name, None)
                continue
            await upsert(client, expected, "default", name, rng)


async def change_collection(
    client: RetrieverClient, expected: Expected, name: str, rng: random.Random
) -> None:
    """Create a collection, fill it and delete it, until the retriever is gone."""
    with contextlib.suppress(RagCacheError, grpc.RpcError):
        while True:
            expected.begin_collection(name, True)
            chunking = pb.Chunking(size_tokens=rng.choice(SIZES), overlap_tokens=0)
            created = await create(client, pb.Collection(name=name, chunking=chunking))
            if expected.collections[name] == {False, True}:
                assert not created.documents
            expected.acknowledge_collection(name, True)
            for i in range(rng.randrange(DOCUMENTS_OF_A_WRITER)):
                await upsert(client, expected, name, str(i), rng)
            if rng.random() < 0.3:
                continue  # its documents are prepared again
            expected.begin_collection(name, False)
            await client.delete_collection(name)
            expected.acknowledge_collection(name, False)


async def create(client: RetrieverClient, collection: pb.Collection) -> pb.Collection:
    """Create a collection, once an earlier one of its name is removed, or change it."""

    async def created() -> pb.Collection | None:
        try:
            return await client.put_collection(collection)
        except Unavailable as error:
            if "is being deleted" not in str(error):
                raise
        return None

    found = await until(created)
    assert found is not None
    return found


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
            await asyncio.to_thread(check_backup, path)


async def check(client: RetrieverClient, expected: Expected) -> None:
    """Compare what is stored with what may be, and make that certain."""
    listed = {one.name for one in await client.list_collections()}
    assert listed <= expected.collections.keys()
    for name, possible in expected.collections.items():
        assert (name in listed) in possible
        expected.collections[name] = {name in listed}
        if name not in listed:
            expected.forget_documents(name)
    stored: dict[tuple[str, str], str | None] = {}
    for name in listed:
        page = await client.list_documents(name, page_size=1000)
        for one in page.documents:
            stored[name, one.id] = (await client.get_document(name, one.id)).text
    for key, texts in expected.documents.items():
        assert stored.get(key) in texts
        expected.documents[key] = {stored.get(key)}
    assert stored.keys() <= expected.documents.keys()


def check_files(folder: Path) -> set[str]:
    """Check the database and the indexes of a killed process. Return its tables of words."""
    store = open_sqlite(folder, DiskReserve(folder, 0))
    query = store.database.query
    try:
        assert find_damage(store.database.path, threading.Event()) is None
        tables = {
            name
            for (name,) in query("SELECT name FROM sqlite_master WHERE type = 'table'")
            if name.startswith(("lexical_", "detached_"))
        }
        generations = {row for (row,) in query("SELECT row FROM generations")}
        # The next start removes what is left of a generation, so nothing may be left without one.
        assert {int(name.split("_")[1]) for name in tables} <= generations
        for collection in store.collections.all().values():
            [(documents,)] = query(
                "SELECT count(*) FROM documents JOIN collections"
                " ON collections.row = documents.collection WHERE name = ?",
                (collection.name,),
            )
            assert collection.num_documents == documents
            for generation in collection.generations:
                counted = query(
                    "SELECT count(*), count(DISTINCT document) FROM chunks WHERE generation = ?",
                    (generation.row,),
                )
                assert counted == [(generation.num_chunks, generation.num_documents)]
                table = f"lexical_{generation.row}"
                # The first step of a deletion takes the words away.
                assert (table in tables) is not collection.is_deleting
                if collection.is_deleting:
                    continue
                query(f"INSERT INTO {table} ({table}) VALUES ('integrity-check')")
                check_index(store, folder, generation.row, generation.recipe.dimension)
        return tables
    finally:
        store.database.close()


def check_nothing_left(folder: Path) -> None:
    """Check that nothing is left of deleted collections and of retired generations."""
    tables = check_files(folder)
    with contextlib.closing(sqlite3.connect(folder / FILE_NAME)) as connection:
        served = {
            str(row)
            for (row,) in connection.execute("SELECT row FROM generations WHERE state = 'serving'")
        }
        [(num_generations,)] = connection.execute("SELECT count(*) FROM generations")
        [(num_collections,)] = connection.execute("SELECT count(*) FROM collections")
    assert len(served) == num_generations == num_collections
    assert {name.split("_")[1] for name in tables} == served
    assert not any(name.startswith("detached_") for name in tables)


def check_index(store: SqliteStore, folder: Path, generation: int, dimension: int) -> None:
    """Compare the index that was on disk, once reconciled, with the stored vectors."""
    files = FaissIndexes(folder / INDEXES_FOLDER, IndexOptions(), build_thread())
    indexes = GenerationIndexes(store, files)
    indexes.open(generation, dimension, IndexKind.AUTO)
    rows = store.embeddings.rows(generation)
    with indexes.using(generation) as index:
        assert index.rows().tolist() == rows.tolist()
        if len(rows):
            stored_rows, vectors = store.embeddings.after(generation, 0, len(rows))
            assert stored_rows.tolist() == rows.tolist()
            query = vectors[len(rows) // 2]
            *_, final = index.search(query, 20)
            scores = vectors @ query
            best = np.lexsort((rows, -scores))[:20]
            assert np.allclose(final.scores, scores[best], atol=1e-5)
    indexes.close()


async def until_nothing_remains(client: RetrieverClient, folder: Path) -> None:
    """Wait until documents are prepared, and deleted collections and old chunks are removed."""

    async def nothing_remains() -> bool:
        is_remaking = (await client.get_collection("default")).HasField("remake")
        return not (is_remaking or is_removing(folder))

    await until(nothing_remains)


def is_removing(folder: Path) -> bool:
    """Whether a running retriever still removes a collection or a generation."""
    with contextlib.closing(sqlite3.connect(folder / FILE_NAME)) as connection:
        [(count,)] = connection.execute(
            "SELECT (SELECT count(*) FROM collections WHERE is_deleting)"
            " + (SELECT count(*) FROM generations WHERE state != 'serving')"
        )
    return bool(count)


def has_changed(expected: Expected, life: int) -> bool:
    """Whether there were four documents for each life, and half a deleted collection."""
    return expected.num_acknowledged >= 4 * life and expected.num_deleted_collections >= life // 2


async def kill_often(folder: Path, model: Path, num_kills: int, seed: int) -> Expected:
    rng, expected = random.Random(seed), Expected()
    for life in range(num_kills):
        async with running(folder, model) as (process, client):
            await check(client, expected)
            tasks = [
                asyncio.create_task(write(client, expected, writer, rng))
                for writer in range(NUM_WRITERS)
            ]
            tasks += [
                asyncio.create_task(change_collection(client, expected, name, rng))
                for name in TEMPORARY
            ]
            tasks.append(asyncio.create_task(change_chunking(client, rng)))
            tasks.append(asyncio.create_task(back_up(client, folder.with_suffix(".backup"))))
            # On a slow machine, too, enough happens between the kills.
            await until(partial(has_changed, expected, life))
            await asyncio.sleep(rng.uniform(0.2, MAX_LIFE_S))
            process.send_signal(signal.SIGKILL)
            await process.wait()
            async with asyncio.timeout(60):
                await asyncio.gather(*tasks)
        check_files(folder)
    async with running(folder, model) as (_, client):
        await check(client, expected)
        await until_nothing_remains(client, folder)
        await check(client, expected)
    check_nothing_left(folder)
    return expected


@pytest.mark.timeout(600)
async def test_kills_lose_nothing_that_was_acknowledged(tmp_path: Path, tiny_model: Path) -> None:
    expected = await kill_often(tmp_path / "data", tiny_model, num_kills=6, seed=1)
    assert expected.num_acknowledged > 20
    assert expected.num_deleted_collections > 1


@pytest.mark.slow
@pytest.mark.timeout(3000)
async def test_fifty_kills_lose_nothing_that_was_acknowledged(
    tmp_path: Path, tiny_model: Path
) -> None:
    expected = await kill_often(tmp_path / "data", tiny_model, num_kills=50, seed=2)
    assert expected.num_acknowledged > 200
    assert expected.num_deleted_collections > 20
