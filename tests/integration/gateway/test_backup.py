"""Backups stream out and in, and a damaged one changes nothing."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator

from ragcache_core.documents.backup_file import HEAD
from ragcache_wire.channel import PART_BYTES
from tests.kit.gateway import World


async def test_a_backup_has_the_copy_and_its_checksum(gateway: World) -> None:
    reply = await gateway.client.get("/v1/backup")
    copy = b"first partsecond part"
    assert reply.content == HEAD + copy + hashlib.sha256(copy).digest()
    assert reply.headers["content-disposition"].startswith("attachment")


async def test_a_backup_can_be_restored(gateway: World) -> None:
    gateway.retriever.copy = [b"x" * PART_BYTES, b"y" * PART_BYTES, b"end"]
    file = (await gateway.client.get("/v1/backup")).content

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(file), 300_000):
            yield file[start : start + 300_000]

    reply = await gateway.client.post("/v1/restore", content=pieces())
    assert reply.json() == {"object": "backup.restored", "documents": 7}
    assert b"".join(gateway.retriever.restored) == b"".join(gateway.retriever.copy)
    assert max(map(len, gateway.retriever.restored)) <= PART_BYTES


async def test_a_damaged_backup_changes_nothing(gateway: World) -> None:
    file = (await gateway.client.get("/v1/backup")).content
    for damaged in (file[:-1], file[:30] + b"!" + file[31:], b"no backup at all", b""):
        reply = await gateway.client.post("/v1/restore", content=damaged)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "body"
    assert gateway.retriever.restored == []


async def test_a_retriever_that_is_away_is_named(gateway: World) -> None:
    file = (await gateway.client.get("/v1/backup")).content
    await gateway.servers["retriever"].stop()
    for reply in (
        await gateway.client.get("/v1/backup"),
        await gateway.client.post("/v1/restore", content=file),
    ):
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "retriever_unavailable"
