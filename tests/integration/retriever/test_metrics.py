"""Sizes of the knowledge base as metrics: those that are known, with a real store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from harness.processes import free_port
from ragcache_retriever import metrics as metrics_module
from ragcache_retriever.metrics import Metrics
from ragcache_retriever.store.records import DiskUse
from ragcache_wire.telemetry.metric_registry import exposition
from ragcache_wire.v1 import retriever_pb2 as pb
from tests.integration.retriever.test_process import SUBJECTS, environment, running
from tests.kit.postgres_server import PostgresServer
from tests.kit.retriever import make_knowledge_base, serving, tokenizer_of
from tests.kit.wait import until

SIZES = (
    "collections",
    "documents",
    "chunks",
    "text_bytes",
    "remake_waiting",
    "index_missed",
    "disk_used_bytes",
)
FREE = "ragcache_retriever_disk_free_bytes"


def levels(page: str) -> Mapping[str, float]:
    """Return the values of the series without labels."""
    families = text_string_to_metric_families(page)
    return {sample.name: sample.value for one in families for sample in one.samples}


async def test_a_size_has_no_series_before_it_is_known(tmp_path: Path, tiny_model: Path) -> None:
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model))
    metrics = Metrics()

    def page() -> Mapping[str, float]:
        return levels(exposition(metrics.collectors, "")[1].decode())

    assert not page().keys() & {FREE, "ragcache_retriever_documents"}
    async with serving(knowledge_base) as client:
        for name, text in SUBJECTS.items():
            await client.upsert_document(
                pb.Document(collection="default", id=name, title=name, text=text)
            )
        following = asyncio.create_task(metrics.follow(knowledge_base))
        await until(lambda: "ragcache_retriever_documents" in page())
        found = page()
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
    assert found["ragcache_retriever_documents"] == len(SUBJECTS)
    assert found["ragcache_retriever_text_bytes"] == sum(map(len, SUBJECTS.values()))
    assert {f"ragcache_retriever_{name}" for name in SIZES} <= found.keys()
    assert min(found[FREE], found["ragcache_retriever_disk_used_bytes"]) > 0


async def test_an_unexpected_error_does_not_end_the_reads_of_sizes(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_module, "LEVELS_INTERVAL_S", 0.01)
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model))
    metrics, disk = Metrics(), knowledge_base.store.database.disk
    has_read = asyncio.Event()
    failures: list[str] = []

    def failing() -> DiskUse:
        if len(failures) < 2:
            failures.append("disk")
            raise OSError(5, "Input/output error")
        loop.call_soon_threadsafe(has_read.set)
        return disk()

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(knowledge_base.store.database, "disk", failing)
    async with serving(knowledge_base):
        following = asyncio.create_task(metrics.follow(knowledge_base))
        async with asyncio.timeout(60):
            await has_read.wait()
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
    assert len(failures) == 2


@pytest.mark.timeout(600)
async def test_postgresql_tells_no_free_space(
    postgres: PostgresServer, tmp_path: Path, tiny_model: Path
) -> None:
    health = f"127.0.0.1:{free_port()}"
    env = environment(
        tmp_path,
        tiny_model,
        RAGCACHE_BACKEND="postgres",
        RAGCACHE_BACKEND_URL=postgres.new_schema(),
        RAGCACHE_HEALTH_LISTEN=health,
    )
    async with running(env), httpx.AsyncClient(timeout=60) as prometheus:

        async def known_levels() -> Mapping[str, float]:
            found = levels((await prometheus.get(f"http://{health}/metrics")).text)
            return found if "ragcache_retriever_documents" in found else {}

        found = await until(known_levels)
    assert found["ragcache_retriever_disk_used_bytes"] > 0
    assert FREE not in found
