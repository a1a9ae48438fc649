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
from ragcache_core.identity.keys import KVSpace, VariantKey
from ragcache_core.identity.variant import Provenance, VariantInfo
from ragcache_core.store_api import NewVariant, PutOutcome
from ragcache_engine.kv_cache.value_tensors import native_bytes, value_shape
from ragcache_engine.protocol.messages import SaveJob
from ragcache_engine.threads import unpinned_pool
from ragcache_kv.store_client.sharded import ShardedStore
from ragcache_kv.values.layout import FORMAT, value_parts
from ragcache_kv.values.outgoing_value import IncompleteValue, OutgoingValue, ReadyValue
from ragcache_wire.trace_context import metadata
from ragcache_wire.tracing import SpanKind, Tracer

log = logging.getLogger("vllm.ragcache")

_LONGEST_PASS_S = 600.0
"""How long to wait for the rest of a value before it is given up."""

_LONGEST_PAUSE_S = 2.0
"""How long to leave alone a store that had no time or no room."""


class Saver:
    """Puts values, at_once of them, in order of arrival; holds at most queue_bytes of them.

    head_start_s: how long it leaves the engine alone before it begins. To sum up and send what was
    just computed takes cores, memory and the store from the first token, which is on its way out.
    tracer: of what is part of a trace.
    """

    def __init__(
        self,
        client: ShardedStore,
        space: KVSpace,
        deadline_s: float,
        queue_bytes: int,
        at_once: int = 1,
        head_start_s: float = 0.0,
        tracer: Tracer | None = None,
    ) -> None:
        self._client = client
        self._space = space
        self._deadline_s = deadline_s
        self._queue_bytes = queue_bytes
        self._head_start_s = head_start_s
        self._tracer = tracer or Tracer()
        self._pool = unpinned_pool(at_once, "ragcache-save")
        self._pending: dict[VariantKey, int] = {}
        self._lock = threading.Lock()

    def wants(self, key: VariantKey, num_bytes: int) -> bool:
        """Whether a value would be taken: it is not on its way already and there is room."""
        with self._lock:
            room = sum(self._pending.values()) + num_bytes <= self._queue_bytes
            return room and key not in self._pending

    def save(
        self,
        job: SaveJob,
        native: Callable[[], torch.Tensor],
        cost_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Take a value to send; returns at once.

        native: makes or has it, contiguous on the CPU. cost_s: tells the seconds that computing it
        took; 0: unknown. Both are called on a thread that may wait.
        """
        variant = self._variant(job)

        def whole() -> OutgoingValue:
            raw = native_bytes(native())
            return ReadyValue.with_checksums(raw, variant.part_bytes, cost_s())

        self._submit(job, variant, whole)

    def stream(self, job: SaveJob, value: OutgoingValue) -> None:
        """Take a value that is being computed, to send what there is of it; returns at once."""
        self._submit(job, self._variant(job), lambda: value)

    def save_observation(self, job: SaveJob, observation: ChunkObservation, cost_s: float) -> None:
        """Take what was seen of a variant that was saved; returns at once.

        It goes where the variant goes: with its document, and with each chunk that it is about.
        """
        raw = memoryview(observation.to_bytes())
        key = observation_key(job.span.variant)
        if not self.wants(key, len(raw)):
            return
        chunks = (*job.origin.prefix_chunks, job.span.variant.chunk)
        variant = NewVariant(
            key=key,
            info=VariantInfo(job.info.num_tokens, len(raw), 0, Provenance(exact=False)),
            origin=replace(job.origin, prefix_chunks=chunks, parent=None),
            shape=None,
            part_bytes=(len(raw),),
        )
        self._submit(job, variant, lambda: ReadyValue.with_checksums(raw, variant.part_bytes, cost_s))

    def close(self) -> None:
        """Drop what has not been sent."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _variant(self, job: SaveJob) -> NewVariant:
        return NewVariant(
            key=job.span.variant,
            info=job.info,
            origin=job.origin,
            shape=value_shape(self._space),
            part_bytes=value_parts(self._space, job.info.num_tokens),
            value_format=FORMAT,
        )

    def _submit(self, job: SaveJob, variant: NewVariant, make: Callable[[], OutgoingValue]) -> None:
        begins = time.monotonic() + self._head_start_s
        with self._lock:
            self._pending[variant.key] = variant.info.num_bytes
        try:
            self._pool.submit(self._save, job, variant, make, begins)
        except RuntimeError:  # no thread can be started, or the engine is ending
            with self._lock:
                del self._pending[variant.key]
            raise

    def _save(
        self, job: SaveJob, variant: NewVariant, make: Callable[[], OutgoingValue], begins: float
    ) -> None:
        num_tokens = job.info.num_tokens
        name = "save" if variant.key == job.span.variant else "save observation"
        try:
            time.sleep(max(0.0, begins - time.monotonic()))
            trace = self._tracer.start_child_of(name, metadata(job.traceparent), SpanKind.INTERNAL)
            with trace, trace.current():
                outcome = self._put(job, variant, make())
                num_bytes = variant.info.num_bytes
                trace.set(tokens=num_tokens, bytes=num_bytes, outcome=outcome.value)
            if outcome is PutOutcome.DELETED:
                log.info("a variant of %d tokens was deleted before it was saved", num_tokens)
        except IncompleteValue as error:
            log.info("a variant of %d tokens was not saved: %s", num_tokens, error)
        except RagCacheError as error:
            log.warning("a variant of %d tokens was not saved: %s", num_tokens, error)
        except Exception:
            log.exception("a variant of %d tokens was not saved", num_tokens)
        finally:
            with self._lock:
                del self._pending[variant.key]

    def _put(self, job: SaveJob, variant: NewVariant, value: OutgoingValue) -> PutOutcome:
        try:
            return self._client.put(variant, value, self._deadline_s, as_of=job.as_of)
        except (IncompleteValue, Unavailable) as error:
            if isinstance(value, ReadyValue):
                raise
            # The pass took longer than a put may, or the store was away or full meanwhile.
            value.wait_until_final(time.monotonic() + _LONGEST_PASS_S)
            if isinstance(error, Unavailable):
                time.sleep(min(error.retry_after_s, _LONGEST_PAUSE_S))
            return self._client.put(variant, value, self._deadline_s, as_of=job.as_of)
