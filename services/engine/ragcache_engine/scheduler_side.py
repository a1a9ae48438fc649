"""Decides what to load and what to save, in the engine's scheduler process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, Protocol

from ragcache_core.blend.blending import Blend, blend
from ragcache_core.blend.pays import BlendPays
from ragcache_core.errors import InvalidInput
from ragcache_core.keys import KVSpace, VariantKey
from ragcache_core.plan import Action, ReusePlan
from ragcache_core.reuse import NamedSegment, checked_segments, longest_exact_chain
from ragcache_core.storing import AsOf, Held, Want
from ragcache_core.variant import Miss, Origin, Provenance, VariantInfo
from ragcache_engine.candidates import candidates
from ragcache_engine.config import EngineConfig
from ragcache_engine.records import Record, RecordBook, reason
from ragcache_engine.transfer import (
    NO_BLEND,
    Computing,
    LoadJob,
    LoadOutcome,
    ObserveJob,
    Repair,
    SaveJob,
    Span,
    StepJobs,
)
from ragcache_kv.store.sharded import ShardedAnswer, ShardedStore
from ragcache_kv.value import value_bytes

log = logging.getLogger("vllm.ragcache")

_LOOKUP_SHARE = 0.8
"""Share of the lookup's deadline that the store gets; the rest is for threads to take turns."""


_SPARE_SHARE = 16
"""Of all blocks, one in so many stays free for vLLM, whatever else blocks are good for."""

_KEPT_SHARE = 8
"""Of all blocks, one in so many is kept at most for requests that have ended."""


class Blocks(Protocol):
    """What is used of vLLM's ``BlockPool``."""

    num_gpu_blocks: int

    def get_num_free_blocks(self) -> int:
        """How many could be taken."""

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        """Take blocks."""

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Give blocks back."""


class _Phase(Enum):
    WAITING = auto()
    LOADING = auto()
    PREFILL = auto()
    DECODE = auto()


@dataclass(slots=True)
class _Request:
    """What is known of one request with a plan."""

    plan: ReusePlan
    token_ids: Sequence[int]
    segments: tuple[NamedSegment, ...]
    lookup: Future[_Found] | None
    arrived: float
    stored: dict[VariantKey, Held] | None = None
    blend: Blend | None = None  # what it is put together from, if not of exact variants alone
    pays: bool | None = None  # whether the blend is faster than computing; None: not asked yet
    tainted_from: int | None = None  # what is computed beyond leans on what is not exact
    tainted_before: int | None = None  # the same, before the load that is under way
    misses: dict[VariantKey, Miss] = field(default_factory=dict)
    as_of: Mapping[str, AsOf] = field(default_factory=dict)
    saved: dict[int, SaveJob] = field(default_factory=dict)  # by place
    load_failed: bool = False
    pending_load: tuple[int, int] | None = None  # [first, end) promised to vLLM
    phase: _Phase = _Phase.WAITING
    phase_since: float = 0.0
    record: Record = field(default_factory=Record)
    recorded: bool = False  # the record tells of the first token; a later preemption is not in it


@dataclass(frozen=True, slots=True)
class _Found:
    """A store's answer, and what a prompt is put together from, if not of exact variants alone."""

    answer: ShardedAnswer
    blend: Blend | None = None


