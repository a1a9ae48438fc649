"""The retriever as its own process, with the embedder that comes with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from harness.processes import free_port
from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_retriever.__main__ import EXIT_MISCONFIGURED
from ragcache_retriever.store.sqlite.schema import FILE_NAME
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb

START_TIMEOUT_S = 250
"""Importing torch and loading the embedder takes seconds, and minutes beside a busy neighbour."""


def environment(folder: Path, model: Path, **variables: str) -> dict[str, str]:
    return os.environ | {
        "RAGCACHE_LISTEN": "127.0.0.1:0",
        "RAGCACHE_DATA_DIR": str(folder),
        "RAGCACHE_MODEL": str(model),
        "RAGCACHE_CHUNK_TOKENS": "96",
        "RAGCACHE_CHUNK_OVERLAP_TOKENS": "16",
        "OMP_NUM_THREADS": "1",
        **variables,
    }


async def start(env: dict[str, str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ragcache_retriever", env=env, stderr=asyncio.subprocess.PIPE
    )


async def refusal(env: dict[str, str]) -> bytes:
    """What a process says that ends because of its settings."""
    process = await start(env)
    _, error = await process.communicate()
    assert process.returncode == EXIT_MISCONFIGURED
    return error


async def log_line(process: asyncio.subprocess.Process, pattern: str) -> re.Match[str]:
    assert process.stderr is not None
    seen = ""
    async with asyncio.timeout(START_TIMEOUT_S):
        while line := (await process.stderr.readline()).decode():
            seen += line
            if match := re.search(pattern, line):
                return match
    raise AssertionError(f"ended without saying {pattern!r}: {seen}")


async def until_serving(address: str) -> None:
    """Watch the health service: not serving first, serving once it is loaded."""
    async with grpc.aio.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service="ragcache.v1.Retriever")
        stub = health_pb2_grpc.HealthStub(channel)
        seen = []
        async for reply in stub.Watch(request, timeout=START_TIMEOUT_S):
            seen.append(reply.status)
            if reply.status == health_pb2.HealthCheckResponse.SERVING:
                break
        assert seen[0] == health_pb2.HealthCheckResponse.NOT_SERVING


@contextlib.asynccontextmanager
async def running(
    env: dict[str, str],
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, RetrieverClient]]:
    process = await start(env)
    try:
        port = (await log_line(process, r"listening on port (\d+)"))[1]
        address = f"127.0.0.1:{port}"
        await until_serving(address)
        client = RetrieverClient(address)
        yield process, address, client
        await client.close()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def best(client: RetrieverClient, query: str) -> list[str]:
    stages = [stage async for stage in client.search("default", query, 3)]
    assert stages[-1].final
    return [hit.chunk.document_id for hit in stages[-1].hits]


SUBJECTS = {
    "volcano": "Lava flows down the mountain and ash covers the villages below.",
    "bakery": "Bread is kneaded at four in the morning and sold still warm.",
    "orbit": "Satellites circle the Earth, kept on their path by gravity.",
}


@pytest.mark.timeout(900)
async def test_killed_during_an_ingest_it_keeps_what_it_acknowledged(
    tmp_path: Path, tiny_model: Path
) -> None:
    health = f"127.0.0.1:{free_port()}"
    env = environment(tmp_path, tiny_model, RAGCACHE_HEALTH_LISTEN=health)
    acknowledged: set[str] = set()
    enough = asyncio.Event()

    async def ingest(client: RetrieverClient, worker: int) -> None:
        for i in range(1000):
            document_id = f"{worker}-{i}"
            text = f"# Page {document_id}\n\n" + "It says something. It says more. " * 4
            await client.upsert_document(
                pb.Document(collection="default", id=document_id, text=text)
            )
            acknowledged.add(document_id)
            if len(acknowledged) >= 10:
                enough.set()

    async with running(env) as (process, _, client):
        for name, text in SUBJECTS.items():
            await client.upsert_document(pb.Document(collection="default", id=name, text=text))
        assert (await best(client, "Where do they make bread?"))[0] == "bakery"
        assert (await best(client, "eruption"))[0] == "volcano"
        workers = [asyncio.create_task(ingest(client, worker)) for worker in range(3)]
        async with asyncio.timeout(START_TIMEOUT_S):
            await enough.wait()
        process.send_signal(signal.SIGKILL)
        results = await asyncio.gather(*workers, return_exceptions=True)
        assert all(isinstance(result, RagCacheError) for result in results)

    async with running(env) as (process, address, client):
        page = await client.list_documents("default", page_size=1000)
        assert acknowledged | SUBJECTS.keys() <= {d.id for d in page.documents}
        info = await client.get_collection("default")
        assert info.chunks == sum(d.num_chunks for d in page.documents)
        stages = [stage async for stage in client.search("default", "page", 1000)]
        found = sum(1 + len(hit.duplicates) for hit in stages[-1].hits)
        assert found == min(1000, info.chunks)
        assert (await best(client, "spacecraft above our planet"))[0] == "orbit"

        async with httpx.AsyncClient(trust_env=False, timeout=60) as kubelet:
            assert (await kubelet.get(f"http://{health}/healthz")).status_code == 200
            assert (await kubelet.get(f"http://{health}/readyz")).status_code == 200

        assert b"RAGCACHE_HEALTH_LISTEN: " in await refusal(env)
        own_health = {**env, "RAGCACHE_HEALTH_LISTEN": ""}
        assert b"in use by another retriever" in await refusal(own_health)
        other = environment(tmp_path / "other", tiny_model, RAGCACHE_LISTEN=address)
        assert b"\nragcache_retriever: RAGCACHE_LISTEN: " in await refusal(other)

        process.terminate()
        assert await asyncio.wait_for(process.wait(), 60) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("RAGCACHE_EMBEDDER", "unknown"), ("RAGCACHE_LISTEN", ""), ("RAGCACHE_MODEL", "")],
)
async def test_a_misconfigured_process_says_so_and_ends(
    tmp_path: Path, tiny_model: Path, name: str, value: str
) -> None:
    error = await refusal(environment(tmp_path, tiny_model, **{name: value}))
    assert error.decode().startswith(f"ragcache_retriever: {name}: ")
    assert error.count(b"\n") == 1


async def parts_of(client: RetrieverClient) -> list[pb.BackupPart]:
    return [part async for part in client._stub.Backup(pb.BackupRequest(), timeout=60)]


async def restore(client: RetrieverClient, parts: list[pb.BackupPart]) -> pb.RestoreReply:
    return await client._stub.Restore(iter(parts), timeout=60)


async def texts_of(client: RetrieverClient) -> set[str]:
    page = await client.list_documents("default", page_size=1000)
    return {(await client.get_document("default", one.id)).text for one in page.documents}


@pytest.mark.timeout(900)
async def test_a_restore_ends_the_process_and_the_next_one_has_the_backup(
    tmp_path: Path, tiny_model: Path
) -> None:
    env = environment(tmp_path / "data", tiny_model)
    async with running(env) as (process, _, client):
        for name, text in SUBJECTS.items():
            await client.upsert_document(pb.Document(collection="default", id=name, text=text))
        parts = await parts_of(client)
        await client.delete_document("default", "orbit")
        await client.upsert_document(pb.Document(collection="default", id="new", text="New."))
        with pytest.raises(grpc.RpcError, match="backup"):
            await restore(client, [pb.BackupPart(data=b"no backup"), pb.BackupPart(last=True)])
        with pytest.raises(grpc.RpcError, match="has ended early"):
            await restore(client, parts)
        parts.append(pb.BackupPart(last=True))
        assert (await restore(client, parts)).documents == len(SUBJECTS)
        assert await asyncio.wait_for(process.wait(), 60) == 0
    async with running(env) as (_, _, client):
        assert await texts_of(client) == set(SUBJECTS.values())
        assert (await best(client, "spacecraft above our planet"))[0] == "orbit"
        [everything] = (await client.claim_deletes(10)).deletes
        assert everything.everything


@pytest.mark.timeout(900)
async def test_a_damaged_file_is_restored_without_a_loop_of_failing_starts(
    tmp_path: Path, tiny_model: Path
) -> None:
    health = f"127.0.0.1:{free_port()}"
    env = environment(tmp_path / "data", tiny_model, RAGCACHE_HEALTH_LISTEN=health)
    async with running(env) as (_, _, client):
        text = SUBJECTS["bakery"]
        await client.upsert_document(pb.Document(collection="default", id="bakery", text=text))
        parts = await parts_of(client)
    for path in (tmp_path / "data").glob(f"{FILE_NAME}*"):  # the log has pages, too
        path.write_bytes(b"damage" * 10_000)
    process = await start(env)
    try:
        port = (await log_line(process, r"listening on port (\d+)"))[1]
        async with httpx.AsyncClient(trust_env=False, timeout=60) as kubelet:
            assert (await kubelet.get(f"http://{health}/healthz")).status_code == 200
            unready = await kubelet.get(f"http://{health}/readyz")
        assert unready.status_code == 503
        assert "run 'ragcache restore FILE'" in unready.json()["progress"]
        client = RetrieverClient(f"127.0.0.1:{port}")
        with pytest.raises(Unavailable, match="moved to"):
            await client.list_collections()
        parts.append(pb.BackupPart(last=True))
        assert (await restore(client, parts)).documents == 1
        await client.close()
        assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
    async with running(env) as (_, _, client):
        assert await texts_of(client) == {SUBJECTS["bakery"]}
