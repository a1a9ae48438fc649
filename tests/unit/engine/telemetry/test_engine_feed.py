"""The feed of an engine over its real gRPC server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.processes import free_port
from ragcache_core.cluster.pending_work import EngineLoad
from ragcache_core.cluster.sent_requests import AcceptedNumbers, SentRequest
from ragcache_core.cost.load_or_compute import ReuseCosts
from ragcache_core.errors import Unauthenticated, Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.knowledge.node_change import NodeChange, StoredNode
from ragcache_engine.telemetry import request_records
from ragcache_engine.telemetry.engine_feed import MAX_SENDERS, EngineFeed
from ragcache_engine.telemetry.request_records import RequestRecords, serve_records
from ragcache_wire.clients.engine_client import EngineClient
from ragcache_wire.clients.feed_client import ENGINE_FEED, SHARD_FEED, FeedClient, FeedNotServed
from ragcache_wire.feeds.engine_load import from_load_message
from ragcache_wire.peers.credentials import Credentials
from ragcache_wire.v1 import node_feed_pb2 as pb
from ragcache_wire.watched.signing_keys import SigningKeys


def stored(number: int) -> NodeChange:
    key = VariantKey(number.to_bytes(16), bytes(16))
    return NodeChange.stored("device", StoredNode(key, None, 5, 0, exact=True, cost_s=0.0))


@pytest.fixture
def feed() -> EngineFeed:
    return EngineFeed()


@pytest.fixture
def address(feed: EngineFeed) -> Iterator[str]:
    address = f"127.0.0.1:{free_port()}"
    server = serve_records(RequestRecords(), ReuseCosts(), address, feed)
    yield address
    server.stop(None).wait()


@pytest.fixture
async def client(address: str) -> AsyncIterator[FeedClient]:
    client = FeedClient(address, ENGINE_FEED)
    yield client
    await client.close()


async def test_a_reader_gets_what_there_is_and_then_each_change(
    feed: EngineFeed, client: FeedClient
) -> None:
    feed.publish([stored(1), stored(2), NodeChange(stored(1).key)])
    async with aclosing(client.watch()) as messages:
        begin, part, end = [await anext(messages) for _ in range(3)]
        marks = [message.snapshot for message in (begin, part, end)]
        assert marks == [pb.NodeChanges.BEGIN, pb.NodeChanges.PART, pb.NodeChanges.END]
        assert [change.key for change in part.changes] == [stored(2).key.to_bytes()]
        feed.publish([stored(3), stored(4)])
        message = await anext(messages)
        while not message.changes:  # a heartbeat may have come before
            message = await anext(messages)
        assert (message.sequence, len(message.changes)) == (end.sequence + 2, 2)


async def test_a_reader_without_the_engines_key_is_refused(tmp_path: Path) -> None:
    for name, text in (("own", "a1" * 32), ("other", "b2" * 32)):
        (tmp_path / name).write_text(text)
    own, other = SigningKeys(tmp_path / "own"), SigningKeys(tmp_path / "other")
    address = f"127.0.0.1:{free_port()}"
    server = serve_records(RequestRecords(), ReuseCosts(), address, EngineFeed(), Credentials(own))
    for keys in (None, other):
        refused = FeedClient(address, ENGINE_FEED, Credentials(keys))
        with pytest.raises(Unauthenticated):
            await anext(refused.watch())
        await refused.close()
        refused_client = EngineClient(address, Credentials(keys))
        for call in (refused_client.costs(), refused_client.request_record("r")):
            with pytest.raises(Unauthenticated):
                await call
        await refused_client.close()
    client = EngineClient(address, Credentials(own))
    assert not (await client.costs()).loads
    await client.close()
    admitted = FeedClient(address, ENGINE_FEED, Credentials(own))
    async with aclosing(admitted.watch()) as messages:
        assert (await anext(messages)).snapshot == pb.NodeChanges.BEGIN
    await admitted.close()
    server.stop(None).wait()


async def test_an_engine_on_the_network_without_a_key_has_no_feed() -> None:
    port = free_port()
    server = serve_records(RequestRecords(), ReuseCosts(), f"0.0.0.0:{port}", EngineFeed())
    client = FeedClient(f"127.0.0.1:{port}", ENGINE_FEED)
    with pytest.raises(Unauthenticated, match="RAGCACHE_SIGNING_KEY_FILE"):
        await anext(client.watch())
    await client.close()
    server.stop(None).wait()


async def test_readers_are_bounded_and_one_that_leaves_makes_space(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_records, "MAX_WATCHERS", 2)
    address = f"127.0.0.1:{free_port()}"
    server = serve_records(RequestRecords(), ReuseCosts(), address, EngineFeed())
    client = FeedClient(address, ENGINE_FEED)
    watches = [client.watch() for _ in range(2)]
    for messages in watches:
        await anext(messages)
    with pytest.raises(Unavailable, match="watchers"):
        await anext(client.watch())
    await watches.pop().aclose()
    while True:
        again = client.watch()
        try:
            await anext(again)
            break
        except Unavailable:  # the server learns a little later that the reader has left
            await again.aclose()
    for messages in (*watches, again):
        await messages.aclose()
    await client.close()
    server.stop(None).wait()


async def test_a_service_of_another_kind_has_no_such_feed(address: str) -> None:
    client = FeedClient(address, SHARD_FEED)
    with pytest.raises(FeedNotServed):
        await anext(client.watch())
    await client.close()


def test_a_reader_gets_the_newest_load_and_not_too_often(
    feed: EngineFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    clock = SimpleNamespace(monotonic=lambda: now_s, sleep=sleep)
    monkeypatch.setattr(request_records, "time", clock)
    servicer = request_records._EngineServicer(RequestRecords(), ReuseCosts(), feed)
    messages = servicer._messages(pb.WatchRequest(reader="gateway"), lambda: True)
    begin, end = next(messages), next(messages)
    assert (begin.HasField("load"), end.HasField("load")) == (True, False)
    assert begin.load == pb.EngineLoad()
    for number in range(1, 4):
        load = EngineLoad(number / 4, num_pending=number, free_tokens=64)
        feed.publish_load(load, [SentRequest("gateway", number), SentRequest("other", 9)])
    feed.publish([stored(1)])  # it does not wait
    assert not next(messages).HasField("load")
    message = next(messages)
    assert now_s >= 100.0 + request_records.LOAD_INTERVAL_S
    assert not message.changes
    assert from_load_message(message.load) == (
        EngineLoad(0.75, num_pending=3, free_tokens=64),
        AcceptedNumbers(3, 0b111),
    )
    feed.publish([stored(2)])
    assert not next(messages).HasField("load")


def test_senders_are_bounded(feed: EngineFeed) -> None:
    for number in range(MAX_SENDERS + 1):
        feed.publish_load(EngineLoad(), [SentRequest(str(number), 1)])
    known = [feed.load_after(0, str(number)) for number in (0, 1, MAX_SENDERS)]
    assert [found[2].last for found in known if found] == [0, 1, 1]


def test_seconds_that_are_no_time_count_as_none() -> None:
    message = pb.EngineLoad(pending_s=float("nan"), background_s=-1.0)
    assert from_load_message(message) == (EngineLoad(), AcceptedNumbers())
