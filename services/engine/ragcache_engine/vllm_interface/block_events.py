"""Follows vLLM's prefix cache by its KV events, without publishing them.

vLLM's own publisher sends the events over ZeroMQ, with the token ids of all prompts and without
authentication. So the events stay off in vLLM's configuration, and only its block pool makes them.
vLLM takes them from the pool at the end of each step, and this module reads them there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from ragcache_core.errors import InvalidInput

log = logging.getLogger("vllm.ragcache")

BlockHash = bytes
"""vLLM's hash of a block and all tokens before it."""

BlockName = int | bytes
"""How events name a block: the end of its hash, or all of it."""

BlockListener = Callable[[Iterable[BlockName] | None], None]

_NEEDED = ("enable_caching", "enable_kv_cache_events", "get_cached_block", "hash_block_size")
_GROUP = 0
"""The only group of layers (``requirements.check_full_attention``)."""


class PrefixCacheEvents:
    """The events of vLLM's block pool.

    Args:
        pool: vLLM's ``BlockPool``.
    """

    def __init__(self, pool: Any) -> None:
        missing = [name for name in (*_NEEDED, "take_events") if not hasattr(pool, name)]
        if missing:
            raise InvalidInput(
                "vllm", f"has a block pool without {', '.join(missing)}", "install another version"
            )
        self._pool = pool

    @property
    def block_tokens(self) -> int:
        """Tokens of one block."""
        return int(self._pool.hash_block_size)

    def name(self, block_hash: BlockHash) -> BlockName:
        """Return the name of a block in events."""
        name: BlockName = maybe_convert_block_hash(block_hash)
        return name

    def has(self, block_hash: BlockHash) -> bool:
        """Return whether a block is cached now."""
        return self._pool.get_cached_block(block_hash, [_GROUP]) is not None

    def follow(self, listener: BlockListener) -> None:
        """Call the listener at the end of each step, with the blocks that the step has changed.

        Args:
            listener: It gets the names of cached and evicted blocks, or None if vLLM has cleared
                its cache. It must not raise.
        """
        if not self._pool.enable_caching:
            return
        published = self._pool.enable_kv_cache_events  # by --kv-events-config
        take = self._pool.take_events

        def take_and_report() -> list[Any]:
            events: list[Any] = take()
            for names in _split(events):
                listener(names)
            return events if published else []

        self._pool.enable_kv_cache_events = True
        self._pool.take_events = take_and_report


def _split(events: Iterable[Any]) -> list[list[BlockName] | None]:
    """Return the names of blocks before and after each time the cache was cleared."""
    parts: list[list[BlockName] | None] = [[]]
    for event in events:
        if isinstance(event, AllBlocksCleared):
            parts += [None, []]
        else:
            last = parts[-1]
            assert last is not None
            last.extend(event.block_hashes)
    return parts
