"""Who deletes a document can prove it: a receipt, and a check that finds what is left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner, Result

from harness.processes import CacheStore, running_cachestore
from ragcache_cli.main import app
from ragcache_core.identity.keys import PUBLIC_DOMAIN, VariantKey
from ragcache_core.identity.variant import Origin
from ragcache_core.knowledge.node_change import NodeChange, StoredNode
from ragcache_core.plan.reuse_plan import document_name
from ragcache_engine.telemetry.engine_feed import EngineFeed
from ragcache_kv.store_client.client import StoreClient
from ragcache_retriever.service import RetrieverService
from ragcache_wire.feeds.feed_cursor import FeedCursor
from ragcache_wire.watched.signing_keys import SigningKeys
from tests.kit.gateway import CONFIG, FakeRecords, FakeRetriever, World
from tests.kit.retriever import make_knowledge_base, tokenizer_of
from tests.kit.store import put_value
from tests.kit.wait import until

TEXT = "Jane Roe lives in Lund.\n"
OTHER = VariantKey(b"another chunk...", bytes(16))


@dataclass
class Platform:
    """A gateway with a real retriever, and shards that are processes."""

    world: World
    shards: Sequence[CacheStore]
    feed: EngineFeed

    async def put_document(self) -> VariantKey:
        """Write the document. Return the key of its chunk after nothing."""
        reply = await self.world.client.post("/v1/documents", json={"id": "jane", "text": TEXT})
        assert reply.status_code == 200, reply.text
        return VariantKey(self.world.chunk_key(TEXT.strip()), bytes(16))

    def store_kv(self, key: VariantKey) -> None:
        """Store KV of the chunk, and KV computed after it, on every shard."""
        after = VariantKey(OTHER.chunk, b"after the chunk.")
        for shard in self.shards:
            client = StoreClient(shard.address, transports=("grpc",))
            try:
                put_value(client, key, b"kv" * 512, origin=_origin("jane"))
                origin = Origin(prefix_chunks=(key.chunk,), domain=PUBLIC_DOMAIN)
                put_value(client, after, b"kv" * 512, origin=origin)
            finally:
                client.close()

    async def delete(self) -> dict[str, Any]:
        reply = await self.world.client.delete("/v1/documents/jane")
        assert reply.status_code == 200, reply.text
        deleted: dict[str, Any] = reply.json()
        return deleted

    async def report(self, **asked: Any) -> dict[str, Any]:
        reply = await self.world.client.post("/v1/erasure", json=asked)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    async def command(self, *arguments: str) -> Result:
        """Run ``ragcache erasure``."""
        line = ["erasure", *arguments, "--gateway", self.world.base_url]
        return await asyncio.to_thread(CliRunner().invoke, app, line)


class FedRecords(FakeRecords):
    """An engine that tells what its prefix cache has."""

    def __init__(self) -> None:
        super().__init__()
        self.feed = EngineFeed()

    async def Watch(self, request: Any, context: Any) -> Any:  # noqa: N802
        cursor = FeedCursor(self.feed)
        while True:
            message = cursor.next()
            yield message or cursor.heartbeat()
            if message is None:
                await asyncio.sleep(0.05)


def _origin(document: str) -> Origin:
    return Origin(document=document_name("default", document), domain=PUBLIC_DOMAIN)


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[list[CacheStore]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(running_cachestore(tmp_path / name, shared=False))
            for name in ("a", "b")
        ]


@pytest.fixture
async def platform(
    tiny_model: Path, tmp_path: Path, shards: list[CacheStore]
) -> AsyncGenerator[Platform, None]:
    keys = tmp_path / "keys"
    keys.write_text("ab" * 32)
    async with AsyncExitStack() as stack:
        base = make_knowledge_base(tmp_path / "documents", tokenizer_of(tiny_model))
        stack.push_async_callback(base.close)
        records = FedRecords()
        world = World(
            CONFIG.replace(signing_key_file=SigningKeys(keys)),
            retriever=cast("FakeRetriever", RetrieverService(base)),
            records=records,
            shards=tuple(shard.address for shard in shards),
        )
        await world.start(stack, tiny_model)
        await base.load()
        reply = await world.client.put("/v1/collections/default", json={"labels": False})
        assert reply.status_code == 200, reply.text
        yield Platform(world, shards, records.feed)


def states(report: dict[str, Any], kind: str) -> list[str]:
    return [one["state"] for one in report[kind]]


async def test_after_a_delete_nothing_is_left_and_the_receipt_proves_it(
    platform: Platform, tmp_path: Path
) -> None:
    key = await platform.put_document()
    platform.store_kv(key)
    deleted = await platform.delete()
    receipt = deleted["receipt"]
    assert (receipt["shards"], deleted["removed_variants"]) == ([2, 2], 4)
    assert TEXT.strip() not in json.dumps(receipt)

    async def is_erased() -> bool:
        return bool((await platform.report(receipt=receipt))["erased"])

    await until(is_erased)
    file = tmp_path / "receipt.json"
    file.write_text(json.dumps(deleted))
    result = await platform.command("--receipt", str(file), "--wait", "60")
    assert result.exit_code == 0, result.output
    assert "nothing is left" in result.output
    assert "the receipt is signed by this platform" in result.output
    assert "zero at the latest" in result.output
    assert "backups" in result.output


async def test_what_is_planted_after_a_delete_is_found(platform: Platform, tmp_path: Path) -> None:
    key = await platform.put_document()
    receipt = (await platform.delete())["receipt"]
    platform.store_kv(key)
    platform.feed.publish(
        [NodeChange.stored("device", StoredNode(key, None, 8, 0, exact=True, cost_s=0.1))]
    )

    async def engine_has_it() -> bool:
        return states(await platform.report(receipt=receipt), "engines") == ["left"]

    await until(engine_has_it)
    report = await platform.report(receipt=receipt)
    assert not report["erased"]
    assert states(report, "shards") == ["left", "left"]
    assert [one["in_memory"] for one in report["shards"]] == [2, 2]
    assert report["engines"][0]["in_memory"] == 1
    by_name = await platform.report(id="jane")
    assert [one["in_memory"] for one in by_name["shards"]] == [1, 1], "its name finds its own KV"
    file = tmp_path / "receipt.json"
    file.write_text(json.dumps(receipt))
    result = await platform.command("--receipt", str(file), "--output", "json")
    assert result.exit_code == 1
    assert json.loads(result.output)["erased"] is False


async def test_a_document_that_is_still_stored_is_found(platform: Platform) -> None:
    await platform.put_document()
    assert (await platform.report(id="jane"))["document"] == "left"
    result = await platform.command("jane")
    assert result.exit_code == 1
    assert "not proved to be erased" in result.output


async def test_a_shard_that_does_not_answer_is_unknown(platform: Platform) -> None:
    key = await platform.put_document()
    platform.store_kv(key)
    platform.shards[1].service.kill()
    deleted = await platform.delete()
    assert sorted(deleted["receipt"]["shards"], key=str) == [2, None]
    report = await platform.report(receipt=deleted["receipt"])
    found = {one["address"]: one["state"] for one in report["shards"]}
    assert found == {platform.shards[0].address: "zero", platform.shards[1].address: "unknown"}
    assert not report["erased"]


async def test_a_receipt_that_was_changed_is_not_genuine(
    platform: Platform, tmp_path: Path
) -> None:
    await platform.put_document()
    receipt = (await platform.delete())["receipt"]
    assert (await platform.report(receipt=receipt))["is_genuine"] is True
    forged = receipt | {"made_at_ms": receipt["made_at_ms"] - 1000}
    assert (await platform.report(receipt=forged))["is_genuine"] is False
    unsigned = {name: value for name, value in forged.items() if name != "signature"}
    file = tmp_path / "receipt.json"
    for one in (forged, unsigned):
        file.write_text(json.dumps(one))
        result = await platform.command("--receipt", str(file))
        assert result.exit_code == 1
        assert "is NOT signed" in result.output
    file.write_text("[]")
    result = await platform.command("--receipt", str(file))
    assert result.exit_code == 2


async def test_a_request_without_a_document_names_the_field(platform: Platform) -> None:
    reply = await platform.world.client.post("/v1/erasure", json={})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "id"
