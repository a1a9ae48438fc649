"""Fetch the values of a load: from the worker's own tiers, or else from the store."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from ragcache_core.errors import RagCacheError
from ragcache_core.identity.keys import KVSpace, VariantKey
from ragcache_core.identity.variant import Codec, Miss
from ragcache_core.store_api import VariantUse
from ragcache_engine.kv_cache.chunk_pool import concatenate_pieces
from ragcache_engine.kv_cache.host_memory import is_needed, receive_buffer
from ragcache_engine.kv_cache.incoming_value import (
    EncodedValue,
    IncomingValue,
    NativeValue,
    OfferedValue,
    ValueSource,
)
from ragcache_engine.kv_cache.value_tensors import decode, matches_space, rounded_to
from ragcache_engine.protocol.messages import LoadJob, VariantSpan, miss_reason
from ragcache_engine.tiers.local_tiers import LocalTiers, TierRead
from ragcache_kv.rotation import KeyRotation
from ragcache_kv.store_client.sharded import ShardedStore
from ragcache_kv.values.layout import value_bytes
from ragcache_kv.values.stored_value import StoredValue, ValueOrMiss

_CPU = torch.device("cpu")


class _StoreAnswers:
    """The store's answers to the keys that some jobs want.

    Args:
        wanted: How often each key is wanted, in the order of the request.
        stream: The store's answers, in that order.
    """

    def __init__(
        self, wanted: Mapping[VariantKey, int], stream: Iterator[tuple[VariantKey, ValueOrMiss]]
    ) -> None:
        self._uses = dict(wanted)
        self._shared = {key for key, times in wanted.items() if times > 1}
        self._order = iter(wanted)
        self._stream = stream
        self._answers: dict[VariantKey, ValueOrMiss] = {}

    def take(self, key: VariantKey) -> tuple[ValueOrMiss | None, bool]:
        """Return the answer to a key, and whether other jobs get the same answer.

        Returns:
            None as the answer if the store ended early.

        Raises:
            RagCacheError: As the store raises it.
        """
        while key not in self._answers:
            if not self._read_next():
                return None, False
        answer = self._answers[key]
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._answers[key]  # so that the value's memory can be freed
        return answer, key in self._shared

    def read_to_end(self) -> None:
        """Read the remaining answers. Raises RagCacheError as the store does."""
        while self._read_next():
            pass

    def _read_next(self) -> bool:
        key, answer = next(self._stream, (None, Miss.TIMED_OUT))
        if key is None:
            return False
        if key != next(self._order, None):
            raise RagCacheError("the store answered in another order")
        self._answers[key] = answer
        return True


def share_values(one: LoadJob, other: LoadJob) -> bool:
    """Tell whether two jobs want some of the same values, under the same conditions."""
    alike = (one.domain, one.precision) == (other.domain, other.precision)
    alike = alike and (one.recompute is None) == (other.recompute is None)
    return alike and not {s.variant for s in one.spans}.isdisjoint(s.variant for s in other.spans)


class Fetcher:
    """Fetches the spans of jobs, in their order. Any thread but the worker's main one may use it.

    Without a GPU the fetcher decodes values and rotates keys. With a GPU the writer does both.

    Args:
        client: The store.
        space: The KV space of all values.
        tiers: The worker's own tiers.
        rotation: Of the model's keys; None: unknown, and then no value has moved.
        device: The model's device.
    """

    def __init__(
        self,
        client: ShardedStore,
        space: KVSpace,
        tiers: LocalTiers,
        rotation: KeyRotation | None,
        device: torch.device,
    ) -> None:
        self._client = client
        self._space = space
        self._tiers = tiers
        self._rotation = rotation
        self._device = device
        self._pins = is_needed(device)

    def fetch(
        self, jobs: Sequence[LoadJob], timeout_s: float
    ) -> Iterator[tuple[int, IncomingValue]]:
        """Yield the values of one job after another, one for each span, with the job's index.

        A job gets fewer values after one that did not arrive and cannot be recomputed. The fetcher
        requests each value that no tier has once from the store.

        Args:
            jobs: Jobs that share values (``share_values``).
            timeout_s: Deadline of the request to the store.

        Raises:
            RagCacheError: As the store raises it.
        """
        # Start all reads now, so that an eviction while the store answers does not affect them.
        reads = [[self._read_tier(job, span) for span in job.spans] for job in jobs]
        wanted = Counter(
            span.variant
            for job, reads_of_job in zip(jobs, reads, strict=True)
            for span, read in zip(job.spans, reads_of_job, strict=True)
            if read is None
        )
        fix_overheads = {
            span.variant: span.fix_overhead
            for job in jobs
            for span in job.spans
            if span.fix_overhead
        }
        answers = _StoreAnswers(
            wanted,
            self._client.get(
                list(wanted),
                timeout_s,
                exact=jobs[0].recompute is None,
                domain=jobs[0].domain,
                fix_overheads=fix_overheads,
                # A GPU copies other memory only while the worker's main thread waits.
                allocate=receive_buffer if self._pins else None,
            )
            if wanted
            else iter(()),
        )
        for index, job in enumerate(jobs):
            for value in self._values(job, reads[index], answers):
                yield index, value

    def _values(
        self, job: LoadJob, reads: list[TierRead | None], answers: _StoreAnswers
    ) -> Iterator[IncomingValue]:
        for index, span in enumerate(job.spans):
            read, reads[index] = reads[index], None
            if read is not None:
                yield self._from_tier(span, read)
                continue
            answer, shared = answers.take(span.variant)
            if answer is None:
                yield IncomingValue(span, None, reason="store ended early")
                return
            if answer is Miss.CORRUPT and not job.can_recompute(span):
                # The load ends here. The engine computes the value and puts it again, which a store
                # accepts only after it has heard of the damage, at the end of the request.
                with contextlib.suppress(RagCacheError):
                    answers.read_to_end()
            value = self._from_store(job, span, answer, shared=shared)
            yield value
            if value.source is None and not value.can_recompute:
                return

    def _read_tier(self, job: LoadJob, span: VariantSpan) -> TierRead | None:
        # After its own prefix a chunk has the position at which it was computed.
        base = span.start if span.base_position is None else span.base_position
        exact = not job.can_recompute(span)
        if not exact and job.precision.rounding is not None:
            return None  # the tiers have values as they arrived
        use = VariantUse(fix_overhead=span.fix_overhead)
        num_tokens = span.end - span.start
        read = self._tiers.read(span.variant, num_tokens, base, job.domain, exact=exact, use=use)
        if read is not None and not exact and not job.precision.allows(read.precision):
            read.close()
            return None
        return read

    def _from_tier(self, span: VariantSpan, read: TierRead) -> IncomingValue:
        num_tokens = span.end - span.start
        source: ValueSource = read
        rotate_by = span.position_shift
        if rotate_by and self._device == _CPU:
            value = concatenate_pieces(read.pieces(0, num_tokens), _CPU)
            read.close()
            source, rotate_by = NativeValue(self._rotated(value, rotate_by)), 0
        size = value_bytes(self._space, num_tokens)
        return IncomingValue(span, source, num_bytes=size, tier=read.tier, rotate_by=rotate_by)

    def _from_store(
        self, job: LoadJob, span: VariantSpan, stored: ValueOrMiss, *, shared: bool
    ) -> IncomingValue:
        can_recompute = job.can_recompute(span)
        if isinstance(stored, Miss):
            reason = miss_reason(stored)
            return IncomingValue(span, None, reason=reason, can_recompute=can_recompute)
        if not (can_recompute or stored.info.serves_exact):
            # The store re-encoded it with a lossy codec after the lookup.
            return IncomingValue(span, None, reason=miss_reason(Miss.OTHER_PRECISION))
        if not job.precision.allows(stored.info.precision):
            reason = miss_reason(Miss.OTHER_PRECISION)
            return IncomingValue(span, None, reason=reason, can_recompute=can_recompute)
        if span.base_position not in (None, stored.info.base_position):
            return IncomingValue(span, None, reason="other position", can_recompute=can_recompute)
        num_tokens, size = span.end - span.start, len(stored.value)
        rotate_by = span.position_shift
        source: ValueSource
        native: Callable[[], torch.Tensor | None]
        if self._is_for_device(stored) and matches_space(stored, num_tokens, self._space):
            source = EncodedValue(stored, self._space, self._device)
            offered_bytes, native = size, partial(decode, stored, num_tokens, self._space)
        else:
            value = decode(stored, num_tokens, self._space, pinned=self._pins)
            if value is None:
                return IncomingValue(span, None, reason="other layout", can_recompute=can_recompute)
            rounding = job.precision.rounding
            if rounding is not None and can_recompute and stored.info.precision.lossless:
                value = rounded_to(rounding, value, self._space)
            offered_bytes, native = value.nbytes, lambda: value
            rotated = value
            if rotate_by and self._device == _CPU:
                # Other users of the value get it as it was computed: a second rotation would round
                # its keys a second time.
                in_place = not (self._tiers.has_memory or shared)
                rotated, rotate_by = self._rotated(value, rotate_by, in_place=in_place), 0
            source = NativeValue(rotated)
        return IncomingValue(
            span,
            source,
            can_recompute=can_recompute,
            num_bytes=size,
            rotate_by=rotate_by,
            # The tiers keep nothing of a trial.
            offer=None
            if job.precision.rounding is not None
            else OfferedValue(span.variant, stored.info, offered_bytes, job.domain, native),
        )

    def _rotated(
        self, value: torch.Tensor, rotate_by: int, *, in_place: bool = True
    ) -> torch.Tensor:
        assert self._rotation is not None
        out = None if in_place else torch.empty_like(value)
        return self._rotation.rotate_part(value, rotate_by, out)

    def _is_for_device(self, stored: StoredValue) -> bool:
        precision = stored.info.precision
        lossy = not precision.lossless and Codec.PACKED not in (precision.key, precision.value)
        return lossy and self._device.type == "cuda"
