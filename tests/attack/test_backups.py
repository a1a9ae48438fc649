"""Files that pose as backups, sent to a real retriever."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import grpc
import pytest

from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb

TRIGGER = (
    "CREATE TRIGGER evil AFTER INSERT ON texts BEGIN"
    " UPDATE texts SET text = 'replaced by trigger' WHERE document = new.document; END"
)
CHANGES = {
    "trigger": TRIGGER,
    "view": "CREATE VIEW evil AS SELECT load_extension('x') AS a",
    "table": "CREATE TABLE evil (a)",
    "index": "CREATE INDEX evil ON documents (upper(title))",
    "column": "ALTER TABLE texts ADD COLUMN evil TEXT GENERATED ALWAYS AS (upper(text))",
    "missing": "DROP INDEX outbox_pending",
    "ranking": "INSERT INTO lexical_1 (lexical_1, rank) VALUES ('rank', 'bm25(1.0)')",
    "other words": "CREATE VIRTUAL TABLE lexical_7 USING fts5(title)",
    "as a part": "CREATE VIEW detached_1_data AS SELECT 1 AS id, 2 AS block",
}


@asynccontextmanager
async def retriever(folder: Path, model: Path) -> AsyncIterator[RetrieverClient]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.kit.retriever_process", str(folder), str(model)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        port = int(await asyncio.wait_for(process.stdout.readline(), 120))
        client = RetrieverClient(f"127.0.0.1:{port}")
        yield client
        await client.close()
    finally:
        process.terminate()
        await process.wait()


async def restore(client: RetrieverClient, content: bytes) -> int:
    def parts() -> Iterator[pb.BackupPart]:
        for first in range(0, len(content), 1 << 20):
            yield pb.BackupPart(data=content[first : first + (1 << 20)])
        yield pb.BackupPart(last=True)

    return int((await client._stub.Restore(parts(), timeout=60)).documents)


@pytest.mark.timeout(300)
async def test_a_backup_with_other_objects_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    async with retriever(tmp_path / "data", tiny_model) as client:
        await client.upsert_document(pb.Document(collection="default", id="d", text="Kept."))
        parts = [part async for part in client._stub.Backup(pb.BackupRequest(), timeout=60)]
        content = b"".join(part.data for part in parts)
        for name, statement in CHANGES.items():
            path = tmp_path / f"{name}.sqlite3"
            path.write_bytes(content)
            with closing(sqlite3.connect(path)) as database:
                database.execute(statement)
                database.commit()
            with pytest.raises(grpc.RpcError, match=r"backup: (has|lacks)"):
                await restore(client, path.read_bytes())
        await client.upsert_document(pb.Document(collection="default", id="new", text="Written."))
        assert (await client.get_document("default", "new")).text == "Written."
        assert await restore(client, content) == 1
