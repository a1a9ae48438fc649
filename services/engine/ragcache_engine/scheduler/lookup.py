"""Asks the store which variants of a prompt it has, on background threads."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from ragcache_core.access.reader import may_use
from ragcache_core.blend.observation import ChunkObservation, observation_key
from ragcache_core.blend.variant_selection import (
    ALPHA,
    Blend,
    VariantCandidate,
    handed_off_blend,
    most_promising,
    select_variants,
)
from ragcache_core.errors import RagCacheError
from ragcache_core.identity.keys import KVSpace, VariantKey
from ragcache_core.identity.variant import Miss
from ragcache_core.plan.reuse_plan import Action, Handoff, ReusePlan
from ragcache_core.plan.segments import NamedSegment, longest_exact_chain, prefix_pieces
from ragcache_core.store_api import LookupKey, StoredVariant
from ragcache_kv.store_client.shard_router import ShardedLookup
from ragcache_kv.store_client.sharded import ShardedStore
from ragcache_wire.tracing import SpanKind, Tracer, metadata

log = logging.getLogger("vllm.ragcache")

_STORE_SHARE = 0.8
"""Share of the lookup's deadline for the store's answer. Threads take turns in the rest."""

MAX_CANDIDATES = 16
"""Variants of one chunk whose observations are compared, at most: the most promising ones."""


@dataclass(frozen=True, slots=True)
class LookupResult:
    """The store's answer, and the blend that it allows.

    Args:
        segments: The segments of the lookup.
        answer: The store's answer: one entry per segment, then those of blended pieces.
        blend: How to build the prompt from variants that are not all exact. None: do not blend.
    """

    segments: tuple[NamedSegment, ...]
    answer: ShardedLookup
    blend: Blend | None = None

    @property
    def num_exact(self) -> int:
        """Return how many leading segments have an exact variant."""
        infos = {key: entry.info for key, entry in self.answer.by_key().items()}
        return len(longest_exact_chain(self.segments, infos))

    @property
    def variants_to_load(self) -> list[VariantKey]:
        """Return the stored variants that the request may load."""
        stored = self.answer.by_key()
        if self.blend is not None:
            used = [source.variant for source in self.blend.sources]
        else:
            used = [named.variant for named in self.segments[: self.num_exact]]
        return [key for key in used if key in stored]

    @property
    def may_complete_later(self) -> bool:
        """Tell whether the store may get the missing variants. A lost shard gets none."""
        lost = any(variants.miss is Miss.LOST for variants in self.answer.variants)
        return not lost and self.blend is None and self.num_exact < len(self.segments)


class LookupExecutor:
    """Starts lookups on its threads. No method waits for the store."""

    def __init__(
        self, client: ShardedStore, space: KVSpace, deadline_s: float, tracer: Tracer | None
    ) -> None:
        self._client = client
        self._space = space
        self._timeout_s = _STORE_SHARE * deadline_s
        self._tracer = tracer or Tracer()
        self._pool = ThreadPoolExecutor(2, "ragcache-lookup")
        # A thread of its own, so that no lookup waits for a prefetch.
        self._prefetch_pool = ThreadPoolExecutor(1, "ragcache-prefetch")
        self.blending_enabled = False
        # Connect now, so that the first request does not wait for it. The result does not matter.
        self._pool.submit(client.connect, deadline_s)

    def start_planned(
        self,
        plan: ReusePlan,
        segments: tuple[NamedSegment, ...],
        traceparent: str,
        blended_pieces: tuple[NamedSegment, ...] = (),
    ) -> Future[LookupResult]:
        """Start a lookup of a plan's segments.

        Args:
            blended_pieces: Pieces of a blend of another engine, for a request that decodes it.
        """
        return self._start(plan, lambda: segments, traceparent, blended_pieces)

    def start_plain(
        self, plan: ReusePlan, token_ids: Sequence[int], traceparent: str
    ) -> Future[LookupResult]:
        """Start a lookup of a prompt's pieces. The lookup's thread hashes the tokens."""
        space, domain = self._space, plan.domain
        return self._start(plan, lambda: prefix_pieces(space, domain, token_ids), traceparent)

    def hold(self, variants: Sequence[VariantKey], hold_s: float) -> None:
        """Ask the store to promote and keep what waiting requests need, in the background.

        This is a hint: the connector does not wait for it and ignores its errors.

        Args:
            variants: The variants.
            hold_s: Time for which the store does not evict them.
        """
        with contextlib.suppress(RuntimeError):  # no thread can be started
            self._prefetch_pool.submit(
                self._client.prefetch, variants, self._timeout_s, hold_s=hold_s
            )

    def close(self) -> None:
        """Stop the threads and close the client."""
        for pool in (self._pool, self._prefetch_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _start(
        self,
        plan: ReusePlan,
        make_segments: Callable[[], tuple[NamedSegment, ...]],
        traceparent: str,
        blended_pieces: tuple[NamedSegment, ...] = (),
    ) -> Future[LookupResult]:
        def run() -> LookupResult:
            parent = metadata(traceparent)
            with (
                self._tracer.start_child_of("lookup", parent, SpanKind.INTERNAL) as span,
                span.current(),
            ):
                result = self._query_store(make_segments(), plan, blended_pieces)
                num_stored = sum(1 for variants in result.answer.variants if variants.stored)
                span.set(
                    segments=len(result.segments),
                    stored=num_stored,
                    blend=result.blend is not None,
                )
                return result

        try:
            return self._pool.submit(run)
        except RuntimeError as error:  # no thread can be started, or the engine is shutting down
            failed: Future[LookupResult] = Future()
            failed.set_exception(error)
            return failed

    def _query_store(
        self,
        segments: tuple[NamedSegment, ...],
        plan: ReusePlan,
        blended_pieces: tuple[NamedSegment, ...],
    ) -> LookupResult:
        # Ends before the request stops waiting, so that one silent shard loses no other's answer.
        timeout_s = self._timeout_s
        if plan.handoff is Handoff.DECODE and blended_pieces and self.blending_enabled:
            return self._query_handoff(segments, plan.domain, blended_pieces)
        if plan.handoff is Handoff.DECODE or not (plan.blends and self.blending_enabled):
            wants = [LookupKey.for_variant(named.variant) for named in segments]
            answer = self._client.lookup(wants, timeout_s=timeout_s, exact=True, domain=plan.domain)
            return LookupResult(segments, answer)
        deadline = time.monotonic() + timeout_s
        wants = [
            LookupKey(
                named.variant.chunk,
                named.variant.prefix,
                others=named.segment.action is Action.BLEND,
            )
            for named in segments
        ]
        answer = self._client.lookup(
            wants, timeout_s=timeout_s, domain=plan.domain, lossy=plan.precision.lossy
        )
        left_s = deadline - time.monotonic()
        candidates = find_candidates(self._client, segments, answer, plan, left_s)
        num_exact = LookupResult(segments, answer).num_exact
        alpha = ALPHA if plan.alpha is None else plan.alpha
        chosen = select_variants(segments, num_exact, candidates, plan.recompute_share, alpha)
        return LookupResult(segments, answer, chosen if chosen.approximate else None)

    def _query_handoff(
        self,
        segments: tuple[NamedSegment, ...],
        domain: str,
        pieces: tuple[NamedSegment, ...],
    ) -> LookupResult:
        """Look for what another engine hands off: an exact prompt, or one that it has blended."""
        wants = [LookupKey.for_variant(named.variant) for named in (*segments, *pieces)]
        answer = self._client.lookup(wants, timeout_s=self._timeout_s, domain=domain)
        exact = LookupResult(segments, answer)
        is_blended = all(one.stored for one in answer.variants[len(segments) :])
        if exact.num_exact == len(segments) or not is_blended:
            return exact
        return LookupResult(segments, answer, handed_off_blend(pieces))


def find_candidates(
    client: ShardedStore,
    segments: Sequence[NamedSegment],
    answer: ShardedLookup,
    plan: ReusePlan,
    timeout_s: float,
) -> Mapping[int, Sequence[VariantCandidate]]:
    """Return the candidates of each segment that may blend, by the segment's index.

    Left out is what depends on documents that the plan's reader may not read, or on a text of
    another key, and what is stored in a precision that the plan does not allow.

    Args:
        client: The store, which this function asks for observations.
        segments: The prompt's segments.
        answer: The store's answer to a lookup of ``segments``.
        plan: Of the prompt.
        timeout_s: Bounds the request. A candidate whose observation does not arrive has none.
    """
    present = {named.segment.chunk for named in segments}

    def usable(found: Sequence[StoredVariant]) -> list[StoredVariant]:
        return [
            one
            for one in found
            if plan.precision.allows(one.info.precision)
            and may_use(
                plan.reader,
                present,
                one.influence,
                one.prefix_chunks,
                is_exact=one.info.provenance.exact,
            )
        ]

    stored = {
        index: most_promising(usable(found.stored), segments, index, MAX_CANDIDATES)
        for index, (named, found) in enumerate(zip(segments, answer.variants, strict=True))
        if named.segment.action is Action.BLEND and found.stored
    }
    all_stored = [entry for entries in stored.values() for entry in entries]
    observations = _observations(client, all_stored, plan.domain, timeout_s)
    return {
        index: [VariantCandidate(e.key, e.info, observations.get(e.key)) for e in entries]
        for index, entries in stored.items()
    }


def _observations(
    client: ShardedStore, stored: Sequence[StoredVariant], domain: str, timeout_s: float
) -> Mapping[VariantKey, ChunkObservation]:
    observations: dict[VariantKey, ChunkObservation] = {}
    if not stored or timeout_s <= 0:
        return observations
    keys = [observation_key(entry.key) for entry in stored]
    try:
        answers = client.get(keys, timeout_s, domain=domain)
        for entry, (_, value) in zip(stored, answers, strict=False):
            observation = None if isinstance(value, Miss) else _parse(value.value)
            if observation is not None and len(observation.influence) == entry.info.num_tokens:
                observations[entry.key] = observation
    except RagCacheError as error:
        log.warning("lookup: cannot read observations of chunks error=%s", error)
    return observations


def _parse(raw: memoryview) -> ChunkObservation | None:
    try:
        return ChunkObservation.from_bytes(raw)
    except ValueError as error:
        log.warning("lookup: an observation of a chunk is malformed error=%s", error)
        return None
