"""Retriever processes with PostgreSQL: they share documents, and outlive a restart of it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from ragcache_core.errors import Unavailable
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb
from tests.integration.retriever.test_process import (
    START_TIMEOUT_S,
    SUBJECTS,
    best,
    environment,
    refusal,
    running,
)
from tests.kit.postgres_server import PostgresServer
from tests.kit.wait import until


async def until_best(client: RetrieverClient, query: str, wanted: str) -> None:
    """Repeat a search until it finds a document first."""

    async def is_found() -> bool:
        with contextlib.suppress(Unavailable):
            return (await best(client, query))[:1] == [wanted]
        return False

    await until(is_found, f"{wanted} for {query!r}", timeout_s=START_TIMEOUT_S)


async def upsert(client: RetrieverClient, document_id: str, text: str) -> None:
    document = pb.Document(
        collection="default",
        id=document_id,
        title=document_id,
        text=text,
        content_type=pb.CONTENT_TYPE_TEXT,
    )
    await client.upsert_document(document)


@pytest.mark.timeout(600)
async def test_two_retrievers_share_a_database_that_restarts(
    postgres: PostgresServer, tmp_path: Path, tiny_model: Path
) -> None:
    url = postgres.new_schema()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    env = environment(
        tmp_path / "one", tiny_model, RAGCACHE_BACKEND="postgres", RAGCACHE_BACKEND_URL=url
    )
    async with running(env) as (_, _, one):
        for name, text in SUBJECTS.items():
            await upsert(one, name, text)
        assert (await best(one, "hot lava"))[0] == "volcano"
        async with running(env | {"RAGCACHE_DATA_DIR": str(tmp_path / "two")}) as (_, _, two):
            assert (await best(two, "fresh bread"))[0] == "bakery"
            await upsert(two, "bakery", "A library lends novels and keeps silence.")
            assert (await best(one, "borrow a book to read"))[0] == "bakery"
            postgres.stop()
            with pytest.raises(Unavailable):
                await best(one, "gravity")
            postgres.start()
            await until_best(one, "gravity", "orbit")
            await until_best(two, "gravity", "orbit")
            await upsert(one, "tides", "The moon pulls the sea up and down twice a day.")
            await until_best(two, "why does the sea rise and fall", "tides")


@pytest.mark.timeout(600)
async def test_a_retriever_goes_on_after_another_one_is_killed(
    postgres: PostgresServer, tmp_path: Path, tiny_model: Path
) -> None:
    url = postgres.new_schema()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    env = environment(
        tmp_path / "one", tiny_model, RAGCACHE_BACKEND="postgres", RAGCACHE_BACKEND_URL=url
    )
    async with (
        running(env) as (_, _, one),
        running(env | {"RAGCACHE_DATA_DIR": str(tmp_path / "two")}) as (killed, _, two),
    ):
        for name, text in SUBJECTS.items():
            await upsert(two, name, text)
        killed.kill()
        await killed.wait()
        assert (await best(one, "hot lava"))[0] == "volcano"
        await upsert(one, "tides", "The moon pulls the sea up and down twice a day.")
        assert (await best(one, "why does the sea rise and fall"))[0] == "tides"


async def test_a_wrong_url_ends_the_process(tmp_path: Path, tiny_model: Path) -> None:
    env = environment(
        tmp_path, tiny_model, RAGCACHE_BACKEND="postgres", RAGCACHE_BACKEND_URL="mysql://host"
    )
    assert b"RAGCACHE_BACKEND_URL" in await refusal(env)
