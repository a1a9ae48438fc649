"""Which nodes are told, over vLLM's own block pool."""

from __future__ import annotations

import warnings

import pytest

from ragcache_core.cost.load_or_compute import ReuseCosts
from ragcache_core.identity.keys import VariantKey
from ragcache_core.knowledge.resident_nodes import ResidentNodes
from ragcache_core.plan.prompt import Prompt, assemble, plan_exact
from ragcache_core.plan.segments import checked_segments
from ragcache_engine.announcements.node_announcer import NodeAnnouncer
from ragcache_engine.protocol.messages import TierChange
from ragcache_engine.telemetry.engine_feed import EngineFeed
from ragcache_engine.vllm_interface.block_salting import salt_block_hashes
from ragcache_kv.values.layout import value_bytes
from tests.kit.scheduler import PROFILE, SPACE

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch warn while they are imported
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import (
        KVCacheBlock,
        get_request_block_hasher,
        init_none_hash,
    )
    from vllm.v1.request import Request

    from ragcache_engine.vllm_interface.block_events import PrefixCacheEvents

BLOCK = 4
NUM_BLOCKS = 12
PROMPT = assemble(range(6), [range(10, 19), range(20, 23), range(30, 37)], range(90, 93))
"""Segments end at 6, 15, 18 and 25: after 1, 3, 4 and 6 full blocks."""
OTHER = assemble(range(6), [range(40, 50)], range(90, 93))


class Engine:
    """vLLM's block pool, and an announcer that follows it."""

    def __init__(self) -> None:
        init_none_hash(sha256)
        self.pool = BlockPool(NUM_BLOCKS, enable_caching=True, hash_block_size=BLOCK)
        self.feed = EngineFeed()
        costs = ReuseCosts()
        costs.use_profile(PROFILE)
        self.announcer = NodeAnnouncer(SPACE, costs, self.feed)
        self.announcer.bind(PrefixCacheEvents(self.pool))
        self._hash = get_request_block_hasher(BLOCK, sha256)

    def arrive(
        self, request_id: str, prompt: Prompt = PROMPT, *, domain: str = "public", salt: str = ""
    ) -> Request:
        request = Request(
            request_id,
            list(prompt.token_ids),
            SamplingParams(max_tokens=1),
            None,
            cache_salt=salt or None,
            block_hasher=self._hash,
        )
        plan = plan_exact(prompt, SPACE, domain, request_id)
        segments = checked_segments(plan, prompt.token_ids, SPACE)
        self.announcer.begin(request_id, domain, segments, request.block_hashes, request.cache_salt)
        return request

    def cache(self, request: Request) -> list[KVCacheBlock]:
        """Compute all full blocks of a request."""
        count = len(request.block_hashes)
        blocks = self.pool.get_new_blocks(count)
        self.pool.cache_full_blocks(request, blocks, 0, count, BLOCK, 0)
        return blocks

    def step(self) -> None:
        assert self.pool.take_events() == [], "nothing is left to publish"

    @property
    def tiers(self) -> dict[VariantKey, str]:
        return {change.key: change.tier for batch in self.feed.node_batches() for change in batch}


def nodes(prompt: Prompt = PROMPT, domain: str = "public") -> list[VariantKey]:
    plan = plan_exact(prompt, SPACE, domain, "probe")
    return [named.variant for named in checked_segments(plan, prompt.token_ids, SPACE)]


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_a_node_is_told_with_its_parent_its_size_and_its_cost(engine: Engine) -> None:
    engine.cache(engine.arrive("r"))
    engine.step()
    assert engine.tiers == dict.fromkeys(nodes(), "device")
    told = [change.node for batch in engine.feed.node_batches() for change in batch]
    found = {node.key: node for node in told if node is not None}
    ordered = [found[key] for key in nodes()]
    assert [node.parent for node in ordered] == [None, *nodes()[:-1]]
    assert [node.num_tokens for node in ordered] == [6, 9, 3, 7]
    assert [node.num_bytes for node in ordered] == [value_bytes(SPACE, n) for n in (6, 9, 3, 7)]
    assert [node.cost_s for node in ordered] == pytest.approx([6e-3, 9e-3, 3e-3, 7e-3])


def test_an_evicted_block_drops_its_node_and_those_below_it(engine: Engine) -> None:
    blocks = engine.cache(engine.arrive("r"))
    engine.step()
    engine.pool.evict_blocks({blocks[3].block_id})
    engine.step()
    assert list(engine.tiers) == nodes()[:2]
    engine.pool.evict_blocks({blocks[0].block_id})
    engine.step()
    assert engine.tiers == {}


