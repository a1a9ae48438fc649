"""The explanation of an answer in the REST API."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from ragcache_gateway.documents.search_schema import PAGE_END_HELP, PAGE_HELP
from ragcache_gateway.shown_address import ShownText

Outcome = Literal["cached", "loaded", "blended", "computed", "unknown"]
PlannedAction = Literal["cached", "load", "blend", "compute"]
GuessOutcome = Literal["confirmed", "wrong", "failed", "abandoned", "warm-up"]


class ExplainedPart(BaseModel):
    """What became of one part of a prompt: the template or a chunk.

    Cached, loaded and computed tokens add up to ``tokens``.
    """

    chunk: str | None = Field(
        description="Id of the chunk. Null: the template before the chunks, or the question after."
    )
    document_id: str | None = None
    title: str | None = None
    page: int | None = Field(default=None, description=PAGE_HELP)
    page_end: int | None = Field(default=None, description=PAGE_END_HELP)
    rank: int | None = Field(
        default=None, description="Rank of the hit that brought the chunk, from 0."
    )
    start: int = Field(description="Position of the first token in the prompt.")
    tokens: int
    outcome: Outcome = Field(
        description="Where most tokens came from. cached: the engine's own prefix cache. loaded: "
        "exact KV. blended: KV that was computed after other chunks. computed: the engine computed "
        "them. unknown: the engine has no record."
    )
    cached_tokens: int = 0
    loaded_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = Field(
        default=0, description="Computed among loaded ones, to correct a blend."
    )
    tier: str | None = Field(default=None, description="Tier that the KV was loaded from.")
    loaded_bytes: int = 0
    shift_tokens: int | None = Field(
        default=None, description="By how many positions loaded KV was moved."
    )
    mismatch: float | None = Field(
        default=None,
        description="CCI * (1 - beta') of a blend: how much the KV depends on other chunks than "
        "those before it now (Cache-Craft section 3.3).",
    )
    reason: str = Field(default="", description="Why not all tokens were cached or loaded.")
    planned: PlannedAction | None = Field(
        default=None,
        description="What the gateway had predicted for the part. cached: the engine has it. load: "
        "exact KV. blend: KV that was computed after other chunks. Null: it was not planned.",
    )
    planned_reason: str = Field(default="", description="Why the gateway had predicted that.")
    planned_tier: str | None = Field(
        default=None, description="Tier that it was to come from. Null: it was to be computed."
    )
    planned_source: ShownText | None = Field(
        default=None,
        description="What had it: engine:ADDRESS, or store:ADDRESS for a shard of the cache store. "
        "Null: it was to be computed.",
    )


class StageTimes(BaseModel):
    """Milliseconds of the engine's work before the first token, by stage."""

    load: float
    select: float = Field(description="Selection of the tokens to recompute.")
    passes: float = Field(description="Forward passes.")
    total: float


class ExplainedTime(BaseModel):
    """Predicted and measured times of the engine."""

    predicted_ms: StageTimes | None = Field(
        description="What the engine expected when it chose how much to load. Null: not known yet."
    )
    measured_ms: StageTimes
    queue_ms: float


class PlannedTimes(BaseModel):
    """Predicted milliseconds until the first token, by part."""

    queue: float = Field(description="Until the engine can begin.")
    load: float
    recompute: float = Field(description="Tokens that are recomputed in a blend.")
    prefill: float = Field(description="Tokens that are computed.")
    total: float


class ExplainedAlternative(BaseModel):
    """The next best plan."""

    engine: ShownText = Field(description="Address of its engine.")
    order: list[int] = Field(description="Rank of the document at each position.")
    kind: Literal["compute", "exact", "blend"] = Field(
        description="compute: what is not in the engine's prefix cache is computed."
    )
    predicted_ms: PlannedTimes


class ExplainedPosition(BaseModel):
    """What decides when the engine begins with a request, if several wait."""

    band: int = Field(description="Priority of the caller's key. Lower ones go first.")
    cached_share: float = Field(
        description="Share of the prompt that was predicted to be cached or loaded, from 0 to 1."
    )
    delay_ms: int = Field(
        description="By how much later the request counts as sent: window_ms * (1 - cached_share)."
    )
    window_ms: int = Field(description="spec.gateway.reordering.windowMilliseconds.")
    tenant_delay_ms: int = Field(
        default=0,
        description="By how much later it counts as sent because of its tenant's other requests. "
        "It is known when the request is sent.",
    )


class ExplainedPlan(BaseModel):
    """The order and the engine that the gateway chose, and what it predicted."""

    engine: ShownText = Field(description="Address of the engine. Empty: none was known.")
    prefill_engine: ShownText = Field(
        default="",
        description="Address of the engine that computes the prompt: the same, or one that does it "
        "for the other one.",
    )
    order: list[int] = Field(description="Rank of the document at each position.")
    predicted_ms: PlannedTimes | None = Field(
        description="Null: an engine has not said what computing costs."
    )
    next_best: ExplainedAlternative | None = Field(
        description="Null: there is no other plan, or nothing is predicted."
    )
    position: ExplainedPosition


class ExplainedStage(BaseModel):
    """A stage of the search."""

    elapsed_ms: float = Field(description="When it arrived, since the search was requested.")
    hits: int
    progress: float = Field(description="Share of the search that was done, from 0 to 1.")
    final_probability: float = Field(
        description="Estimate that its hits are the final ones, from 0 to 1."
    )
    final: bool

    def shifted(self, by_ms: float) -> ExplainedStage:
        """Return the stage of a search that was requested so much later."""
        return self.model_copy(update={"elapsed_ms": round(self.elapsed_ms + by_ms, 3)})


class ExplainedGuess(BaseModel):
    """A prefill that an engine computed while the search ran."""

    start_ms: float = Field(description="Since the question arrived.")
    end_ms: float
    outcome: GuessOutcome = Field(
        description="confirmed: its prompt was the question's. wrong: it was another one. failed: "
        "the engine failed. abandoned: the search did not last. warm-up: it computed the prompt's "
        "beginning."
    )
    tokens: int = Field(description="Length of its prompt.")
    wasted_tokens: int = Field(
        description="Tokens that it computed and the question's prompt does not begin with."
    )


class Explanation(BaseModel):
    """Why an answer took as long as it did. It has no text of the question or of documents."""

    id: str = Field(description="Id of the answer.")
    created: int
    model: str
    engine: ShownText = Field(description="Address of the engine that answered.")
    reuse: Literal["exact", "blend", "off"]
    miss: str = Field(description="Why no more was loaded. Empty: all that was planned.")
    prompt_tokens: int
    parts: list[ExplainedPart] = Field(description="In the order of the prompt.")
    plan: ExplainedPlan
    time: ExplainedTime | None = Field(description="Null: the engine has no record.")
    stages: list[ExplainedStage] = Field(description="Stages of the search, as they arrived.")
    speculation: list[ExplainedGuess] = Field(
        description="What engines computed while the search ran."
    )
