"""A source that a test follows as a gateway does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ragcache_core.identity.keys import VariantKey
from ragcache_core.knowledge.knowledge_tree import KnowledgeTree
from ragcache_gateway.planning.source_follower import FeedState, SourceFollower
from ragcache_wire.clients.feed_client import FeedClient
from ragcache_wire.watched.signing_keys import SigningKeys

WAIT_S = 60.0


@dataclass
class FollowedSource:
    """A follower, and the tree that it fills."""

    tree: KnowledgeTree
    follower: SourceFollower

    @property
    def is_synchronized(self) -> bool:
        return self.follower.state is FeedState.SYNCHRONIZED

    @property
    def tiers(self) -> dict[VariantKey, str]:
        """The tier of each node that the source has."""
        return tiers_of(self.tree, self.follower.source)

    async def synchronized(self) -> None:
        await until(lambda: self.is_synchronized)

    async def shows(self, tiers: dict[VariantKey, str]) -> None:
        """Wait until the view of the source is this."""
        await until(lambda: self.is_synchronized and self.tiers == tiers)


def tiers_of(tree: KnowledgeTree, source: str) -> dict[VariantKey, str]:
    """Return the tier of each node that a source has."""
    tree.check()
    return {
        node.key: node.residency[source].tier
        for node in tree._by_source.get(source, ())
        if node.key is not None
    }


async def until(claim: Callable[[], bool]) -> None:
    """Wait until a claim holds."""
    deadline = time.monotonic() + WAIT_S
    while not claim():
        assert time.monotonic() < deadline, "the claim never held"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def following(
    address: str, method: str, keys: SigningKeys | None = None
) -> AsyncIterator[FollowedSource]:
    """Follow the source at an address until the end."""
    tree = KnowledgeTree(100_000)
    follower = SourceFollower(tree, f"test:{address}", FeedClient(address, method, keys))
    task = asyncio.create_task(follower.run())
    try:
        yield FollowedSource(tree, follower)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
