"""Send new variants to the store in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from ragcache_core.blend.observation import ChunkObservation, observation_key
from ragcache_core.errors import RagCacheError
from ragcache_core.keys import KVSpace, VariantKey
from ragcache_core.storing import NewVariant, PutOutcome
from ragcache_core.variant import Origin, Part, Provenance, VariantInfo
from ragcache_engine.threads import side_pool
from ragcache_engine.transfer import SaveJob
from ragcache_engine.values import native_bytes, native_parts, shape_of
from ragcache_kv.store.sharded import ShardedStore
from ragcache_kv.value import FORMAT, checksum
from ragcache_wire.trace_context import metadata
from ragcache_wire.tracing import Kind, Tracer

log = logging.getLogger("vllm.ragcache")


class Saver:
    """Puts values in order of arrival; holds at most queue_bytes of them.

    tracer: of what is part of a trace.
    """

    def __init__(
        self,
        client: ShardedStore,
        space: KVSpace,
        deadline_s: float,
        queue_bytes: int,
        tracer: Tracer | None = None,
    ) -> None:
        self._client = client
        self._space = space
        self._deadline_s = deadline_s
        self._queue_bytes = queue_bytes
        self._tracer = tracer or Tracer()
        self._pool = side_pool(1, "ragcache-save")
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
        origin: Origin,
        value: torch.Tensor,
        parts: Callable[[], tuple[Part, ...]] | None = None,
    ) -> None:
        """Take a contiguous CPU tensor to send; returns at once.

        parts: waits until value is whole, and gives its parts; None: it is, and nobody knows them.
        """
        make = partial(self._value, job, origin, value, parts)
        self._submit(job, job.span.variant, job.info.num_bytes, make)

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
            origin=replace(job.origin, prefix_chunks=chunks, parent=None, cost_s=cost_s),
            shape=None,
            parts=(Part(len(raw), checksum(raw)),),
        )
        self._submit(job, key, len(raw), lambda: (variant, raw))

    def close(self) -> None:
        """Drop what has not been sent."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(
        self,
        job: SaveJob,
        key: VariantKey,
        num_bytes: int,
        make: Callable[[], tuple[NewVariant, memoryview]],
    ) -> None:
        with self._lock:
            self._pending[key] = num_bytes
        try:
            self._pool.submit(self._put, job, key, make)
        except RuntimeError:  # no thread can be started, or the engine is ending
            with self._lock:
                del self._pending[key]
            raise

    def _value(
        self,
        job: SaveJob,
        origin: Origin,
        value: torch.Tensor,
        parts: Callable[[], tuple[Part, ...]] | None,
    ) -> tuple[NewVariant, memoryview]:
        raw = native_bytes(value)
        variant = NewVariant(
            key=job.span.variant,
            info=job.info,
            origin=origin,
            shape=shape_of(self._space),
            parts=parts() if parts else native_parts(raw, self._space, job.info.num_tokens),
            value_format=FORMAT,
        )
        return variant, raw

    def _put(
        self, job: SaveJob, key: VariantKey, make: Callable[[], tuple[NewVariant, memoryview]]
    ) -> None:
        num_tokens = job.info.num_tokens
        name = "save" if key == job.span.variant else "save observation"
        try:
            trace = self._tracer.below(name, metadata(job.traceparent), Kind.INTERNAL)
            with trace, trace.current():
                variant, raw = make()
                outcome = self._client.put(variant, raw, self._deadline_s, as_of=job.as_of)
                trace.set(tokens=num_tokens, bytes=len(raw), outcome=outcome.value)
            if outcome is PutOutcome.DELETED:
                log.info("a variant of %d tokens was deleted before it was saved", num_tokens)
        except RagCacheError as error:
            log.warning("a variant of %d tokens was not saved: %s", num_tokens, error)
        except Exception:
            log.exception("a variant of %d tokens was not saved", num_tokens)
        finally:
            with self._lock:
                del self._pending[key]
