"""The cache view over a real cache store process and the real service of an engine."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness.processes import CacheStore, free_port, start_cachestore
from ragcache_core.cost.load_or_compute import ReuseCosts
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Origin
from ragcache_core.knowledge.node_change import NodeChange, StoredNode
from ragcache_core.store_api import Deletion
from ragcache_engine.telemetry.engine_feed import EngineFeed
from ragcache_engine.telemetry.request_records import RequestRecords, serve_records
from ragcache_gateway.planning import source_follower
from ragcache_gateway.planning.cache_view import (
    PREDICTED_BLOCK_TOKENS,
    CacheView,
    engine_source,
    shard_source,
)
from ragcache_gateway.planning.source_follower import MAX_SILENCE_S
from ragcache_gateway.telemetry.metrics import Metrics
from ragcache_kv.store_client.client import StoreClient
from ragcache_wire.clients.feed_client import SHARD_FEED
from ragcache_wire.feeds.feed_cursor import BATCH_CHANGES
from ragcache_wire.peers.credentials import Credentials
from ragcache_wire.watched.signing_keys import SigningKeys
from tests.kit.connection import CuttableConnection
from tests.kit.gateway import CONFIG, WAIT_S, following, tiers_of
from tests.kit.store import key, put_value, value
from tests.kit.stored_prefix import stored_tokens
from tests.kit.wait import until

HTTP = "10.0.0.1:8000"
"""The engine's name for the gateway. No request is sent there."""


@dataclass
class Sources:
    """An engine's service and a store process, and the views that follow both."""

    folder: Path
    keys: SigningKeys
    store: CacheStore
    client: StoreClient
    records: str
    stack: AsyncExitStack
    feed: EngineFeed = field(default_factory=EngineFeed)
    engines: dict[str, str | None] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)

    def start_engine(self, feed: EngineFeed | None = None) -> None:
        """Serve a new engine's feed at the address of the one before."""
        self.feed = feed or EngineFeed()
        self.server = serve_records(
            RequestRecords(), ReuseCosts(), self.records, self.feed, Credentials(self.keys)
        )
        self.engines = {HTTP: self.records}

    def stop_engine(self) -> None:
        self.server.stop(None).wait()

    async def view(self, keys: SigningKeys | None = None) -> CacheView:
        """Start a gateway's view."""
        view = CacheView(
            lambda: self.engines,
            lambda: (self.store.address,),
            CONFIG.replace(signing_key_file=keys or self.keys, engine_watch_s=0.02),
            self.metrics,
        )
        view.start()
        self.stack.push_async_callback(view.close)
        return view

    def counted(self, kind: str, state: str) -> float | None:
        """How many sources of a kind the metrics have in a state."""
        labels = {"kind": kind, "state": state}
        return self.metrics.registry.get_sample_value("ragcache_gateway_sources", labels)

    def put(self, number: int, parent: int | None = None) -> None:
        above = None if parent is None else key(parent)
        put_value(self.client, key(number), value(100, number), origin=Origin(parent=above))

    def tell(self, number: int, tier: str = "device", parent: int | None = None) -> None:
        above = None if parent is None else key(parent)
        node = StoredNode(key(number), above, 256, 0, exact=True, cost_s=0.1)
        self.feed.publish([NodeChange.stored(tier, node)])

    @property
    def names(self) -> set[str]:
        return {engine_source(HTTP), shard_source(self.store.address)}


def residency(view: CacheView) -> dict[str, dict[VariantKey, str]]:
    """What a view has of each source that plans may use."""
    return {source: tiers_of(view.tree, source) for source in sorted(view.sources)}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheStore]:
    folder = tmp_path_factory.mktemp("view")
    (folder / "keys").write_text("a1" * 32)
    store = start_cachestore(folder, env={"RAGCACHE_SIGNING_KEY_FILE": str(folder / "keys")})
    yield store
    store.service.stop()


@pytest.fixture
async def sources(tmp_path: Path, store: CacheStore) -> AsyncIterator[Sources]:
    (tmp_path / "keys").write_text("a1" * 32)
    keys = SigningKeys(tmp_path / "keys")
    client = StoreClient(
        store.address, credentials=Credentials(SigningKeys(store.service.log.parent / "keys"))
    )
    client.delete(Deletion(id=os.urandom(16), domain="public"))
    async with AsyncExitStack() as stack:
        sources = Sources(tmp_path, keys, store, client, f"127.0.0.1:{free_port()}", stack)
        sources.start_engine()
        yield sources
    sources.stop_engine()
    client.close()


