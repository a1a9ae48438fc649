"""Send new variants to the store in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from ragcache_core.blend.observation import ChunkObservation, observation_key
from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Provenance, VariantInfo
from ragcache_core.store_api import NewVariant, PutOutcome
from ragcache_engine.kv_cache.value_tensors import native_bytes, value_shape
from ragcache_engine.protocol.context import EngineContext
from ragcache_engine.protocol.messages import SaveJob
from ragcache_engine.threads import unpinned_pool
from ragcache_kv.store_client.sharded import ShardedStore
from ragcache_kv.values.layout import FORMAT, value_parts
from ragcache_kv.values.outgoing_value import IncompleteValue, OutgoingValue, ReadyValue
from ragcache_wire.tracing import SpanKind, metadata

log = logging.getLogger("vllm.ragcache")

_STREAMS = 4
"""Values that are sent in parallel while they are computed: mostly those of one pass."""

_HEAD_START_S = 0.02
"""Delay of saves that no other engine waits for. Checksums and transfer of a value use cores,
memory and the store, which the first token of the same pass needs more."""

_MAX_PASS_S = 600.0
"""Seconds to wait for the rest of a value before the save is aborted."""

_MAX_RETRY_WAIT_S = 2.0
"""Seconds to wait, at most, before a retry to a store that had no time or no room."""

_LOG_NOT_SAVED = "saver: variant not saved num_tokens=%d error=%s"


class Saver:
    """Puts values in the order of their arrival.

    Args:
        client: The store.
        engine: Has the deadline of one put, and the bound of the queued bytes.
    """

    def __init__(self, client: ShardedStore, engine: EngineContext) -> None:
        self._client = client
        self._space = engine.space
        self._deadline_s = engine.settings.save_deadline_s
        self._queue_bytes = engine.settings.save_queue_bytes
        self._tracer = engine.tracer
        self._pool = unpinned_pool(1, "ragcache-save")
        # Values that another engine waits for are sent while they are computed.
        self._handoff_pool = unpinned_pool(_STREAMS, "ragcache-handoff")
        self._pending: dict[VariantKey, int] = {}
        self._lock = threading.Lock()

    def has_room(self, key: VariantKey, num_bytes: int) -> bool:
        """Tell whether the queue has room for a value and does not contain it."""
        with self._lock:
            fits = sum(self._pending.values()) + num_bytes <= self._queue_bytes
            return fits and key not in self._pending

    def save(
        self,
        job: SaveJob,
        native: Callable[[], torch.Tensor],
        cost_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Queue a value; returns at once. A background thread calls both functions.

        Args:
            job: The save.
            native: Returns the value, contiguous on the CPU. It may wait.
            cost_s: Returns the seconds to compute the value; 0: unknown.
        """
        variant = self._new_variant(job)

        def ready_value() -> OutgoingValue:
            raw = native_bytes(native())
            return ReadyValue.with_checksums(raw, variant.part_bytes, cost_s())

        self._submit(job, variant, ready_value)

    def stream(self, job: SaveJob, value: OutgoingValue) -> None:
        """Queue a value whose layers are sent while others are computed; returns at once."""
        self._submit(job, self._new_variant(job), lambda: value)

    def save_observation(self, job: SaveJob, observation: ChunkObservation, cost_s: float) -> None:
        """Queue the observation of a saved variant; returns at once.

        A delete of the variant's document, or of any chunk that the observation is about, also
        deletes the observation.
        """
        raw = memoryview(observation.to_bytes())
        key = observation_key(job.span.variant)
        if not self.has_room(key, len(raw)):
            return
        chunks = (*job.origin.prefix_chunks, job.span.variant.chunk)
        variant = NewVariant(
            key=key,
            info=VariantInfo(job.info.num_tokens, len(raw), 0, Provenance(exact=False)),
            origin=replace(job.origin, prefix_chunks=chunks, parent=None),
            shape=None,
            part_bytes=(len(raw),),
        )
        self._submit(
            job, variant, lambda: ReadyValue.with_checksums(raw, variant.part_bytes, cost_s)
        )

    def close(self) -> None:
        """Drop the values that have not been sent."""
        for pool in (self._pool, self._handoff_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def _new_variant(self, job: SaveJob) -> NewVariant:
        return NewVariant(
            key=job.span.variant,
            info=job.info,
            origin=job.origin,
            shape=value_shape(self._space),
            part_bytes=value_parts(self._space, job.info.num_tokens),
            value_format=FORMAT,
        )

    def _submit(
        self, job: SaveJob, variant: NewVariant, make_value: Callable[[], OutgoingValue]
    ) -> None:
        pool, head_start_s = self._pool, _HEAD_START_S
        if job.hands_off:
            pool, head_start_s = self._handoff_pool, 0.0
        not_before = time.monotonic() + head_start_s
        with self._lock:
            self._pending[variant.key] = variant.info.num_bytes
        try:
            pool.submit(self._save, job, variant, make_value, not_before)
        except RuntimeError:  # no thread can be started, or the engine is ending
            with self._lock:
                del self._pending[variant.key]
            raise

    def _save(
        self,
        job: SaveJob,
        variant: NewVariant,
        make_value: Callable[[], OutgoingValue],
        not_before: float,
    ) -> None:
        num_tokens = job.info.num_tokens
        name = "save" if variant.key == job.span.variant else "save observation"
        try:
            time.sleep(max(0.0, not_before - time.monotonic()))
            trace = self._tracer.start_child_of(name, metadata(job.traceparent), SpanKind.INTERNAL)
            with trace, trace.current():
                outcome = self._put(job, variant, make_value())
                num_bytes = variant.info.num_bytes
                trace.set(tokens=num_tokens, bytes=num_bytes, outcome=outcome.value)
            if outcome is PutOutcome.DELETED:
                log.info("saver: variant was deleted before the put num_tokens=%d", num_tokens)
        except IncompleteValue as error:
            log.info(_LOG_NOT_SAVED, num_tokens, error)
        except RagCacheError as error:
            log.warning(_LOG_NOT_SAVED, num_tokens, error)
        except Exception:
            log.exception("saver: variant not saved num_tokens=%d", num_tokens)
        finally:
            with self._lock:
                del self._pending[variant.key]

    def _put(self, job: SaveJob, variant: NewVariant, value: OutgoingValue) -> PutOutcome:
        try:
            return self._client.put(variant, value, self._deadline_s, as_of=job.as_of)
        except (IncompleteValue, Unavailable) as error:
            if isinstance(value, ReadyValue):
                raise
            # The pass took longer than a put's deadline, or the store was unavailable or full
            # meanwhile.
            value.wait_until_final(time.monotonic() + _MAX_PASS_S)
            if isinstance(error, Unavailable):
                time.sleep(min(error.retry_after_s, _MAX_RETRY_WAIT_S))
            return self._client.put(variant, value, self._deadline_s, as_of=job.as_of)