def test_a_copy_of_an_evicted_block_keeps_its_node(engine: Engine) -> None:
    request = engine.arrive("r", OTHER)
    first, second = engine.cache(request), engine.cache(request)
    engine.step()
    engine.pool.evict_blocks({block.block_id for block in first})
    engine.step()
    assert engine.tiers == dict.fromkeys(nodes(OTHER), "device")
    engine.pool.evict_blocks({second[0].block_id})
    engine.step()
    assert engine.tiers == {}


def test_blocks_that_were_cached_before_a_plan_named_them_are_told(engine: Engine) -> None:
    request = engine.arrive("r")
    engine.cache(request)
    engine.announcer.end("r")
    engine.step()
    assert engine.tiers == {}, "nothing was told before the request ended"
    engine.arrive("again")
    engine.step()
    assert engine.tiers == dict.fromkeys(nodes(), "device")


def test_prompts_share_the_nodes_before_they_differ(engine: Engine) -> None:
    engine.cache(engine.arrive("r"))
    engine.arrive("other", OTHER)
    engine.step()
    assert nodes()[0] == nodes(OTHER)[0]
    assert set(engine.tiers) == set(nodes())


def test_a_cleared_cache_drops_every_node(engine: Engine) -> None:
    request = engine.arrive("r")
    engine.pool.free_blocks(engine.cache(request))
    engine.step()
    assert engine.pool.reset_prefix_cache()
    engine.step()
    assert engine.tiers == {}
    engine.cache(request)
    engine.step()
    assert set(engine.tiers) == set(nodes())


def test_salted_blocks_are_not_told(engine: Engine) -> None:
    request = engine.arrive("blend")
    salt_block_hashes(request, 3)
    engine.pool.free_blocks(engine.cache(request))
    engine.step()
    assert list(engine.tiers) == nodes()[:2], "what precedes the first block that is not exact"
    engine.pool.evict_blocks(set(range(1, NUM_BLOCKS)))
    engine.cache(engine.arrive("trial", salt="trial"))
    engine.step()
    assert engine.tiers == {}


def test_a_tenants_blocks_are_told_under_the_salt_of_its_domain(engine: Engine) -> None:
    engine.cache(engine.arrive("r", domain="tenant:a", salt="tenant:a"))
    engine.step()
    assert set(engine.tiers) == set(nodes(domain="tenant:a"))


def test_the_workers_tiers_are_told_while_no_block_is_cached(engine: Engine) -> None:
    blocks = engine.cache(engine.arrive("r"))
    first, second = nodes()[:2]
    engine.announcer.on_tier_changes(
        {first: TierChange("host", exact=True), second: TierChange("host", exact=False)}
    )
    engine.step()
    assert engine.tiers == dict.fromkeys(nodes(), "device")
    engine.pool.evict_blocks({blocks[0].block_id})
    engine.announcer.end("r")
    engine.step()
    assert engine.tiers == {first: "host", second: "host"}
    told = {c.key: c.node for batch in engine.feed.node_batches() for c in batch if c.node}
    assert (told[first].exact, told[second].exact) == (True, False)
    engine.announcer.on_tier_changes({first: None, second: None})
    engine.step()
    assert engine.tiers == {}


def test_nothing_is_kept_of_what_is_neither_cached_nor_running(engine: Engine) -> None:
    for number in range(50):
        prompt = assemble(range(6), [range(100 * number + 10, 100 * number + 20)], range(3))
        request_id = f"r{number}"
        engine.pool.free_blocks(reversed(engine.cache(engine.arrive(request_id, prompt))))
        engine.step()
        engine.announcer.end(request_id)
    announcer = engine.announcer
    assert len(announcer._nodes) <= NUM_BLOCKS
    assert len(announcer._hashes) <= NUM_BLOCKS
    assert not announcer._prompts
    announcer._nodes.check()


def test_events_that_a_user_has_turned_on_are_still_published() -> None:
    init_none_hash(sha256)
    pool = BlockPool(
        NUM_BLOCKS, enable_caching=True, hash_block_size=BLOCK, enable_kv_cache_events=True
    )
    seen: list[list[object] | None] = []
    PrefixCacheEvents(pool).follow(
        lambda names: seen.append(None if names is None else list(names))
    )
    pool.reset_prefix_cache()
    assert len(pool.take_events()) == 1
    assert None in seen


def test_no_error_reaches_vllm(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.cache(engine.arrive("one"))

    def fail(*_: object) -> None:
        raise RuntimeError("a defect")

    for method in ("set_cached", "set_host", "unpin"):
        monkeypatch.setattr(ResidentNodes, method, fail)
    engine.step()
    engine.announcer.on_tier_changes(dict.fromkeys(nodes()))
    engine.announcer.end("one")
