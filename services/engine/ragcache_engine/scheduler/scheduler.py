"""Decides what to load and what to save, in the engine's scheduler process."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from itertools import takewhile

from ragcache_core.blend.selection import Blend
from ragcache_core.cluster.handoff import HandoffWait
from ragcache_core.cost.load_or_compute import ReuseCosts
from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.identity.keys import KVSpace
from ragcache_core.identity.variant import Miss, Origin, Provenance, VariantInfo
from ragcache_core.plan.prefix_pieces import PIECE_TOKENS, handoff_segments, plain_domain
from ragcache_core.plan.reuse_plan import Action, ReusePlan
from ragcache_core.plan.segments import NamedSegment, checked_segments
from ragcache_core.plan.signature import SEAL_FIELD, is_sealed
from ragcache_engine.config import EngineConfig
from ragcache_engine.protocol.messages import (
    NO_BLEND,
    Computing,
    LoadJob,
    LoadOutcome,
    ObserveJob,
    Repair,
    SaveJob,
    Span,
    StepJobs,
    StepReport,
)
from ragcache_engine.protocol.roles import Role
from ragcache_engine.scheduler.block_reservation import BlockPool, SpareBlocks
from ragcache_engine.scheduler.load_planner import Reach
from ragcache_engine.scheduler.lookup import Lookups
from ragcache_engine.scheduler.refused_plans import Refusal, RefusedPlans
from ragcache_engine.scheduler.request import Phase, Request
from ragcache_engine.scheduler.tier_map import Places
from ragcache_engine.telemetry.request_records import RecordBook, reason
from ragcache_kv.store_client.sharded import ShardedStore
from ragcache_kv.values.layout import value_bytes
from ragcache_wire.tracing import Tracer

log = logging.getLogger("vllm.ragcache")


class SchedulerSide:
    """One per engine. Called on the scheduler's thread only; never blocks it for long.

    tracer: of lookups that are part of a trace.
    """

    def __init__(
        self,
        config: EngineConfig,
        space: KVSpace,
        book: RecordBook,
        client: ShardedStore,
        costs: ReuseCosts,
        tracer: Tracer | None = None,
    ) -> None:
        self._config = config
        self._space = space
        self._book = book
        self._lookups = Lookups(client, space, config.lookup_deadline_s, tracer)
        self._places = Places(space)
        self._reach = Reach(config, costs, self._places)
        self._requests: dict[str, Request] = {}
        self._arrived: dict[str, Request] = {}  # of these, those that no step has seen yet
        self._loads: list[LoadJob] = []
        self._observes: list[ObserveJob] = []
        self._spare: SpareBlocks | None = None
        self._costs = costs
        self._wait_left_s = config.lookup_wait_s
        self._without_blocks: str | None = None  # who was told what can be loaded, and has none yet
        self._refused = RefusedPlans()
        if config.plan_keys is None:
            log.warning(
                "plans are acted on whoever sends them, with whatever access domain they name:"
                " RAGCACHE_SIGNING_KEY_FILE is not set"
            )

    def bind(self, blocks: BlockPool, block_size: int) -> None:
        """Blend from now on. blocks: vLLM's, of so many tokens each."""
        self._spare = SpareBlocks(blocks, block_size)
        self._lookups.can_blend = True

    def on_profile(self, profile: PrefillProfile) -> None:
        """The worker has measured what computing takes."""
        self._costs.start_from(profile)

    # The life of a request, in the order of vLLM's calls.

    def on_new_request(
        self,
        request_id: str,
        token_ids: Sequence[int],
        params: object,
        *,
        cache_salt: str | None = None,
        cacheable: bool = True,
        traceparent: str = "",
    ) -> None:
        """Take up a request, and begin asking the store.

        params: the request's kv_transfer_params as the client sent them. cache_salt, cacheable:
        with whom vLLM's own prefix cache would share its blocks, and whether it would at all.
        traceparent: the span that it is part of, as W3C Trace Context writes it; empty where it is
        not traced.
        """
        if not isinstance(params, dict) or (plan_json := params.get("ragcache")) is None:
            if self._config.plain_prefixes and cacheable and len(token_ids) >= PIECE_TOKENS:
                self._take_up_plain(request_id, token_ids, cache_salt, traceparent)
            return
        try:
            if refusal := self._unauthenticated(plan_json, token_ids, params.get(SEAL_FIELD)):
                self._refused.add(request_id, refusal)
                return
            plan = ReusePlan.from_json(plan_json)
            segments = checked_segments(plan, token_ids, self._space)
        except Exception as error:
            # Whatever a client can put into a plan, vLLM would end on an exception.
            self._refused.add(request_id, Refusal.INVALID, error)
            return
        try:
            request = self._planned(token_ids, plan, segments, traceparent)
            self._requests[request_id] = self._arrived[request_id] = request
        except Exception:
            log.exception("prompt of request %s is only computed", request_id)

    def loadable_tokens(self, request_id: str, num_local: int) -> int | None:
        """Tokens that can be loaded beyond the num_local that the engine holds itself.

        None: not known yet, ask again in the next step. Called any number of times.
        """
        request = self._requests.get(request_id)
        tokens: int | None = 0
        if request is not None:
            try:
                tokens = self._loadable(request, num_local)
            except Exception:
                log.exception("the prompt of request %s is only computed", request_id)
                request.load_failed, request.pending_load = True, None
        # vLLM allocates next, unless it has to ask again; where that fails, the queue stands.
        self._without_blocks = request_id if tokens is not None else None
        return tokens

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
        self._without_blocks = None
        request = self._requests.get(request_id)
        if request is None:
            return
        if num_external == 0 or request.pending_load is None:
            request.pending_load = None
            if request.phase is not Phase.DECODE:
                request.enter(Phase.PREFILL)
            return
        first, end = request.pending_load
        request.pending_load, request.holes = None, ()
        try:
            job = self._load_job(request_id, request, first, end, tuple(blocks))
        except Exception:
            # vLLM waits for what it was promised; of nothing that is to come, all is computed.
            log.exception("the load of request %s cannot be begun", request_id)
            domain = request.plan.domain
            job = LoadJob(request_id, (), first, end, tuple(blocks), domain)
        self._loads.append(job)
        request.loading = tuple(span.variant for span in job.spans)
        if not request.recorded:
            request.record.begin_load(first)
        request.enter(Phase.LOADING)

    def on_report(self, report: StepReport) -> None:
        """A step ended in the worker."""
        self._places.note(report.kept)
        self.on_passes(report.passes)
        self.on_outcomes(report.outcomes)

    def on_passes(self, passes: Iterable[tuple[float, float]]) -> None:
        """Passes that computed prompts ended in the worker: work and seconds of each."""
        for work, seconds in passes:
            self._costs.computed(work, seconds)

    def on_outcomes(self, outcomes: Iterable[LoadOutcome]) -> None:
        """Loads ended in the worker."""
        for outcome in outcomes:
            try:
                self._on_outcome(outcome)
            except Exception:
                log.exception("what became of the load of %s is lost", outcome.request_id)

    def step(
        self,
        progress: Iterable[tuple[str, int, int]],
        blocks_of: Callable[[str], Sequence[int]],
        ended: Iterable[str] = (),
    ) -> StepJobs:
        """Jobs of the step about to run.

        progress: (request id, tokens computed before, tokens of this step) of every request that
        runs in it. blocks_of: block table of such a request. ended: requests that have since the
        step before.
        """
        saves: list[SaveJob] = []
        computing: list[Computing] = []
        num_tokens = prompt_tokens = looked_at = 0
        for request_id, computed, scheduled in progress:
            num_tokens += scheduled
            looked_at += computed * scheduled
            request = self._requests.get(request_id)
            if request is None:
                prompt_tokens += scheduled if scheduled > 1 else 0
                continue
            prompt_tokens += max(0, min(scheduled, len(request.token_ids) - computed))
            try:
                self._on_progress(request, computed)
                if computed >= len(request.token_ids):
                    continue
                saves += self._due(request_id, request, computed + scheduled, blocks_of)
                if request.is_measured(computed):
                    end = min(computed + scheduled, len(request.token_ids))
                    computing.append(Computing(request_id, computed, end))
            except Exception:
                log.exception("what request %s computes is not saved", request_id)
        self._prefetch()
        self._wait_left_s = self._config.lookup_wait_s
        queue_stands, self._without_blocks = self._without_blocks is not None, None
        loads, self._loads = self._loads, []
        observes, self._observes = self._observes, []
        return StepJobs(
            tuple(loads),
            tuple(saves),
            tuple(observes),
            let_go=self._spare is not None and self._spare.are_missed(queue_stands=queue_stands),
            ended=tuple(ended),
            computing=tuple(computing),
            num_tokens=num_tokens,
            prompt_tokens=prompt_tokens,
            work=self._costs.work(looked_at / num_tokens, num_tokens) if num_tokens else 0.0,
        )

    def on_finished(self, request_id: str, blocks: Sequence[int]) -> bool:
        """The request ended, was aborted or failed.

        blocks: its block table. Returns whether they are to be kept until ``on_released``.
        """
        self._arrived.pop(request_id, None)
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        if request.lookup is not None:
            request.lookup.cancel()
        # Of a load that is under way the worker has yet to say that it has ended, and vLLM takes
        # back a request's blocks once.
        is_loading = request.phase is Phase.LOADING
        # An answer of one token ends in its prefill step.
        request.enter(Phase.DECODE)
        self._keep_record(request)
        try:
            return not is_loading and self._observe(request_id, request, blocks)
        except Exception:
            log.exception("chunks of request %s are not observed", request_id)
            return False

    def on_released(self, request_ids: Iterable[str]) -> None:
        """The blocks of requests that have ended are not needed any more."""
        for request_id in request_ids:
            if self._spare is not None:
                self._spare.let_go(request_id)

    def take_refused(self) -> Counter[str]:
        """Plans that were not acted on since the last call, by reason, for metrics."""
        return self._refused.take()

    def close(self) -> None:
        """Stop asking the store."""
        self._lookups.close()

    def _planned(
        self,
        token_ids: Sequence[int],
        plan: ReusePlan,
        segments: tuple[NamedSegment, ...],
        traceparent: str,
    ) -> Request:
        """A request with a plan, of which these segments hold for its prompt."""
        now = time.monotonic()
        # What does not hold for its prompt, or is to be computed, is handed over to nobody.
        is_whole = len(segments) == len(plan.segments)
        if plan.handoff and is_whole and self._config.role is not Role.BOTH:
            request = self._take_up_handoff(token_ids, segments, plan, now, traceparent)
        else:
            lookup = None
            if segments:
                lookup = self._lookups.planned(plan, segments, traceparent)
            may_save = 0 if plan.trial else None
            request = Request(plan, token_ids, segments, lookup, now, may_save)
        request.traceparent = traceparent
        request.record.prompt_tokens = len(token_ids)
        if len(segments) < len(plan.segments):
            first_left_out = plan.segments[len(segments)]
            if first_left_out.action is Action.COMPUTE:
                request.record.miss = "planned to be computed"
            else:
                request.record.miss = "plan does not match the prompt"
                log.warning("plan of request %s does not match its tokens", plan.request)
        return request

    def _take_up_plain(
        self, request_id: str, token_ids: Sequence[int], cache_salt: str | None, traceparent: str
    ) -> None:
        """A request without a plan: whole pieces of its prompt are its segments.

        There is nobody to read a record of it. Its pieces are named on the lookup's thread.
        """
        try:
            plan = ReusePlan("", plain_domain(cache_salt), ())
            lookup = self._lookups.plain(plan, token_ids, traceparent)
        except Exception:
            log.exception("prompt of request %s is only computed", request_id)
            return
        request = Request(plan, token_ids, (), lookup, time.monotonic(), recorded=True)
        request.traceparent = traceparent
        self._requests[request_id] = self._arrived[request_id] = request

    def _unauthenticated(
        self, plan: object, token_ids: Sequence[int], seal: object
    ) -> Refusal | None:
        """Why a plan is not known to be a gateway's; None where it is, or nobody asks for that."""
        if self._config.plan_keys is None:
            return None
        if seal is None:
            return Refusal.UNSEALED
        keys = self._config.plan_keys.current()
        return None if is_sealed(plan, token_ids, seal, keys) else Refusal.FORGED

    def _take_up_handoff(
        self,
        token_ids: Sequence[int],
        segments: tuple[NamedSegment, ...],
        plan: ReusePlan,
        now: float,
        traceparent: str,
    ) -> Request:
        """A request that one engine computes and another goes on with; this is one of the two."""
        handed = handoff_segments(self._space, plan.domain, token_ids, segments)
        lookup = self._lookups.planned(plan, handed, traceparent)
        request = Request(plan, token_ids, handed, lookup, now)
        if self._config.role is Role.DECODE:
            request.awaits = HandoffWait(now, now + self._config.handoff_wait_s)
            # What it has to compute of chunks is worth as much as anybody's. For the rest, which is
            # this request's own, only this engine would have been waiting.
            request.may_save = len(segments)
        return request

    def _finish_lookup(self, request: Request) -> bool:
        """Take over the store's answer; False while there is none and it is not late."""
        assert request.lookup is not None
        asked = time.monotonic()
        if request.ask_at is not None:
            if asked >= request.ask_at:
                request.lookup = self._lookups.planned(
                    request.plan, request.segments, request.traceparent
                )
                request.asked, request.ask_at = asked, None
            return False
        # Another engine takes its time, in which this one's other requests must not stand still.
        wait_s = 0.0 if request.awaits is not None else max(0.0, self._wait_left_s)
        try:
            found = request.lookup.result(timeout=wait_s)
        except FutureTimeoutError:
            if time.monotonic() - request.asked < self._config.lookup_deadline_s:
                return False
            request.lookup.cancel()
            if self._asks_again(request, answered=False):
                return False
            request.stored, request.record.miss = {}, "lookup late"
        except Exception as error:
            # An outage is the ordinary case; whatever it was, vLLM would end on an exception.
            log.warning("the store could not be asked: %s", error)
            if self._asks_again(request, answered=False):
                return False
            request.stored, request.record.miss = {}, "store unavailable"
        else:
            answer = found.answer
            request.segments = found.segments
            if found.may_grow and self._asks_again(request, answered=True):
                return False
            request.stored = answer.held()
            request.blend = found.blend if self._lookups.can_blend else None
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
        finally:
            # All that a step waits for is within one bound, answers that come in time included.
            self._wait_left_s -= time.monotonic() - asked
        missing = request.segments[len(request.chain) :]
        if missing and not request.record.miss:
            # Of the first one that is missing: what comes after it could not be used anyway.
            miss = request.misses.get(missing[0].variant, Miss.NEVER_STORED)
            request.record.miss = reason(miss)
        return True

    def _loadable(self, request: Request, num_local: int) -> int | None:
        if request.phase is Phase.PREFILL:  # it was preempted
            request.enter(Phase.WAITING)
        if not request.recorded:
            request.record.count_local(num_local)
        if request.load_failed or request.lookup is None:
            return 0
        if len(request.token_ids) - 1 - num_local < self._config.min_load_tokens:
            request.awaits = None  # whatever comes, so few tokens are computed
        if request.stored is None and not self._finish_lookup(request):
            return None
        covered = self._reach.of(request, num_local)
        # The last token is always computed: its output is the first token of the answer.
        end = min(covered, len(request.token_ids) - 1)
        if end - num_local < self._config.min_load_tokens:
            request.pending_load = None
            return 0
        request.pending_load = (num_local, end)
        return end - num_local

    def _load_job(
        self, request_id: str, request: Request, first: int, end: int, blocks: tuple[int, ...]
    ) -> LoadJob:
        request.tainted_before = request.tainted_from
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
            request.holes = request.blend.holes(first, end, unknown=True)
        domain, traceparent = request.plan.domain, request.traceparent
        compute_s = self._costs.compute_s(end, len(request.token_ids) - end)
        return LoadJob(
            *(request_id, spans, first, end, blocks, domain, repair, traceparent),
            compute_s=compute_s,
            deadline_s=self._reach.deadline_s(request, first, end),
        )

    def _on_outcome(self, outcome: LoadOutcome) -> None:
        if self._spare is not None:
            self._spare.give_back(outcome.request_id)
        if outcome.reason == NO_BLEND:
            self._lookups.can_blend = False
            for other in self._requests.values():
                other.blend = other.covered = None
        request = self._requests.get(outcome.request_id)
        if request is None:
            return
        if not request.plan.trial:
            self._learn(request, outcome)
        request.enter(Phase.WAITING)
        if not request.recorded:
            request.record.loaded_tokens = outcome.tokens
            request.record.loaded_bytes = outcome.num_bytes if outcome.tokens else 0
            request.record.blended_tokens = outcome.blended
            request.record.repaired_tokens = outcome.repaired
            request.record.repair_s = outcome.repair_s
            holes = () if outcome.reason else (*request.holes, *outcome.lost)
            request.record.holes = request.places(holes)
            if outcome.reason:
                request.record.miss, request.record.slower = outcome.reason, False
        if outcome.reason:
            # vLLM asks again after a failure; the same answer would loop for ever.
            request.load_failed = True
            # What is not exact of this load has been given up, and is computed.
            request.tainted_from = request.tainted_before
            if outcome.missing is not None:
                request.forget_from(outcome.missing)

    def _learn(self, request: Request, outcome: LoadOutcome) -> None:
        """What a load took says what others are going to take."""
        stored = request.stored or {}
        if outcome.late:
            places = self._places.waited_for(request.loading, stored)
            self._costs.late(places, outcome.seconds)
        elif not outcome.reason:
            taken = self._places.bytes_taken(outcome.bytes_from, request.loading, stored)
            self._costs.loaded(taken, outcome.seconds)
        if not outcome.reason:
            self._costs.repaired(outcome.repaired, outcome.repair_s)

    @staticmethod
    def _asks_again(request: Request, *, answered: bool) -> bool:
        """Whether to wait for another engine, as the store has not all of it yet."""
        if request.awaits is None:
            return False
        now = time.monotonic()
        wait = request.awaits
        request.ask_at = wait.not_there(now) if answered else wait.no_answer(now)
        if request.ask_at is None and answered:
            request.record.miss = "handoff late"
        return request.ask_at is not None

    def _repair(
        self, request_id: str, request: Request, found: Blend, first: int, end: int
    ) -> Repair | None:
        """What to do with the load of a blend; None where this part of it is exact."""
        exact_end = max(first, found.exact_end)
        if exact_end >= end:
            return None
        if not request.recorded:
            request.record.miss = ""
        # What the engine still had of an earlier load of it is no less tainted.
        before = request.tainted_before
        request.tainted_from = exact_end if before is None else min(exact_end, before)
        return Repair(
            exact_end=exact_end,
            token_ids=request.token_ids,
            chunks=found.influenced(end),
            holes=found.holes(first, end),
            budget=found.wanted,
            scratch=self._scratch(request_id, len(request.token_ids) - end) if found.wanted else (),
        )

    def _scratch(self, request_id: str, question_tokens: int) -> tuple[int, ...]:
        """Blocks for the KV of a question, if there are any to spare."""
        tokens = min(question_tokens, self._config.question_tokens)
        return self._spare.borrow(request_id, tokens) if self._spare is not None else ()

    def _observe(self, request_id: str, request: Request, blocks: Sequence[int]) -> bool:
        """Have the chunks that were saved of a request observed; whether that keeps its blocks."""
        template = list(takewhile(lambda named: not _may_blend(named), request.segments))
        chunks = list(takewhile(_may_blend, request.segments[len(template) :]))
        places = range(len(template), len(template) + len(chunks))
        saves = {
            place: save
            for place, save in request.saved.items()
            if place in places
            # A later load may have put something else into its blocks.
            and save.info.provenance.exact
            and not request.is_tainted(request.segments[place])
        }
        if not saves or self._spare is None or not self._lookups.can_blend:
            return False
        last = request.segments[max(saves)].segment.end
        count = self._spare.of(last)
        # With fewer it was preempted.
        if len(blocks) < count or not self._spare.keep(request_id, count):
            return False
        self._observes.append(
            ObserveJob(
                request_id,
                request.token_ids[:last],
                tuple(blocks[:count]),
                (range(chunks[0].segment.start), *(_range(n) for n in chunks)),
                (b"", *(n.segment.chunk for n in chunks)),
                {place - len(template) + 1: save for place, save in saves.items()},
            )
        )
        return True

    def _prefetch(self) -> None:
        """What is on disk of those that have to queue is brought into the store's memory.

        Who is taken up at once loads it himself.
        """
        for request_id, request in list(self._arrived.items()):
            if request.phase is Phase.WAITING and request.lookup is not None:
                if not request.lookup.done():
                    continue
                self._lookups.prefetch(request.lookup)
            del self._arrived[request_id]

    def _on_progress(self, request: Request, computed: int) -> None:
        """So many tokens of it are there, and it goes on."""
        if request.phase is Phase.WAITING:
            request.enter(Phase.PREFILL)
        if request.phase is Phase.PREFILL and computed >= len(request.token_ids):
            request.enter(Phase.DECODE)
            self._keep_record(request)

    def _due(
        self,
        request_id: str,
        request: Request,
        computed: int,
        blocks_of: Callable[[str], Sequence[int]],
    ) -> list[SaveJob]:
        """Saves of what is whole with so many tokens."""
        if not (places := request.due(computed)):
            return []
        blocks = tuple(blocks_of(request_id))
        return [self._save_job(request_id, request, place, blocks) for place in places]

    def _save_job(
        self, request_id: str, request: Request, place: int, blocks: tuple[int, ...]
    ) -> SaveJob:
        before, named = request.segments[:place], request.segments[place]
        start, end = named.segment.start, named.segment.end
        info = VariantInfo(
            num_tokens=end - start,
            num_bytes=value_bytes(self._space, end - start),
            base_position=start,
            # Unless something before it is blended, all of that was computed, loaded as exact, or
            # shared by vLLM's own prefix cache, in which blends share with nobody.
            provenance=Provenance(exact=not request.is_tainted(named)),
        )
        origin = Origin(
            prefix_chunks=tuple(one.segment.chunk for one in before),
            parent=before[-1].variant if before else None,
            domain=request.plan.domain,
            document=named.segment.document,
        )
        span = Span(named.variant, start, end)
        job = SaveJob(request_id, span, info, origin, request.as_of, blocks, request.traceparent)
        request.saved[place] = job
        return job

    def _keep_record(self, request: Request) -> None:
        if not request.recorded:
            request.recorded = True
            self._book.put(request.plan.request, request.record)


def _may_blend(named: NamedSegment) -> bool:
    return named.segment.action is Action.BLEND


def _range(named: NamedSegment) -> range:
    return range(named.segment.start, named.segment.end)
