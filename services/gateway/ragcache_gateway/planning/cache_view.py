"""The cache view: the knowledge tree, kept current by the feeds of all engines and shards.

A gateway keeps a view of its own, and so does each of its processes. It holds no truth: after a
start it is built from snapshots, and any number of gateways read the same feeds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from ragcache_core.cluster.engine_queue import EngineQueue
from ragcache_core.identity.keys import ChunkKey
from ragcache_core.knowledge.knowledge_tree import KnowledgeTree
from ragcache_core.knowledge.predicted_cache import PredictedCache
from ragcache_gateway.planning.source_follower import FeedState, SourceFollower
from ragcache_gateway.tasks import BackgroundTasks
from ragcache_gateway.telemetry.cache import SourceSummary
from ragcache_gateway.telemetry.metrics import Metrics
from ragcache_wire.clients.feed_client import ENGINE_FEED, SHARD_FEED, FeedClient
from ragcache_wire.feeds.engine_load import from_load_message
from ragcache_wire.settings import GatewaySettings
from ragcache_wire.v1 import node_feed_pb2 as pb

log = logging.getLogger(__name__)

_ENGINE: Final = "engine:"

PREDICTED_BLOCK_TOKENS: Final = 128
"""Block size of vLLM on CPUs. On GPUs blocks are smaller, so the prediction is too low by less than
a block."""


_FeedId = tuple[str, str, str]
"""Source, address of its feed, and name of the gateway's client of it."""


@dataclass(frozen=True, slots=True)
class _Followed:
    follower: SourceFollower
    task: asyncio.Task[None]


