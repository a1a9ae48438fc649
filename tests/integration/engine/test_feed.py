"""What a real vLLM has cached, as a gateway learns it from the engine's feed."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from harness.completion import complete, record_of
from harness.plans import blend_for_all, exact_for_all
from harness.processes import (
    COMPUTES_PLAIN,
    CacheStore,
    Engine,
    free_port,
    launch_engine,
    start_cachestore,
    wait_for_engine,
)
from ragcache_core.identity.keys import KVSpace, VariantKey
from ragcache_core.plan.prompt import Prompt, assemble
from ragcache_core.plan.segments import checked_segments
from ragcache_kv.model.folder import load_model_folder
from ragcache_wire.clients.feed_client import ENGINE_FEED, FeedClient
from ragcache_wire.v1 import node_feed_pb2 as pb
from tests.integration.engine.test_vllm import make_prompt
from tests.kit.engine import is_stored
from tests.kit.gateway import following
from tests.kit.stored_prefix import stored_tokens
from tests.kit.wait import until

pytestmark = pytest.mark.timeout(900)

# 13 blocks of 128 tokens, and one that stays free. A prompt takes six.
BLOCKS = ("--num-gpu-blocks-override", "14", "--max-num-batched-tokens", "384")

MARKER = assemble(range(100), [range(100, 150)], range(150, 160))
"""A prompt of two blocks, so that it evicts one block at most."""


@dataclass
class Fed:
    """A store, and engines that serve their feed at one address, one after another."""

    folder: Path
    model: Path
    store: CacheStore
    records: str
    space: KVSpace
    engine: Engine | None = None

    def start(self) -> Engine:
        self.engine = launch_engine(
            *(self.folder, self.model, self.store.address, *BLOCKS),
            max_length=1024,
            settings={
                **COMPUTES_PLAIN,
                "RAGCACHE_RECORDS_LISTEN": self.records,
                "RAGCACHE_HOST_TIER_BYTES": "64Mi",
            },
        )
        self.engine = Engine(self.engine.service, self.engine.url, self.records)
        wait_for_engine(self.engine)
        return self.engine

    def stop(self) -> None:
        if self.engine is not None:
            self.engine.service.stop()
            self.engine = None

    def nodes(self, prompt: Prompt) -> list[VariantKey]:
        plan = exact_for_all(prompt, self.space, "public", "probe")
        return [named.variant for named in checked_segments(plan, prompt.token_ids, self.space)]

    def is_stored(self, prompt: Prompt) -> bool:
        """Whether the store has the prompt's values, which are saved after the answer."""
        return is_stored(self.store.address, self.nodes(prompt))

    def ask(self, prompt: Prompt, *, salt: str | None = None, blend: bool = False) -> str:
        """Ask with a plan. Return the request's id."""
        assert self.engine is not None
        request = uuid.uuid4().hex
        make = (prompt, self.space, "public", request)
        plan = blend_for_all(*make, 0.1) if blend else exact_for_all(*make)
        complete(
            self.engine.url,
            prompt.token_ids,
            max_tokens=2,
            plan=plan.encode(),
            cache_salt=salt,
        )
        return request


@pytest.fixture(scope="module")
def fed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fed]:
    folder = tmp_path_factory.mktemp("fed")
    store = start_cachestore(folder / "store")
    space = load_model_folder(str(tiny_model)).space("auto")
    fed = Fed(folder, tiny_model, store, f"127.0.0.1:{free_port()}", space)
    try:
        fed.start()
        yield fed
    finally:
        fed.stop()
        store.service.stop()


async def test_nodes_are_told_when_they_are_cached_and_dropped_when_they_are_evicted(
    fed: Fed,
) -> None:
    first, second, third, fourth = (make_prompt(seed, shared=seed) for seed in range(4))
    async with (
        following(fed.records, ENGINE_FEED) as view,
        following(fed.records, ENGINE_FEED) as other,
    ):
        await view.shows({})
        fed.ask(first)
        await until(lambda: set(view.tiers) == set(fed.nodes(first)))
        assert set(view.tiers.values()) == {"device"}
        path = [key.chunk for key in fed.nodes(first)]
        assert stored_tokens(view.tree, path) == first.chunk_ends[-1], "the nodes are one path"

        def cached(prompt: Prompt) -> list[bool]:
            return [view.tiers.get(key) == "device" for key in fed.nodes(prompt)]

        fed.ask(second)
        fed.ask(third)
        # vLLM evicts the last blocks of the oldest prompt first. Values stay in host memory.
        await until(lambda: all(cached(third)) and not cached(first)[-1])
        assert cached(first) == sorted(cached(first), reverse=True), "parents outlive children"
        fed.ask(fourth)
        await until(lambda: all(cached(fourth)) and not any(cached(first)))
        await until(lambda: other.tiers == view.tiers)
        async with following(fed.records, ENGINE_FEED) as fresh:
            await until(lambda: fresh.is_synchronized and fresh.tiers == view.tiers)