async def test_a_restarted_gateways_view_equals_one_that_never_stopped(sources: Sources) -> None:
    first = await sources.view()
    other = await sources.view()
    for number in range(1, 30):
        sources.put(number, number - 1 if number > 1 else None)
        sources.tell(number, parent=number - 1 if number > 1 else None)
    await until(lambda: first.sources == sources.names)
    sources.tell(40, "host")
    sources.client.delete(Deletion(id=os.urandom(16), chunks=(key(7).chunk,)))
    sources.feed.publish([NodeChange(key(29))])
    sources.put(41)
    expected_device = {key(number): "device" for number in range(1, 29)} | {key(40): "host"}
    expected_memory = {key(n): "memory" for n in range(1, 30) if n != 7} | {key(41): "memory"}

    def is_current(view: CacheView) -> bool:
        found = residency(view)
        engine, shard = (
            found.get(engine_source(HTTP)),
            found.get(shard_source(sources.store.address)),
        )
        # What was moved to disk meanwhile is in one of the two tiers.
        return engine == expected_device and (shard or {}).keys() == expected_memory.keys()

    await until(lambda: is_current(first))
    await until(lambda: is_current(other))
    restarted = await sources.view()
    await until(lambda: is_current(restarted))
    await until(lambda: residency(restarted) == residency(first) == residency(other))
    chunks = [key(number).chunk for number in range(1, 7)]
    views = (first, other, restarted)
    assert [stored_tokens(view.tree, chunks) for view in views] == [6 * 256] * 3
    assert [len(view.tree) for view in (first, restarted)] == [len(other.tree)] * 2


async def test_a_restarted_engine_leads_to_a_snapshot_and_never_to_a_stale_view(
    sources: Sources,
) -> None:
    view = await sources.view()
    engine = engine_source(HTTP)
    sources.tell(1)
    await until(lambda: residency(view).get(engine) == {key(1): "device"})
    sources.stop_engine()
    await until(lambda: engine not in view.sources)
    sources.start_engine()
    sources.tell(2)
    await until(lambda: residency(view).get(engine) == {key(2): "device"})
    (summary,) = [one for one in view.summarize() if one.source == engine]
    assert (summary.state, summary.snapshots) == ("synchronized", 2)


async def test_an_engine_that_leaves_the_pool_is_forgotten(sources: Sources) -> None:
    view = await sources.view()
    sources.tell(1)
    await until(lambda: residency(view).get(engine_source(HTTP)) == {key(1): "device"})
    sources.engines = {}
    await until(lambda: not tiers_of(view.tree, engine_source(HTTP)))
    assert engine_source(HTTP) not in view.sources
    assert {one.source for one in view.summarize()} == {shard_source(sources.store.address)}


