"""Where the values of a load come from: the worker's own tiers, and the store for the rest."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from ragcache_core.errors import RagCacheError
from ragcache_core.identity.keys import KVSpace, VariantKey
from ragcache_core.identity.variant import Codec, Miss
from ragcache_engine.kv_cache.chunk_pool import concatenate_pieces
from ragcache_engine.kv_cache.incoming_value import (
    EncodedValue,
    IncomingValue,
    NativeValue,
    ValueSource,
)
from ragcache_engine.kv_cache.value_tensors import decode, matches_space
from ragcache_engine.protocol.messages import LoadJob, VariantSpan, miss_reason
from ragcache_engine.tiers.local_tiers import LocalTiers, OfferedValue, TierRead
from ragcache_kv.rotation import KeyRotation
from ragcache_kv.store_client.sharded import ShardedStore
from ragcache_kv.values.layout import value_bytes
from ragcache_kv.values.stored_value import Answer, StoredValue

_CPU = torch.device("cpu")


class _Answers:
    """What a store says of values that some jobs want. wanted: how often each is, in order."""

    def __init__(
        self, wanted: Mapping[VariantKey, int], stream: Iterator[tuple[VariantKey, Answer]]
    ) -> None:
        self._uses = dict(wanted)
        self._shared = {key for key, times in wanted.items() if times > 1}
        self._order = iter(wanted)
        self._stream = stream
        self._came: dict[VariantKey, Answer] = {}

    def take(self, key: VariantKey) -> tuple[Answer | None, bool]:
        """The answer to a key, and whether others have the same; None: the store has ended early.

        Raises RagCacheError, as the store does.
        """
        while key not in self._came:
            if not self._read():
                return None, False
        answer = self._came[key]
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._came[key]  # nobody else keeps its memory
        return answer, key in self._shared

    def read_on(self) -> None:
        """Read what there is, to the end. Raises RagCacheError, as the store does."""
        while self._read():
            pass

    def _read(self) -> bool:
        key, answer = next(self._stream, (None, Miss.TIMED_OUT))
        if key is None:
            return False
        if key != next(self._order, None):
            raise RagCacheError("the store answered in another order")
        self._came[key] = answer
        return True


def share_values(one: LoadJob, other: LoadJob) -> bool:
    """Whether two jobs want some of the same values, in the same way."""
    alike = one.domain == other.domain and (one.recompute is None) == (other.recompute is None)
    return alike and not {s.variant for s in one.spans}.isdisjoint(s.variant for s in other.spans)


class Fetcher:
    """Fetches the spans of jobs in their order. For any thread but the worker's main one.

    rotation: of the model's keys; None where that is not known, and then none have moved. device:
    the model's. What is to be decoded or turned is so by a GPU, when it is written; where there is
    none, here.
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

    def fetch(self, jobs: Sequence[LoadJob], timeout_s: float) -> Iterator[tuple[int, IncomingValue]]:
        """Arrivals of one job after another, with the job's place: one for each of its spans.

        Fewer if one that did not come cannot be mended. jobs: that go together (``share_values``).
        The store is asked for what no tier has, once for each value; where that is nothing, it is
        not asked. Raises RagCacheError, as the store does.
        """
        # All of them now: what is evicted while the store is waited for is still to be read.
        readings = [[self._in_tier(job, span) for span in job.spans] for job in jobs]
        wanted = Counter(
            span.variant
            for job, of_job in zip(jobs, readings, strict=True)
            for span, reading in zip(job.spans, of_job, strict=True)
            if reading is None
        )
        answers = _Answers(
            wanted,
            self._client.get(
                list(wanted), timeout_s, exact=jobs[0].recompute is None, domain=jobs[0].domain
            )
            if wanted
            else iter(()),
        )
        for place, job in enumerate(jobs):
            for arrival in self._arrivals(job, readings[place], answers):
                yield place, arrival

    def _arrivals(
        self, job: LoadJob, readings: list[TierRead | None], answers: _Answers
    ) -> Iterator[IncomingValue]:
        for place, span in enumerate(job.spans):
            reading, readings[place] = readings[place], None
            if reading is not None:
                yield self._from_tier(span, reading)
                continue
            stored, shared = answers.take(span.variant)
            if stored is None:
                yield IncomingValue(span, None, reason="store ended early")
                return
            if stored is Miss.CORRUPT and not job.can_recompute(span):
                # This is the last that is read. It is computed and put anew, which a store that has
                # not heard of the damage would not take; it hears of it at the end.
                with contextlib.suppress(RagCacheError):
                    answers.read_on()
            arrival = self._from_store(job, span, stored, shared=shared)
            yield arrival
            if arrival.source is None and not arrival.mended:
                return

    def _in_tier(self, job: LoadJob, span: VariantSpan) -> TierRead | None:
        # Behind its own prefix a chunk is where it was computed.
        base = span.start if span.base_position is None else span.base_position
        exact = not job.can_recompute(span)
        return self._tiers.read(span.variant, span.end - span.start, base, job.domain, exact=exact)

    def _from_tier(self, span: VariantSpan, reading: TierRead) -> IncomingValue:
        num_tokens = span.end - span.start
        source: ValueSource = reading
        turn = span.position_shift
        if turn and self._device == _CPU:
            value = concatenate_pieces(reading.pieces(0, num_tokens), _CPU)
            reading.close()
            source, turn = NativeValue(self._turned(value, turn)), 0
        size = value_bytes(self._space, num_tokens)
        return IncomingValue(span, source, num_bytes=size, came_from=reading.tier, turn=turn)

    def _from_store(
        self, job: LoadJob, span: VariantSpan, stored: StoredValue | Miss, *, shared: bool
    ) -> IncomingValue:
        mended = job.can_recompute(span)
        if isinstance(stored, Miss):
            return IncomingValue(span, None, reason=miss_reason(stored), mended=mended)
        if not (mended or stored.info.serves_exact):
            # It was when it was looked up; since then it has been held with a loss.
            return IncomingValue(span, None, reason=miss_reason(Miss.OTHER_PRECISION))
        if span.base_position not in (None, stored.info.base_position):
            return IncomingValue(span, None, reason="other position", mended=mended)
        num_tokens, size = span.end - span.start, len(stored.value)
        if self._is_for_device(stored) and matches_space(stored, num_tokens, self._space):
            native = partial(decode, stored, num_tokens, self._space)
            source = EncodedValue(stored, self._space, self._device)
            offer = OfferedValue.of(span.variant, stored.info, size, job.domain, native)
            return IncomingValue(
                span, source, mended=mended, num_bytes=size, turn=span.position_shift, offer=offer
            )
        value = decode(stored, num_tokens, self._space)
        if value is None:
            return IncomingValue(span, None, reason="other layout", mended=mended)
        kept = OfferedValue.of(span.variant, stored.info, value.nbytes, job.domain, lambda: value)
        turn = span.position_shift
        turned = value
        if turn and self._device == _CPU:
            # What others use stays as it was computed: turned twice, it would be rounded twice.
            turned = self._turned(value, turn, apart=self._tiers.keeps or shared)
            turn = 0
        return IncomingValue(span, NativeValue(turned), mended=mended, num_bytes=size, turn=turn, offer=kept)

    def _turned(self, value: torch.Tensor, turn: int, *, apart: bool = False) -> torch.Tensor:
        assert self._rotation is not None
        out = torch.empty_like(value) if apart else None
        return self._rotation.rotate_part(value, turn, out)

    def _is_for_device(self, stored: StoredValue) -> bool:
        precision = stored.info.precision
        lossy = not precision.lossless and Codec.PACKED not in (precision.key, precision.value)
        return lossy and self._device.type == "cuda"
