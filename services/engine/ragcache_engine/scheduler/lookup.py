"""Asks the store what it holds of a prompt, on threads of its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from ragcache_core.blend.selection import ALPHA, Blend, blend
from ragcache_core.identity.keys import KVSpace, VariantKey
from ragcache_core.identity.variant import Miss, Tier
from ragcache_core.plan.prefix_pieces import prefix_pieces
from ragcache_core.plan.reuse_plan import Action, ReusePlan
from ragcache_core.plan.segments import NamedSegment, longest_exact_chain
from ragcache_core.store_api import Want
from ragcache_engine.scheduler.variant_candidates import candidates
from ragcache_kv.store_client.sharded import ShardedAnswer, ShardedStore
from ragcache_wire.trace_context import metadata
from ragcache_wire.tracing import Kind, Tracer

_STORES_SHARE = 0.8
"""Share of the lookup's deadline that the store gets; the rest is for threads to take turns."""


@dataclass(frozen=True, slots=True)
class Found:
    """A store's answer, and what a prompt is put together from, if not of exact variants alone.

    segments: what was asked for.
    """

    segments: tuple[NamedSegment, ...]
    answer: ShardedAnswer
    blend: Blend | None = None

    @property
    def exact(self) -> int:
        """How many segments, from the first on, are held as exact."""
        infos = {key: held.info for key, held in self.answer.held().items()}
        return len(longest_exact_chain(self.segments, infos))

    @property
    def on_disk(self) -> list[VariantKey]:
        """What is going to be loaded of it, maybe, and is on the store's disk."""
        held = self.answer.held()
        if self.blend is not None:
            used = [source.variant for source in self.blend.sources]
        else:
            used = [named.variant for named in self.segments[: self.exact]]
        return [key for key in used if key in held and held[key].tier is Tier.DISK]

    @property
    def may_grow(self) -> bool:
        """Whether more may be on its way; to a shard that is lost, nothing is."""
        lost = any(variants.miss is Miss.LOST for variants in self.answer.variants)
        return not lost and self.exact < len(self.segments)


class Lookups:
    """Each begins a lookup and returns at once. traceparent: the span that it is part of, or ""."""

    def __init__(
        self, client: ShardedStore, space: KVSpace, deadline_s: float, tracer: Tracer | None
    ) -> None:
        self._client = client
        self._space = space
        self._timeout_s = _STORES_SHARE * deadline_s
        self._tracer = tracer or Tracer()
        self._pool = ThreadPoolExecutor(2, "ragcache-lookup")
        self._prefetches = ThreadPoolExecutor(1, "ragcache-prefetch")  # no lookup waits for one
        self.can_blend = False
        # Connects now, so that the first visitor does not wait for it; an outage is no matter here.
        self._pool.submit(client.connect, deadline_s)

    def planned(
        self, plan: ReusePlan, segments: tuple[NamedSegment, ...], traceparent: str
    ) -> Future[Found]:
        """Of segments that are named already."""
        return self._begin(plan, lambda: segments, traceparent)

    def plain(self, plan: ReusePlan, token_ids: Sequence[int], traceparent: str) -> Future[Found]:
        """Of the whole pieces of a prompt, which are named on the lookup's thread."""
        space, domain = self._space, plan.domain
        return self._begin(plan, lambda: prefix_pieces(space, domain, token_ids), traceparent)

    def prefetch(self, lookup: Future[Found]) -> None:
        """Have the store bring what an ended lookup found on disk into memory, in the background.

        A hint: nobody waits for it, and whatever goes wrong is no matter.
        """
        if lookup.cancelled() or lookup.exception() is not None:
            return
        if on_disk := lookup.result().on_disk:
            with contextlib.suppress(RuntimeError):  # no thread can be started, say
                self._prefetches.submit(self._client.prefetch, on_disk, self._timeout_s)

    def close(self) -> None:
        """Stop asking."""
        for pool in (self._pool, self._prefetches):
            pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _begin(
        self,
        plan: ReusePlan,
        named: Callable[[], tuple[NamedSegment, ...]],
        traceparent: str,
    ) -> Future[Found]:
        def traced() -> Found:
            parent = metadata(traceparent)
            with self._tracer.below("lookup", parent, Kind.INTERNAL) as trace, trace.current():
                found = self._find(named(), plan)
                held = sum(1 for variants in found.answer.variants if variants.held)
                trace.set(segments=len(found.segments), held=held, blend=found.blend is not None)
                return found

        try:
            return self._pool.submit(traced)
        except RuntimeError as error:  # no thread can be started, or the engine is ending
            failed: Future[Found] = Future()
            failed.set_exception(error)
            return failed

    def _find(self, segments: tuple[NamedSegment, ...], plan: ReusePlan) -> Found:
        # Ends before the request stops waiting, so that one silent shard loses no other's answer.
        timeout_s = self._timeout_s
        if not (plan.blends and self.can_blend):
            wants = [Want.of(named.variant) for named in segments]
            answer = self._client.lookup(wants, timeout_s=timeout_s, exact=True, domain=plan.domain)
            return Found(segments, answer)
        ends = time.monotonic() + timeout_s
        wants = [
            Want(named.variant.chunk)
            if named.segment.action is Action.BLEND
            else Want.of(named.variant)
            for named in segments
        ]
        answer = self._client.lookup(wants, timeout_s=timeout_s, domain=plan.domain)
        held = candidates(self._client, segments, answer, plan.domain, ends - time.monotonic())
        exact = Found(segments, answer).exact
        alpha = ALPHA if plan.alpha is None else plan.alpha
        found = blend(segments, exact, held, plan.budget, alpha)
        return Found(segments, answer, found if found.approximate else None)