class HeldFeed(EngineFeed):
    """A feed whose snapshots stop after their first part until they are released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def node_batches(self) -> Iterator[list[NodeChange]]:
        for batch in super().node_batches():
            yield batch
            self.released.wait(WAIT_S)


async def test_a_connection_that_drops_within_a_snapshot_leads_to_another_one(
    sources: Sources,
) -> None:
    sources.stop_engine()
    held = HeldFeed()
    sources.start_engine(held)
    for number in range(1, 2 * BATCH_CHANGES):
        sources.tell(number)
    async with CuttableConnection.to(f"https://{sources.records}") as relay:
        sources.engines = {HTTP: relay.url.removeprefix("https://")}
        view = await sources.view()
        source = engine_source(HTTP)
        await until(lambda: len(tiers_of(view.tree, source)) == BATCH_CHANGES)
        assert source not in view.sources, "plans do not use a part of a snapshot"
        await relay.cut()
        sources.feed.publish([NodeChange(key(number)) for number in range(1, 50)])
        held.released.set()
        assert source not in view.sources
        await relay.restore()
        await until(lambda: source in view.sources)
        expected = {key(n): "device" for n in range(50, 2 * BATCH_CHANGES)}
        assert tiers_of(view.tree, source) == expected


async def test_a_reader_that_lags_behind_the_log_gets_a_snapshot(sources: Sources) -> None:
    sources.stop_engine()
    sources.start_engine(EngineFeed(max_changes=8))
    view = await sources.view()
    await until(lambda: engine_source(HTTP) in view.sources)
    nodes = [StoredNode(key(n), None, 1, 0, exact=True, cost_s=0.0) for n in range(1, 200)]
    sources.feed.publish([NodeChange.stored("device", node) for node in nodes])
    expected = {node.key: "device" for node in nodes}
    await until(lambda: residency(view).get(engine_source(HTTP)) == expected)


async def test_a_stopped_store_is_not_used_until_it_goes_on(
    sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_follower, "MAX_SILENCE_S", MAX_SILENCE_S)
    view = await sources.view()
    shard, pid = shard_source(sources.store.address), sources.store.service.pid
    sources.put(1)
    await until(lambda: key(1) in residency(view).get(shard, {}))
    os.kill(pid, signal.SIGSTOP)
    try:
        await until(lambda: view.sources == {engine_source(HTTP)})
        (summary,) = [one for one in view.summarize() if one.source == shard]
        assert summary.state == "silent"
        assert summary.silence_s >= MAX_SILENCE_S  # rounded
    finally:
        os.kill(pid, signal.SIGCONT)
    sources.put(2)
    await until(lambda: residency(view).get(shard, {}).keys() == {key(1), key(2)})
    (summary,) = [one for one in view.summarize() if one.source == shard]
    assert summary.snapshots == 1, "nothing was lost"


async def test_a_gateway_with_another_key_uses_nothing_and_says_why(sources: Sources) -> None:
    (sources.folder / "others").write_text("b2" * 32)
    view = await sources.view(SigningKeys(sources.folder / "others"))
    await until(lambda: {one.state for one in view.summarize()} == {"refused"})
    assert view.sources == frozenset()
    assert all("RAGCACHE_SIGNING_KEY_FILE" in one.problem for one in view.summarize())


async def test_keys_are_rotated_while_a_view_follows(sources: Sources) -> None:
    view = await sources.view()
    await until(lambda: view.sources == sources.names)
    shard = sources.store.address
    (sources.folder / "keys").write_text("b2" * 32 + "\n" + "a1" * 32)
    await until(lambda: len(sources.keys.current()) == 2)
    sources.stop_engine()
    sources.start_engine()
    sources.tell(1)
    await until(lambda: residency(view).get(engine_source(HTTP)) == {key(1): "device"})
    # The shard has the old key only, and a call that goes on is not ended.
    assert shard_source(shard) in view.sources
    async with following(shard, SHARD_FEED, Credentials(sources.keys)) as refused:
        await until(lambda: refused.follower.state == "refused")


async def test_an_engine_without_a_feed_is_predicted(sources: Sources) -> None:
    sources.engines = {HTTP: None}
    view = await sources.view()
    engine = engine_source(HTTP)
    await until(lambda: engine in view.sources)
    chunks = [key(number).chunk for number in range(3)]
    # Chunks of one block: an engine that finds half a block contradicts nothing.
    size = PREDICTED_BLOCK_TOKENS
    view.predict(HTTP, chunks, [size] * 3, now_s=1.0)
    assert stored_tokens(view.tree, chunks, [engine]) == 3 * size
    view.observe_hit(HTTP, [*chunks[:2], key(9).chunk], size, before_s=2.0)
    assert stored_tokens(view.tree, chunks, [engine]) == 2 * size
    (summary,) = [one for one in view.summarize() if one.source == engine]
    assert summary.state == "predicted"
    await until(lambda: sources.counted("engine", "predicted") == 1)
    await until(lambda: sources.counted("store", "synchronized") == 1)
    assert sources.counted("engine", "synchronized") == 0


async def test_an_engine_whose_service_has_no_feed_is_predicted_until_it_has_one(
    sources: Sources,
) -> None:
    # A shard's address: its server does not know the method of engines.
    sources.engines = {HTTP: sources.store.address}
    view = await sources.view()
    engine = engine_source(HTTP)
    await until(lambda: engine in view.sources)
    chunks = [key(number).chunk for number in range(2)]
    view.predict(HTTP, chunks, [64, 64], now_s=1.0)
    sources.engines = {HTTP: sources.records}
    sources.tell(5)
    await until(lambda: sources.counted("engine", "synchronized") == 1)
    assert tiers_of(view.tree, engine) == {key(5): "device"}
    assert stored_tokens(view.tree, chunks) == 0
