"""Combines a prompt with the engine's record of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from ragcache_core.identity.keys import ChunkKey
from ragcache_core.plan.prompt import Prompt
from ragcache_core.planner.request_plan import (
    ChunkDecision,
    PlanAlternative,
    PlanSeconds,
    RequestPlan,
)
from ragcache_core.scheduling.priority import QueuePosition
from ragcache_gateway.documents.search_schema import pages_of
from ragcache_gateway.explain.schema import (
    ExplainedAlternative,
    ExplainedGuess,
    ExplainedPart,
    ExplainedPlan,
    ExplainedPosition,
    ExplainedStage,
    ExplainedTime,
    Explanation,
    Outcome,
    PlannedTimes,
    StageTimes,
)
from ragcache_gateway.planning.cache_view import engine_address
from ragcache_gateway.prompts.passages import Passage
from ragcache_gateway.prompts.reuse_mode import Mode
from ragcache_wire.v1 import engine_pb2 as pb

REUSE_IS_OFF = "reuse is off"
"""Reason of a chunk of a request that has set ``reuse: off``."""


HEAD_COMES_ONCE = "system prompt changes with each request"
"""Reason of a chunk after a head that no other prompt is expected to have."""


class PromptPart(NamedTuple):
    """Tokens [start, end) of a prompt: a part of the template, or one chunk.

    It is a tuple because every answer makes one for each part.

    Attributes:
        chunk: Id of the chunk. None: template or question.
        decision: What the gateway's plan does with it. None: it is not in the plan.
    """

    start: int
    end: int
    chunk: str | None = None
    document_id: str | None = None
    title: str | None = None
    rank: int | None = None
    decision: ChunkDecision | None = None
    page: int | None = None
    page_end: int | None = None

    @property
    def key(self) -> ChunkKey | None:
        """Its name in the knowledge tree. None: it is not in the plan."""
        return self.decision.chunk if self.decision is not None else None


@dataclass(frozen=True, slots=True)
class AnsweredPrompt:
    """What is kept of an answer to explain it: no text, and the engine's record as it came.

    Attributes:
        engine: Address of the engine.
        tenant: Of the caller; None: it has none.
        plan: Order and engine that the gateway chose.
        record: None: the engine has dropped it.
        stages: Of the search.
        prefills: What engines computed during the search.
        comes_once: Whether its head changes with each request, so that nothing after it is stored.
    """

    id: str
    created: int
    model: str
    engine: str
    tenant: str | None
    mode: Mode
    parts: tuple[PromptPart, ...]
    plan: ExplainedPlan
    record: pb.RequestRecord | None
    stages: tuple[ExplainedStage, ...] = ()
    prefills: tuple[ExplainedGuess, ...] = ()
    comes_once: bool = False


class PartUse(NamedTuple):
    """Where the KV of one part's tokens came from. All are 0 without a record.

    It is a tuple because every answer makes one for each part.

    Attributes:
        outcome: Where most tokens came from.
        recomputed_tokens: Computed among loaded ones.
        source: What was loaded; None: nothing.
        reason: Why not all was cached or loaded. Empty: it was, or the reason is not known.
        blended: Whether the loaded variant was computed after another prefix.
    """

    outcome: Outcome
    cached_tokens: int = 0
    loaded_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    source: pb.LoadSource | None = None
    reason: str = ""
    blended: bool = False

    @property
    def tier(self) -> str:
        """Tier that the KV was loaded from; empty: none was."""
        return self.source.tier if self.source is not None else ""


_UNKNOWN_USE: Final = PartUse("unknown")


def prompt_parts(
    prompt: Prompt, passages: Iterable[Passage], plan: RequestPlan
) -> tuple[PromptPart, ...]:
    """Return the parts of a prompt in its order: template, chunks, question.

    The decisions of the plan are those of the first parts.
    """
    decisions = iter(plan.decisions)
    chunk_starts = (prompt.head, *prompt.chunk_ends)
    parts = [
        PromptPart(start, end, decision=next(decisions, None))
        for start, end in pairwise((0, *prompt.head_ends))
    ]
    for passage, (start, end) in zip(passages, pairwise(chunk_starts), strict=True):
        chunk, rank = passage.chunk, passage.rank
        decision = next(decisions, None)
        parts.append(
            PromptPart(
                start,
                end,
                chunk.id,
                chunk.document_id,
                chunk.title,
                rank,
                decision,
                **pages_of(chunk),
            )
        )
    if chunk_starts[-1] < len(prompt.token_ids):
        end = len(prompt.token_ids)
        parts.append(PromptPart(chunk_starts[-1], end, decision=next(decisions, None)))
    return tuple(parts)


def explain_plan(plan: RequestPlan, position: QueuePosition) -> ExplainedPlan:
    """Explain the order and the engine that a plan has chosen, and its place in the queue."""
    return ExplainedPlan(
        engine=engine_address(plan.source),
        prefill_engine=engine_address(plan.prefill_source or plan.source),
        order=list(plan.order),
        predicted_ms=_planned_times(plan.seconds) if plan.seconds else None,
        next_best=_explain_alternative(plan.runner_up) if plan.runner_up else None,
        position=ExplainedPosition(
            band=position.band,
            cached_share=round(position.cached_share, 4),
            delay_ms=position.delay_ms,
            window_ms=position.window_ms,
            tenant_delay_ms=position.tenant_delay_ms,
        ),
    )


def _explain_alternative(plan: PlanAlternative) -> ExplainedAlternative:
    return ExplainedAlternative(
        engine=engine_address(plan.source),
        order=list(plan.order),
        kind=plan.reuse,
        predicted_ms=_planned_times(plan.seconds),
    )


def _planned_times(seconds: PlanSeconds) -> PlannedTimes:
    return PlannedTimes(
        queue=to_ms(seconds.queue_s),
        load=to_ms(seconds.load_s),
        recompute=to_ms(seconds.recompute_s),
        prefill=to_ms(seconds.prefill_s),
        total=to_ms(seconds.total_s),
    )


def explain(answered: AnsweredPrompt) -> Explanation:
    """Explain an answer."""
    record = answered.record
    return Explanation(
        id=answered.id,
        created=answered.created,
        model=answered.model,
        engine=answered.engine,
        reuse=answered.mode,
        miss=record.miss if record else "",
        prompt_tokens=answered.parts[-1].end if answered.parts else 0,
        parts=[
            _explain_part(part, use)
            for part, use in zip(answered.parts, part_uses(answered), strict=True)
        ],
        plan=answered.plan,
        time=_explain_time(record) if record else None,
        stages=list(answered.stages),
        speculation=list(answered.prefills),
    )


def part_uses(answered: AnsweredPrompt) -> list[PartUse]:
    """Return where the tokens of each part came from, in the order of the parts.

    Every answer is counted by it, so it makes none of the objects of an explanation.
    """
    record = answered.record
    if record is None:
        return [_UNKNOWN_USE] * len(answered.parts)
    unplanned = record.miss
    if answered.mode == "off":
        unplanned = REUSE_IS_OFF
    elif answered.mode == "exact" and answered.comes_once:
        unplanned = HEAD_COMES_ONCE
    segments = {segment.start: segment for segment in record.segments}
    local_tokens = record.local_tokens
    return [
        _segment_use(segment)
        if (segment := segments.get(part.start)) is not None and segment.end == part.end
        else _unplanned_use(part, local_tokens, unplanned)
        for part in answered.parts
    ]


def _segment_use(segment: pb.SegmentRecord) -> PartUse:
    cached, loaded = segment.cached_tokens, segment.loaded_tokens
    blended = segment.blended
    computed = segment.end - segment.start - cached - loaded
    # The engine also calls a chunk recomputed that is missing between loaded ones: it is computed.
    recomputed = min(segment.recomputed_tokens, loaded)
    return PartUse(
        _outcome(cached, loaded, computed, blended=blended),
        cached,
        loaded,
        computed,
        recomputed,
        segment.source if segment.HasField("source") else None,
        segment.reason,
        blended,
    )


def _unplanned_use(part: PromptPart, local_tokens: int, unplanned: str) -> PartUse:
    """Return the use of a part that no segment covers: the question, or all if reuse is off.

    Args:
        local_tokens: Tokens of the prompt that the engine's own prefix cache had.
        unplanned: Why the engine had no plan for a chunk.
    """
    cached = max(0, min(part.end - part.start, local_tokens - part.start))
    computed = part.end - part.start - cached
    reason = unplanned if part.chunk is not None and computed else ""
    outcome = _outcome(cached, 0, computed, blended=False)
    return PartUse(outcome, cached, 0, computed, reason=reason)


def _outcome(cached: int, loaded: int, computed: int, *, blended: bool) -> Outcome:
    if computed >= cached and computed >= loaded:
        return "computed"
    if cached >= loaded:
        return "cached"
    return "blended" if blended else "loaded"


def _explain_part(part: PromptPart, use: PartUse) -> ExplainedPart:
    source, decision = use.source, part.decision
    return ExplainedPart(
        chunk=part.chunk,
        document_id=part.document_id,
        title=part.title,
        page=part.page,
        page_end=part.page_end,
        rank=part.rank,
        start=part.start,
        tokens=part.end - part.start,
        outcome=use.outcome,
        cached_tokens=use.cached_tokens,
        loaded_tokens=use.loaded_tokens,
        computed_tokens=use.computed_tokens,
        recomputed_tokens=use.recomputed_tokens,
        tier=source.tier if source else None,
        loaded_bytes=source.num_bytes if source else 0,
        shift_tokens=part.start - source.base_position if source else None,
        mismatch=source.fix_overhead if source and use.blended else None,
        reason=use.reason,
        planned=decision.action.value if decision else None,
        planned_reason=decision.reason.value if decision else "",
        planned_tier=(decision.tier or None) if decision else None,
        planned_source=(decision.source or None) if decision else None,
    )


def _explain_time(record: pb.RequestRecord) -> ExplainedTime:
    predicted = None
    if record.HasField("predicted"):
        times = record.predicted
        predicted = _stage_times(times.load_s, times.select_s, times.passes_s)
    return ExplainedTime(
        predicted_ms=predicted,
        measured_ms=_stage_times(
            record.load_s - record.recompute_s,
            record.select_s,
            record.recompute_s - record.select_s + record.prefill_s,
        ),
        queue_ms=to_ms(record.queue_s),
    )


def _stage_times(load_s: float, select_s: float, passes_s: float) -> StageTimes:
    return StageTimes(
        load=to_ms(load_s),
        select=to_ms(select_s),
        passes=to_ms(passes_s),
        total=to_ms(load_s + select_s + passes_s),
    )


def to_ms(seconds: float) -> float:
    """Convert to milliseconds, rounded to the microsecond."""
    return round(1e3 * seconds, 3)


MAX_ANSWERS = 1024
MAX_PARTS = 65_536
"""Parts of all kept prompts together, about 300 bytes each."""


class RecentAnswers:
    """The latest answers by their ids, within bounds of their number and of their parts."""

    def __init__(self, max_answers: int = MAX_ANSWERS, max_parts: int = MAX_PARTS) -> None:
        self._answers: OrderedDict[str, AnsweredPrompt] = OrderedDict()
        self._max_answers, self._max_parts = max_answers, max_parts
        self._num_parts = 0

    def add(self, answered: AnsweredPrompt) -> None:
        """Keep an answer, and drop the oldest ones beyond the bounds."""
        self._drop(answered.id)
        self._answers[answered.id] = answered
        self._num_parts += len(answered.parts)
        while len(self._answers) > 1 and (
            len(self._answers) > self._max_answers or self._num_parts > self._max_parts
        ):
            self._drop(next(iter(self._answers)))

    def find(
        self, answer_id: str, tenant: str | None = None, *, of_any_tenant: bool = False
    ) -> AnsweredPrompt | None:
        """Return a kept answer. None: it is not kept, or is another tenant's.

        Args:
            tenant: Whose answer it has to be; None: that of a caller without a tenant.
            of_any_tenant: Whether it may be of any tenant.
        """
        answered = self._answers.get(answer_id)
        if answered is None or (answered.tenant != tenant and not of_any_tenant):
            return None
        return answered

    def parts_of(
        self, keys: Collection[ChunkKey], tenant: str | None = None, *, of_any_tenant: bool = False
    ) -> dict[ChunkKey, PromptPart]:
        """Return a part of a kept prompt for each key in the knowledge tree that one has.

        Args:
            tenant: Whose prompts count, as in ``find``.
            of_any_tenant: Whether prompts of any tenant count.
        """
        wanted = set(keys)
        found: dict[ChunkKey, PromptPart] = {}
        for answered in reversed(self._answers.values()):
            if not wanted:
                break
            if answered.tenant != tenant and not of_any_tenant:
                continue
            for part in answered.parts:
                if (key := part.key) is not None and key in wanted:
                    wanted.discard(key)
                    found[key] = part
        return found

    def __contains__(self, answer_id: str) -> bool:
        return answer_id in self._answers

    def __len__(self) -> int:
        return len(self._answers)

    def _drop(self, answer_id: str) -> None:
        dropped = self._answers.pop(answer_id, None)
        if dropped is not None:
            self._num_parts -= len(dropped.parts)
