"""No message of a feed stops the gateway that follows it, or costs memory for ever."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Final

import grpc
import grpc.aio
import pytest

from ragcache_core.cluster.engine_queue import EngineQueue
from ragcache_core.knowledge.knowledge_tree import KnowledgeTree
from ragcache_gateway.planning.cache_view import update_queue
from ragcache_gateway.planning.source_follower import FeedState, SourceFollower
from ragcache_wire.clients.feed_client import ENGINE_FEED, FeedClient
from ragcache_wire.peers.credentials import NO_CREDENTIALS
from ragcache_wire.v1 import node_feed_pb2 as pb
from tests.attack.fuzzed_process import MAX_GROWTH_BYTES, Usage
from tests.attack.mutations import mutated_message

SEED: Final = 37
WARM_UP: Final = 2000
MAX_NODES: Final = 1000
MAX_MESSAGES: Final = 8
"""Of one call of a feed."""

BOOT: Final = b"b" * 16
COUNTS: Final = [
    pytest.param(10_000, marks=pytest.mark.timeout(300)),
    pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
]


def valid_messages(rng: random.Random) -> list[pb.NodeChanges]:
    """Return a snapshot in parts, and changes after it."""

    def changes() -> list[pb.NodeChange]:
        found = []
        for _ in range(rng.randint(0, 3)):
            key, parent = (bytes([rng.randrange(50)]) * 32 for _ in range(2))
            tier = rng.choice(("device", "host", "memory", "disk", ""))
            found.append(
                pb.NodeChange(
                    key=key,
                    tier=tier,
                    parent=rng.choice((parent, b"")),
                    num_tokens=100,
                    num_bytes=1000,
                    exact=True,
                    cost_s=0.01,
                )
            )
        return found

    load = pb.EngineLoad(
        pending_s=0.5, num_pending=2, free_tokens=100, last_accepted=3, accepted=7, begun_s=0.1
    )
    marks = (pb.NodeChanges.BEGIN, pb.NodeChanges.PART, pb.NodeChanges.END)
    messages = [pb.NodeChanges(boot=BOOT, sequence=0, snapshot=mark) for mark in marks]
    messages[1].changes.extend(changes())
    sequence = 0
    for _ in range(MAX_MESSAGES - len(messages)):
        more = changes()
        sequence += len(more)
        messages.append(pb.NodeChanges(boot=BOOT, sequence=sequence, changes=more, load=load))
    return messages


class FuzzedFeed(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """The feed of a source that sends what its proto does not define."""

    def __init__(self) -> None:
        self._rng = random.Random(SEED)
        self.sent = 0

    def service(self, handler_call_details: Any) -> Any:
        """Serve every method."""
        return grpc.unary_stream_rpc_method_handler(self._watch)

    async def _watch(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        rng = self._rng
        messages = valid_messages(rng)
        for message in messages[: rng.randint(1, MAX_MESSAGES)]:
            self.sent += 1
            is_odd = rng.random() < 0.4
            yield mutated_message(message, rng) if is_odd else message.SerializeToString()


@pytest.mark.parametrize("count", COUNTS)
async def test_mutated_messages_of_a_feed(
    count: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # gRPC logs each message that it cannot decode, and pytest keeps all records.
    monkeypatch.setattr(logging.getLogger("grpc._common"), "disabled", True)
    feed, server = FuzzedFeed(), grpc.aio.server()
    server.add_generic_rpc_handlers((feed,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    tree, queue = KnowledgeTree(MAX_NODES), EngineQueue("gateway")
    client = FeedClient(f"127.0.0.1:{port}", ENGINE_FEED, NO_CREDENTIALS, queue.sender)
    follower = SourceFollower(tree, "engine:a", client, on_message=partial(update_queue, queue))

    async def follow(until: int) -> None:
        while feed.sent < until:
            number = feed.sent
            await follower._follow_once()
            told = f"seed {SEED}, messages {number} to {feed.sent}: {follower.problem}"
            assert "internal" not in follower.problem, told
            assert follower.state is FeedState.CONNECTING, told
            assert 0 <= queue.load(time.monotonic(), 0).pending_s < float("inf"), told

    await follow(WARM_UP)
    tree.check()
    before = Usage.of(os.getpid()).memory_bytes
    await follow(count)
    growth = Usage.of(os.getpid()).memory_bytes - before
    assert growth <= MAX_GROWTH_BYTES, f"{growth} bytes more"
    tree.check()
    assert follower.snapshots > count / 1000
    failures = [one for one in caplog.records if one.exc_info]
    assert not failures, failures
    await client.close()
    await server.stop(None)
