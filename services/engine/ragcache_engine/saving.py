"""Send new variants to the store in the background."""

from __future__ import annotations

import logging
import threading

import torch

from ragcache_core.errors import RagCacheError
from ragcache_core.keys import VariantKey
from ragcache_core.reuse import VariantInfo
from ragcache_engine.threads import side_pool
from ragcache_kv.value import FORMAT, checksum
from ragcache_wire.sharded_store import ShardedStore

log = logging.getLogger("vllm.ragcache")


class Saver:
    """Puts values in order of arrival; holds at most queue_bytes of them."""

    def __init__(self, client: ShardedStore, deadline_s: float, queue_bytes: int) -> None:
        self._client = client
        self._deadline_s = deadline_s
        self._queue_bytes = queue_bytes
        self._pool = side_pool(1, "ragcache-save")
        self._pending: dict[VariantKey, int] = {}
        self._lock = threading.Lock()

    def wants(self, key: VariantKey, num_bytes: int) -> bool:
        """Whether a value would be taken: it is not on its way already and there is room."""
        with self._lock:
            room = sum(self._pending.values()) + num_bytes <= self._queue_bytes
            return room and key not in self._pending

    def save(self, key: VariantKey, info: VariantInfo, value: torch.Tensor) -> None:
        """Take a contiguous CPU tensor to send; returns at once."""
        with self._lock:
            self._pending[key] = info.num_bytes
        self._pool.submit(self._put, key, info, value)

    def close(self) -> None:
        """Drop what has not been sent."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _put(self, key: VariantKey, info: VariantInfo, value: torch.Tensor) -> None:
        try:
            raw = memoryview(value.view(torch.uint8).numpy().data).cast("B")
            self._client.put(key, info, raw, checksum(raw), FORMAT, self._deadline_s)
        except RagCacheError as error:
            log.warning("a variant of %d tokens was not saved: %s", info.num_tokens, error)
        except Exception:
            log.exception("a variant of %d tokens was not saved", info.num_tokens)
        finally:
            with self._lock:
                del self._pending[key]
