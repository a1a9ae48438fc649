"""vLLM's own block pool, followed by an announcer. This imports vLLM, which takes 11 s."""

from __future__ import annotations

import warnings

from ragcache_core.cost.load_or_compute import ReuseCosts
from ragcache_core.identity.keys import VariantKey
from ragcache_core.plan.prompt import Prompt, plan_exact
from ragcache_core.plan.segments import checked_segments
from ragcache_engine.announcements.node_announcer import NodeAnnouncer
from ragcache_engine.telemetry.engine_feed import EngineFeed
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


def make_block_pool(num_blocks: int, *, enable_kv_cache_events: bool = False) -> BlockPool:
    init_none_hash(sha256)
    return BlockPool(
        num_blocks,
        enable_caching=True,
        hash_block_size=BLOCK,
        enable_kv_cache_events=enable_kv_cache_events,
    )


def events_of(pool: BlockPool) -> PrefixCacheEvents:
    return PrefixCacheEvents(pool)


class AnnouncedPool:
    """vLLM's block pool, and an announcer that follows it."""

    def __init__(self, num_blocks: int, prompt: Prompt) -> None:
        self._usual_prompt = prompt
        self.pool = make_block_pool(num_blocks)
        self.feed = EngineFeed()
        costs = ReuseCosts()
        costs.use_profile(PROFILE)
        self.announcer = NodeAnnouncer(SPACE, costs, self.feed)
        self.announcer.bind(events_of(self.pool))
        self._hash = get_request_block_hasher(BLOCK, sha256)

    def arrive(
        self,
        request_id: str,
        prompt: Prompt | None = None,
        *,
        domain: str = "public",
        salt: str = "",
    ) -> Request:
        prompt = prompt or self._usual_prompt
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