class SchedulerSide:
    """One per engine. Called on the scheduler's thread only; never blocks it for long."""

    def __init__(
        self, config: EngineConfig, space: KVSpace, book: RecordBook, client: ShardedStore
    ) -> None:
        self._config = config
        self._space = space
        self._book = book
        self._client = client
        self._pool = ThreadPoolExecutor(2, "ragcache-lookup")
        self._requests: dict[str, _Request] = {}
        self._loads: list[LoadJob] = []
        self._observes: list[ObserveJob] = []
        self._blocks: Blocks | None = None
        self._can_blend = False
        self._pays = BlendPays()
        self._block_size = 1
        self._scratch: dict[str, list[Any]] = {}  # blocks by request, while its load is under way
        self._kept: dict[str, int] = {}  # number of blocks by request that has ended
        self._wait_left_s = config.lookup_wait_s
        # Connects now, so that the first visitor does not wait for it; an outage is no matter here.
        self._pool.submit(client.connect, config.lookup_deadline_s)

    def bind(self, blocks: Blocks, block_size: int) -> None:
        """Blend from now on. blocks: the pool that scratch blocks are taken from."""
        self._blocks, self._block_size, self._can_blend = blocks, block_size, True

    # The life of a request, in the order of vLLM's calls.

    def on_new_request(self, request_id: str, token_ids: Sequence[int], params: object) -> None:
        """Take up a request if it carries a plan, and begin asking the store.

        params: the request's kv_transfer_params as the client sent them.
        """
        plan_json = params.get("ragcache") if isinstance(params, dict) else None
        if plan_json is None:
            return
        try:
            plan = ReusePlan.from_json(plan_json)
            segments = checked_segments(plan, token_ids, self._space)
        except InvalidInput as error:
            log.warning("plan of request %s is dropped: %s", request_id, error)
            return
        except Exception:
            # Whatever a client can put into a plan, vLLM would end on an exception.
            log.exception("plan of request %s is dropped", request_id)
            return
        now = time.monotonic()
        lookup = self._pool.submit(self._lookup, segments, plan) if segments else None
        request = _Request(plan, token_ids, segments, lookup, now, phase_since=now)
        request.record.prompt_tokens = len(token_ids)
        if len(segments) < len(plan.segments):
            first_left_out = plan.segments[len(segments)]
            if first_left_out.action is Action.COMPUTE:
                request.record.miss = "planned to be computed"
            else:
                request.record.miss = "plan does not match the prompt"
                log.warning("plan of request %s does not match its tokens", plan.request)
        self._requests[request_id] = request

    def loadable_tokens(self, request_id: str, num_local: int) -> int | None:
        """Tokens that can be loaded beyond the num_local that the engine holds itself.

        None: not known yet, ask again in the next step. Called any number of times.
        """
        request = self._requests.get(request_id)
        if request is None:
            return 0
        if not request.recorded:
            request.record.local_tokens = num_local
        if request.load_failed or not request.segments:
            return 0
        if request.stored is None and not self._finish_lookup(request):
            return None
        covered = self._covered(request, num_local)
        # The last token is always computed: its output is the first token of the answer.
        end = min(covered, len(request.token_ids) - 1)
        if end - num_local < self._config.min_load_tokens:
            request.pending_load = None
            return 0
        request.pending_load = (num_local, end)
        return end - num_local

    def approximate_from(self, request_id: str) -> int | None:
        """First position of what is about to be loaded that is not exact; None: all of it is.

        From there on the request's blocks are nobody else's (``salting``).
        """
        request = self._requests.get(request_id)
        if request is None or request.blend is None or request.pending_load is None:
            return None
        first, end = request.pending_load
        exact_end = max(first, request.blend.exact_end)
        return exact_end if exact_end < end else None

    def on_allocated(self, request_id: str, blocks: Sequence[int], num_external: int) -> None:
        """Blocks are there. num_external: tokens that vLLM expects to be loaded into them."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if num_external == 0 or request.pending_load is None:
            request.pending_load = None
            if request.phase is not _Phase.DECODE:
                self._enter(request, _Phase.PREFILL)
            return
        first, end = request.pending_load
        if request.blend is None or end <= request.blend.exact_end:
            spans = tuple(
                Span(named.variant, named.segment.start, named.segment.end)
                for named in request.segments
                if named.segment.end > first and named.segment.start < end
            )
            repair = None
        else:
            spans = tuple(
                Span(source.variant, source.start, source.end, source.base_position)
                for source in request.blend.sources
                if source.variant is not None and source.end > first and source.start < end
            )
            repair = self._repair(request_id, request, request.blend, first, end)
        domain = request.plan.domain
        self._loads.append(LoadJob(request_id, spans, first, end, tuple(blocks), domain, repair))
        request.pending_load = None
        self._enter(request, _Phase.LOADING)

    def on_passes(self, passes: Iterable[tuple[int, float]]) -> None:
        """Passes that computed prompts ended in the worker: tokens and seconds of each."""
        for tokens, seconds in passes:
            self._pays.computed(tokens, seconds)

    def on_outcomes(self, outcomes: Iterable[LoadOutcome]) -> None:
        """Loads ended in the worker."""
        for outcome in outcomes:
            if (scratch := self._scratch.pop(outcome.request_id, None)) and self._blocks:
                self._blocks.free_blocks(scratch)
            if not outcome.reason:
                self._pays.loaded(outcome.tokens, outcome.seconds)
                self._pays.repaired(outcome.repaired, outcome.repair_s)
            if outcome.reason == NO_BLEND:
                self._can_blend = False
                for other in self._requests.values():
                    other.blend = None
            request = self._requests.get(outcome.request_id)
            if request is None:
                continue
            self._enter(request, _Phase.WAITING)
            if not request.recorded:
                request.record.loaded_tokens = outcome.tokens
                request.record.loaded_bytes = outcome.num_bytes if outcome.tokens else 0
                request.record.blended_tokens = outcome.blended
                request.record.repaired_tokens = outcome.repaired
                request.record.repair_s = outcome.repair_s
                request.record.miss = outcome.reason or request.record.miss
            if outcome.reason:
                # vLLM asks again after a failure; the same answer would loop for ever.
                request.load_failed = True
                # What is not exact of this load has been given up, and is computed.
                request.tainted_from = request.tainted_before
                if outcome.missing is not None:
                    self._forget_from(request, outcome.missing)

    def step(
        self,
        progress: Iterable[tuple[str, int, int]],
        blocks_of: Callable[[str], Sequence[int]],
    ) -> StepJobs:
        """Jobs of the step about to run.

        progress: (request id, tokens computed before, tokens of this step) of every request that
        runs in it. blocks_of: block table of such a request.
        """
        saves: list[SaveJob] = []
        computing: list[Computing] = []
        num_tokens = 0
        for request_id, computed, scheduled in progress:
            num_tokens += scheduled
            request = self._requests.get(request_id)
            if request is None:
                continue
            if request.phase is _Phase.WAITING:
                self._enter(request, _Phase.PREFILL)
            if request.phase is _Phase.PREFILL and computed >= len(request.token_ids):
                self._enter(request, _Phase.DECODE)
                self._keep_record(request)
            if computed < len(request.token_ids):
                due = self._due(request, computed + scheduled)
                if due:
                    blocks = tuple(blocks_of(request_id))
                    saves += [self._save_job(request_id, request, at, blocks) for at in due]
                if self._may_save(request, computed):
                    end = min(computed + scheduled, len(request.token_ids))
                    computing.append(Computing(request_id, computed, end))
        self._wait_left_s = self._config.lookup_wait_s
        loads, self._loads = self._loads, []
        observes, self._observes = self._observes, []
        return StepJobs(
            tuple(loads),
            tuple(saves),
            tuple(observes),
            let_go=bool(self._kept) and not self._can_spare(0),
            computing=tuple(computing),
            num_tokens=num_tokens,
        )

    def on_finished(self, request_id: str, blocks: Sequence[int]) -> bool:
        """The request ended, was aborted or failed.

        blocks: its block table. Returns whether they are to be kept until ``on_released``.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        if request.lookup is not None:
            request.lookup.cancel()
        # Of a load that is under way the worker has yet to say that it has ended, and vLLM takes
        # back a request's blocks once.
        is_loading = request.phase is _Phase.LOADING
        # An answer of one token ends in its prefill step.
        self._enter(request, _Phase.DECODE)
        self._keep_record(request)
        return not is_loading and self._observe(request_id, request, blocks)

    def on_released(self, request_ids: Iterable[str]) -> None:
        """The blocks of requests that have ended are not needed any more."""
        for request_id in request_ids:
            self._kept.pop(request_id, None)

    def close(self) -> None:
        """Stop asking the store."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _lookup(self, segments: Sequence[NamedSegment], plan: ReusePlan) -> _Found:
        # Ends before the request stops waiting, so that one silent shard loses no other's answer.
        timeout_s = _LOOKUP_SHARE * self._config.lookup_deadline_s
        if not (plan.blends and self._can_blend):
            wants = [Want.of(named.variant) for named in segments]
            answer = self._client.lookup(wants, timeout_s=timeout_s, exact=True, domain=plan.domain)
            return _Found(answer)
        ends = time.monotonic() + timeout_s
        wants = [
            Want(named.variant.chunk)
            if named.segment.action is Action.BLEND
            else Want.of(named.variant)
            for named in segments
        ]
        answer = self._client.lookup(wants, timeout_s=timeout_s, domain=plan.domain)
        left_s = ends - time.monotonic()
        held = candidates(self._client, segments, answer, plan.domain, left_s)
        chain = len(_chain(segments, answer.held()))
        found = blend(segments, chain, held, plan.budget)
        return _Found(answer, found if found.approximate else None)

    def _finish_lookup(self, request: _Request) -> bool:
        """Take over the store's answer; False while there is none and it is not late."""
        assert request.lookup is not None
        asked = time.monotonic()
        try:
            found = request.lookup.result(timeout=max(0.0, self._wait_left_s))
        except FutureTimeoutError:
            self._wait_left_s -= time.monotonic() - asked
            if time.monotonic() - request.arrived < self._config.lookup_deadline_s:
                return False
            request.lookup.cancel()
            request.stored, request.record.miss = {}, "lookup late"
        except Exception as error:
            # An outage is the ordinary case; whatever it was, vLLM would end on an exception.
            log.warning("the store could not be asked: %s", error)
            request.stored, request.record.miss = {}, "store unavailable"
        else:
            answer = found.answer
            request.stored = answer.held()
            request.blend = found.blend if self._can_blend else None
            # The chunks were chosen before this answer: a delete in between counts, too.
            planned = request.plan.planned_at_ms
            request.as_of = {
                shard: replace(as_of, planned_at_ms=planned)
                for shard, as_of in answer.as_of.items()
            }
            request.misses = {
                named.variant: variants.miss
                for named, variants in zip(request.segments, answer.variants, strict=True)
                if variants.miss is not None
            }
        missing = request.segments[len(_chain(request.segments, request.stored)) :]
        if missing and not request.record.miss:
            # Of the first one that is missing: what comes after it could not be used anyway.
            miss = request.misses.get(missing[0].variant, Miss.NEVER_STORED)
            request.record.miss = reason(miss)
        return True

    def _covered(self, request: _Request, num_local: int) -> int:
        """Where what is held of a prompt ends, in one way or another."""
        found = request.blend
        if found is not None:
            first = max(num_local, found.exact_end)
            holes = sum(map(len, found.holes(first, found.end)))
            share = 1 - holes / max(1, found.end - first)
            is_enough = found.end > first and share >= self._config.min_blend_share
            if is_enough and self._is_faster(request, found, first, holes):
                return found.end
        chain = _chain(request.segments, request.stored or {})
        return chain[-1].segment.end if chain else 0

    def _is_faster(self, request: _Request, found: Blend, first: int, holes: int) -> bool:
        """Whether to blend from position first on, rather than to compute from there."""
        if request.pays is None:
            length = len(request.token_ids)
            end = min(found.end, length - 1)
            request.pays = self._config.blend_always or self._pays.decide(
                behind=length - first,
                loads=end - first - holes,
                repairs=found.wanted + holes,
                rest=length - end,
            )
            if not request.pays:
                request.record.miss = "computing is faster"
        return request.pays

    def _can_spare(self, count: int) -> bool:
        """Whether vLLM would have blocks enough without so many of them."""
        assert self._blocks is not None
        spare = self._blocks.num_gpu_blocks // _SPARE_SHARE
        return self._blocks.get_num_free_blocks() - count >= spare

    def _repair(
        self, request_id: str, request: _Request, found: Blend, first: int, end: int
    ) -> Repair | None:
        """What to do with the load of a blend; None where this part of it is exact."""
        exact_end = max(first, found.exact_end)
        if exact_end >= end:
            return None
        request.record.miss = ""
        # What the engine still had of an earlier load of it is no less tainted.
        request.tainted_before = before = request.tainted_from
        request.tainted_from = exact_end if before is None else min(exact_end, before)
        return Repair(
            exact_end=exact_end,
            token_ids=request.token_ids,
            chunks=found.influenced(end),
            holes=found.holes(first, end),
            budget=found.wanted,
            scratch=self._take_scratch(request_id, len(request.token_ids) - end)
            if found.wanted
            else (),
        )

    def _take_scratch(self, request_id: str, question_tokens: int) -> tuple[int, ...]:
        """Blocks for the KV of a question, if there are any to spare."""
        tokens = min(question_tokens, self._config.question_tokens)
        count = -(-tokens // self._block_size)
        if self._blocks is None or not self._can_spare(count):
            return ()
        self._scratch[request_id] = taken = self._blocks.get_new_blocks(count)
        return tuple(block.block_id for block in taken)

    def _observe(self, request_id: str, request: _Request, blocks: Sequence[int]) -> bool:
        """Have the chunks that were saved of a request observed; whether that keeps its blocks."""
        saves = {
            place: save
            for place, save in request.saved.items()
            if request.segments[place].segment.action is Action.BLEND
            # A later load may have put something else into its blocks.
            and save.info.provenance.exact
            and not _is_tainted(request, request.segments[place])
        }
        if not (saves and self._blocks is not None and self._can_blend):
            return False
        last = request.segments[max(saves)].segment.end
        count = -(-last // self._block_size)
        if len(blocks) < count:  # it was preempted
            return False
        blocks = blocks[:count]
        room = self._blocks.num_gpu_blocks // _KEPT_SHARE
        if sum(self._kept.values()) + count > room or not self._can_spare(count):
            return False
        self._kept[request_id] = len(blocks)
        chunks = [n for n in request.segments if n.segment.action is Action.BLEND]
        before = len(request.segments) - len(chunks)  # the template, one segment or none
        self._observes.append(
            ObserveJob(
                request_id,
                request.token_ids[:last],
                tuple(blocks),
                (range(chunks[0].segment.start), *(_range(n) for n in chunks)),
                (b"", *(n.segment.chunk for n in chunks)),
                {place - before + 1: save for place, save in saves.items()},
            )
        )
        return True

    @staticmethod
    def _due(request: _Request, computed: int) -> list[int]:
        """Places of the variants that are whole after this step and that the store wants."""
        due = []
        for place, named in enumerate(request.segments):
            if named.segment.end > computed:
                break
            if _is_wanted(request, place):
                due.append(place)
        return due

    @staticmethod
    def _may_save(request: _Request, computed: int) -> bool:
        """Whether what is computed from here on may be of a variant that is saved."""
        return any(
            named.segment.end > computed and (place in request.saved or _is_wanted(request, place))
            for place, named in enumerate(request.segments)
        )

    def _save_job(
        self, request_id: str, request: _Request, place: int, blocks: tuple[int, ...]
    ) -> SaveJob:
        before, named = request.segments[:place], request.segments[place]
        start, end = named.segment.start, named.segment.end
        info = VariantInfo(
            num_tokens=end - start,
            num_bytes=value_bytes(self._space, end - start),
            base_position=start,
            # Unless something before it is blended, all of that was computed, loaded as exact, or
            # shared by vLLM's own prefix cache, in which blends share with nobody.
            provenance=Provenance(exact=not _is_tainted(request, named)),
        )
        origin = Origin(
            prefix_chunks=tuple(one.segment.chunk for one in before),
            parent=before[-1].variant if before else None,
            domain=request.plan.domain,
            document=named.segment.document,
        )
        span = Span(named.variant, start, end)
        job = SaveJob(request_id, span, info, origin, request.as_of, blocks)
        request.saved[place] = job
        return job

    def _forget_from(self, request: _Request, missing: VariantKey) -> None:
        """Treat missing and what follows as not stored, so that it is saved anew."""
        stored = request.stored or {}
        names = [named.variant for named in request.segments]
        # One of another prefix is none of these: behind it there was nothing exact to be lost.
        for key in names[names.index(missing) :] if missing in names else [missing]:
            stored.pop(key, None)

    def _keep_record(self, request: _Request) -> None:
        if not request.recorded:
            request.recorded = True
            self._book.put(request.plan.request, request.record)

    @staticmethod
    def _enter(request: _Request, phase: _Phase) -> None:
        now = time.monotonic()
        spent, record = now - request.phase_since, request.record
        if not request.recorded:
            match request.phase:
                case _Phase.WAITING:
                    record.queue_s += spent
                case _Phase.LOADING:
                    record.load_s += spent
                case _Phase.PREFILL:
                    record.prefill_s += spent
                case _Phase.DECODE:
                    pass
        request.phase, request.phase_since = phase, now


def _chain(
    segments: Sequence[NamedSegment], held: Mapping[VariantKey, Held]
) -> tuple[NamedSegment, ...]:
    return longest_exact_chain(segments, {key: one.info for key, one in held.items()})


def _is_tainted(request: _Request, named: NamedSegment) -> bool:
    """Whether a segment leans on what is not exact, or is so itself."""
    return request.tainted_from is not None and named.segment.end > request.tainted_from


def _is_wanted(request: _Request, place: int) -> bool:
    """Whether the store would be better off with what this request computes."""
    if place in request.saved:
        return False
    named = request.segments[place]
    if _is_tainted(request, named):
        # Where nothing is held of a chunk, what was computed behind a blend is better than that.
        return request.blend is not None and named.segment.start in request.blend.unknown
    held = (request.stored or {}).get(named.variant)
    return held is None or not held.info.serves_exact or held.wanted_better


def _range(named: NamedSegment) -> range:
    return range(named.segment.start, named.segment.end)