class CacheView(BackgroundTasks):
    """Follows every engine and shard there is. For one event loop.

    Args:
        engines: Returns the engines by their address, each with the address of its feed. None: the
            engine has no gRPC server.
        shards: Returns the addresses of the shards.
        metrics: Get the number of sources by state.
        queues: Returns the queue of the engine at an address, which its feed keeps current. None:
            the engine has left.
    """

    def __init__(
        self,
        engines: Callable[[], Mapping[str, str | None]],
        shards: Callable[[], Sequence[str]],
        settings: GatewaySettings,
        metrics: Metrics,
        queues: Callable[[str], EngineQueue | None] = lambda _: None,
    ) -> None:
        super().__init__()
        # Assumed for an engine that does not report what it has. The hits that it reports correct
        # too large a size.
        self._predicted_tokens = settings.engine_cache_tokens
        self.tree = KnowledgeTree(settings.view_max_nodes)
        self._engines = engines
        self._shards = shards
        self._queues = queues
        self._credentials = settings.credentials
        self._poll_s = settings.engine_watch_s
        self._metrics = metrics
        self._followed: dict[_FeedId, _Followed] = {}
        self._predicted: dict[str, PredictedCache] = {}  # by source

    def start(self) -> None:
        """Follow the sources from now on."""
        work = self._repeat(self._refresh, self._poll_s, "cache view: sources are not updated")
        self._spawn(work, "cache view")

    @property
    def sources(self) -> frozenset[str]:
        """Sources whose residency in the tree is current, or predicted. Plans use no other."""
        synchronized = (
            one.follower.source
            for one in self._followed.values()
            if one.follower.state is FeedState.SYNCHRONIZED
        )
        return frozenset((*synchronized, *self._predicted))

    def predict(
        self, engine: str, chunks: Sequence[ChunkKey], num_tokens: Sequence[int], now_s: float
    ) -> None:
        """Record a prompt that is sent to an engine, if its cache is predicted.

        Args:
            engine: Its address.
            chunks: The prompt's segments.
            num_tokens: Length of each.
            now_s: Seconds of a clock that never goes back.
        """
        predicted = self._predicted.get(engine_source(engine))
        if predicted is not None:
            predicted.predict(chunks, num_tokens, now_s)

    def observe_hit(
        self, engine: str, chunks: Sequence[ChunkKey], cached_tokens: int, before_s: float
    ) -> None:
        """Record the cached tokens of an answer, if the engine's cache is predicted.

        See ``PredictedCache.observe_hit``.
        """
        predicted = self._predicted.get(engine_source(engine))
        if predicted is not None:
            predicted.observe_hit(chunks, cached_tokens, before_s)

    def engine_remains(self, chunks: Collection[ChunkKey]) -> dict[str, int | None]:
        """Return how many variants of chunks each engine has, by its address; None: unknown."""
        left = Counter(
            source
            for chunk in chunks
            for node in self.tree.variants_of(chunk, len(self.tree))
            for source in node.residency
        )
        return {
            engine_address(one.source): left[one.source]
            if one.state == FeedState.SYNCHRONIZED
            else None
            for one in self.summarize()
            if one.source.startswith(_ENGINE)
        }

    def summarize(self) -> list[SourceSummary]:
        """Return how well each source is known."""
        summaries = [
            SourceSummary(
                source=one.follower.source,
                state=self._state_of(one.follower),
                silence_s=round(one.follower.silence_s, 3),
                snapshots=one.follower.snapshots,
                problem=one.follower.problem,
            )
            for one in self._followed.values()
        ]
        followed = {summary.source for summary in summaries}
        summaries += [
            SourceSummary(source=source, state="predicted", silence_s=0, snapshots=0, problem="")
            for source in self._predicted.keys() - followed
        ]
        return sorted(summaries, key=lambda summary: summary.source)

    def update(self) -> None:
        """Follow sources that have come, and forget those that have gone."""
        engines = dict(self._engines())
        queues = {one: self._queues(one) for one, feed in engines.items() if feed}
        feeds: dict[_FeedId, EngineQueue | None] = {
            (engine_source(one), engines[one] or "", queue.sender if queue else ""): queue
            for one, queue in queues.items()
        }
        feeds |= {(shard_source(one), one, ""): None for one in self._shards()}
        for gone in self._followed.keys() - feeds.keys():
            self._followed.pop(gone).task.cancel()
        for one in feeds.keys() - self._followed.keys():
            self._follow(one, feeds[one])
        self._update_predicted({engine_source(one): feed for one, feed in engines.items()})

    def _follow(self, one: _FeedId, queue: EngineQueue | None) -> None:
        source, feed, reader = one
        method = ENGINE_FEED if source.startswith(_ENGINE) else SHARD_FEED
        follower = SourceFollower(
            self.tree,
            source,
            FeedClient(feed, method, self._credentials, reader),
            on_served=partial(self._end_prediction, source),
            on_message=partial(update_queue, queue) if queue is not None else lambda _: None,
        )
        task = self._spawn(follower.run(), f"feed {source}")
        self._followed[one] = _Followed(follower, task)

    def _update_predicted(self, engines: Mapping[str, str | None]) -> None:
        not_served = {
            one.follower.source
            for one in self._followed.values()
            if one.follower.state is FeedState.NOT_SERVED
        }
        without_feed = {
            source for source, feed in engines.items() if feed is None or source in not_served
        }
        for source in self._predicted.keys() - without_feed:
            self._end_prediction(source)
        for source in without_feed - self._predicted.keys():
            log.info("cache view: predicting a cache, there is no feed source=%s", source)
            self._predicted[source] = PredictedCache(
                self.tree,
                source,
                capacity_tokens=self._predicted_tokens,
                block_tokens=PREDICTED_BLOCK_TOKENS,
            )

    def _end_prediction(self, source: str) -> None:
        predicted = self._predicted.pop(source, None)
        if predicted is not None:
            predicted.clear()

    def _state_of(self, follower: SourceFollower) -> str:
        is_predicted = follower.source in self._predicted
        return "predicted" if is_predicted else follower.state.value

    def _count_sources(self) -> None:
        found = Counter((one.source.partition(":")[0], one.state) for one in self.summarize())
        self._metrics.set_sources(found)

    async def _refresh(self) -> None:
        self.update()
        self._count_sources()


def update_queue(queue: EngineQueue, message: pb.NodeChanges) -> None:
    """Take over what an engine says of its queue."""
    now_s = time.monotonic()
    if message.HasField("load"):
        load, accepted = from_load_message(message.load)
        queue.publish(load, accepted, now_s)
    else:
        queue.hear(now_s)


def engine_source(address: str) -> str:
    """Return the name of an engine in the tree."""
    return _ENGINE + address


def engine_address(source: str) -> str:
    """Return the address of an engine from its name in the tree."""
    return source.removeprefix(_ENGINE)


def shard_source(address: str) -> str:
    """Return the name of a shard in the tree."""
    return f"store:{address}"