async def test_blocks_that_others_cannot_find_are_not_told(fed: Fed) -> None:
    salted, blended = make_prompt(20, shared=20), make_prompt(21, shared=21)
    # The blended prompt's chunks in another order, so that stored KV is not exact there.
    ids = blended.token_ids
    bounds = [blended.head, *blended.chunk_ends]
    chunks = [ids[start:end] for start, end in pairwise(bounds)]
    turned = assemble(
        ids[: blended.head], [chunks[2], chunks[0], chunks[1]], ids[blended.chunk_ends[-1] :]
    )
    async with following(fed.records, ENGINE_FEED) as view:
        await view.synchronized()
        fed.ask(salted, salt="another")
        fed.ask(blended)
        await until(lambda: view.tiers.get(fed.nodes(blended)[-1]) is not None)
        assert not {key for key in fed.nodes(salted) if view.tiers.get(key) == "device"}
        await until(lambda: fed.is_stored(blended))
        request = fed.ask(turned, blend=True)
        assert fed.engine is not None
        record = await asyncio.to_thread(record_of, fed.engine, request)
        assert record.blended_tokens > 0
        # Changes arrive in order, so those of the steps before the marker's have arrived, too.
        fed.ask(MARKER)
        await until(lambda: view.tiers.get(fed.nodes(MARKER)[-1]) == "device")
        own = [key for key in fed.nodes(turned) if key not in fed.nodes(blended)]
        assert not {key for key in own if view.tiers.get(key) == "device"}
        source = view.follower.source
        for key in own:
            node = next((n for n in view.tree._by_source[source] if n.key == key), None)
            assert node is None or not node.residency[source].exact


async def test_no_token_ids_are_in_the_feed(fed: Fed) -> None:
    prompt = make_prompt(30, shared=30)
    client = FeedClient(fed.records, ENGINE_FEED)
    raw = b""
    async with aclosing(client.watch()) as messages:
        while (await anext(messages)).snapshot != pb.NodeChanges.END:
            pass
        fed.ask(prompt)
        wanted = {key.to_bytes() for key in fed.nodes(prompt)}
        while wanted:
            message = await anext(messages)
            raw += message.SerializeToString()
            wanted -= {change.key for change in message.changes}
    await client.close()
    ids = prompt.token_ids
    for start in range(len(ids) - 4):
        for encoded in encodings(ids[start : start + 4]):
            assert encoded not in raw


@pytest.mark.slow
async def test_a_restarted_engine_sends_a_snapshot_of_what_it_has_now(fed: Fed) -> None:
    prompt = make_prompt(40, shared=40)
    async with following(fed.records, ENGINE_FEED) as view:
        fed.ask(prompt)
        await until(lambda: set(fed.nodes(prompt)) <= set(view.tiers))
        fed.stop()
        await until(lambda: not view.is_synchronized)
        fed.start()
        # A slow start takes longer than the follower keeps the nodes of an engine that is away.
        await until(lambda: view.follower.snapshots == 2)
        await view.shows({})
        fed.ask(prompt)
        await until(lambda: set(view.tiers) == set(fed.nodes(prompt)))


def encodings(ids: Sequence[int]) -> list[bytes]:
    """Return what token ids may look like in a message: varints, or words of two sizes."""
    varints = b"".join(
        bytes([one]) if one < 128 else bytes([one & 127 | 128, one >> 7]) for one in ids
    )
    words = [
        b"".join(one.to_bytes(size, order) for one in ids)
        for size in (4, 8)
        for order in ("little", "big")
    ]
    return [varints, *words, str(list(ids)).strip("[]").encode()]
