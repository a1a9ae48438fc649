"""Tells gateways which nodes of the knowledge tree an engine has.

A request's plan says which segments its prompt has, and vLLM says which blocks are cached
(``resident_nodes``). Only requests with a plan are followed: a gateway cannot plan for others.
Blocks of a blend have hashes of their own (``block_salting``), which nothing here knows, so KV that
is not exact is never told as cached.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragcache_core.cost.load_or_compute import ReuseCosts
from ragcache_core.identity.keys import KVSpace, VariantKey, domain_salt
from ragcache_core.knowledge.node_change import StoredNode
from ragcache_core.knowledge.resident_nodes import PathSegment, ResidentNodes
from ragcache_core.plan.segments import NamedSegment
from ragcache_engine.protocol.messages import TierChange
from ragcache_engine.telemetry.engine_feed import EngineFeed
from ragcache_kv.values.layout import value_bytes

if TYPE_CHECKING:
    from ragcache_engine.vllm_interface.block_events import (
        BlockHash,
        BlockName,
        PrefixCacheEvents,
    )

log = logging.getLogger("vllm.ragcache")


@dataclass(frozen=True, slots=True)
class _FollowedPrompt:
    nodes: tuple[VariantKey, ...]
    blocks: tuple[BlockName, ...]


class NodeAnnouncer:
    """Follows the prompts of one engine. vLLM's scheduler thread calls all methods.

    No exception leaves them, because vLLM ends the engine on one.

    Args:
        space: KV space of the model.
        costs: Predictions of computations.
        feed: Where to tell the changes.
    """

    def __init__(self, space: KVSpace, costs: ReuseCosts, feed: EngineFeed) -> None:
        self._space = space
        self._costs = costs
        self._feed = feed
        self._nodes: ResidentNodes[BlockName] = ResidentNodes()
        self._cache: PrefixCacheEvents | None = None
        self._prompts: dict[str, _FollowedPrompt] = {}
        # vLLM's own hash of each block that is followed, and of cached ones that were.
        self._hashes: dict[BlockName, BlockHash] = {}

    def bind(self, cache: PrefixCacheEvents) -> None:
        """Follow vLLM's prefix cache from now on."""
        self._cache = cache
        cache.follow(self.on_blocks)

    def begin(
        self,
        request_id: str,
        domain: str,
        segments: Sequence[NamedSegment],
        block_hashes: Sequence[BlockHash],
        cache_salt: str | None,
    ) -> None:
        """Follow the prompt of a request.

        Args:
            request_id: vLLM's id of the request.
            domain: Access domain of the plan.
            segments: The plan's segments that match the prompt.
            block_hashes: vLLM's hashes of the prompt's full blocks, before any is salted.
            cache_salt: The request's own salt. A gateway salts all prompts of a domain alike, or
                else wants that no other request finds the blocks.
        """
        cache = self._cache
        if cache is None or cache_salt != domain_salt(domain):
            return
        with _logging_errors():
            hashes = {cache.name(one): one for one in block_hashes}
            names = tuple(hashes)
            path = self._path(segments, cache.block_tokens)
            keys = self._nodes.pin(path, names, lambda name: cache.has(hashes[name]))
            self._prompts[request_id] = _FollowedPrompt(keys, names)
            self._hashes.update(hashes)

    def end(self, request_id: str) -> None:
        """Stop following the prompt of a request that has ended."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is None:
            return
        with _logging_errors():
            self._nodes.unpin(prompt.nodes)
            for name in prompt.blocks:
                self._drop_unused_hash(name)

    def on_blocks(self, names: Iterable[BlockName] | None) -> None:
        """Tell what changed since the last step.

        Args:
            names: Blocks that were cached or evicted. None: the cache was cleared.
        """
        assert self._cache is not None
        with _logging_errors():
            if names is None:
                self._nodes.clear_blocks()
                names = tuple(self._hashes)
            for name in names:
                if (block_hash := self._hashes.get(name)) is not None:
                    # A copy of an evicted block may still be cached.
                    self._nodes.set_cached(name, self._cache.has(block_hash))
                    self._drop_unused_hash(name)
            self._feed.publish(self._nodes.take_changes())

    def on_tier_changes(self, changes: Mapping[VariantKey, TierChange | None]) -> None:
        """Record what the worker's own tiers store. ``on_blocks`` tells it after the step."""
        with _logging_errors():
            for key, change in changes.items():
                self._nodes.set_host(key, None if change is None else change.exact)

    def _path(self, segments: Sequence[NamedSegment], block_tokens: int) -> list[PathSegment]:
        parents = [None, *(named.variant for named in segments)]
        path = []
        for parent, named in zip(parents, segments, strict=False):
            start, end = named.segment.start, named.segment.end
            num_tokens = end - start
            node = StoredNode(
                key=named.variant,
                parent=parent,
                num_tokens=num_tokens,
                num_bytes=value_bytes(self._space, num_tokens),
                exact=True,
                cost_s=num_tokens * self._costs.prefill_token_s(start, num_tokens),
            )
            path.append(PathSegment(node, end // block_tokens))
        return path

    def _drop_unused_hash(self, name: BlockName) -> None:
        """Forget the hash of a block that no node needs. A cached one is told of when it leaves."""
        block_hash = self._hashes.get(name)
        if block_hash is None or self._nodes.follows(name):
            return
        del self._hashes[name]


@contextmanager
def _logging_errors() -> Generator[None, None, None]:
    try:
        yield
    except Exception:
        log.exception("announcer: what the engine has is not told in full")
