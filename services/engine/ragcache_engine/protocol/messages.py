"""Messages between the connector's scheduler and worker halves, sent once per engine step.

The halves run in different processes (on a CPU, and with tensor parallelism). vLLM pickles these
messages and carries them. The halves share nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ragcache_core.blend.token_selection import InfluencedChunk
from ragcache_core.identity.keys import ChunkKey, VariantKey
from ragcache_core.identity.variant import LOSSLESS, Miss, Origin, PrecisionUse, VariantInfo
from ragcache_core.store_api import AsOf
from ragcache_wire.settings.engine import LOAD_DEADLINE_S

STORE_TIER = "store"
"""Stands for the cache store where the worker reports which tier a value came from."""

BLEND_UNSUPPORTED = "this engine cannot blend"
"""Failure reason of a load that needs recomputation. The scheduler then stops blending."""


def miss_reason(miss: Miss) -> str:
    """Return the words that outcomes and request records use for a miss of the store."""
    return miss.value.replace("_", " ")


@dataclass(frozen=True, slots=True)
class VariantSpan:
    """Tokens [start, end) of one request's prompt, and the variant that stores their KV."""

    variant: VariantKey
    start: int
    end: int
    # Position of the variant's first token when it was computed. None: the same as start.
    base_position: int | None = None
    # CCI * (1 - beta') of this use of the variant; 0: its prefix matches (Cache-Craft section 3.3).
    fix_overhead: float = 0.0

    @property
    def position_shift(self) -> int:
        """Return by how many positions the variant moves from where it was computed."""
        return 0 if self.base_position is None else self.start - self.base_position


@dataclass(frozen=True, slots=True)
class RecomputeJob:
    """What the worker recomputes after a load that is not exact.

    Source: Cache-Craft section 3.2.
    """

    # Positions below this one hold exact KV.
    exact_end: int
    # The whole prompt.
    token_ids: Sequence[int]
    # Approximate chunks, with the influence of other chunks on each of their tokens.
    chunks: tuple[InfluencedChunk, ...]
    # Positions that no variant covers. The worker computes all of them.
    missing: tuple[range, ...]
    # How many tokens of the approximate chunks to recompute. Missing positions do not count.
    recompute_tokens: int
    # Reserved blocks that hold the question's KV while it attends to the chunks.
    scratch_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Load the KV of prompt tokens [first, end) into a request's blocks."""

    request_id: str
    # Ascending. The worker fetches whole variants, and may write only a part of the first and last.
    spans: tuple[VariantSpan, ...]
    first: int
    end: int
    # The request's block table, at least up to end.
    blocks: tuple[int, ...]
    # Access domain of the plan.
    domain: str
    # None: all of the load is exact.
    recompute: RecomputeJob | None = None
    # W3C trace context of the request's span. Empty: the request is not traced.
    traceparent: str = ""
    # Predicted seconds to compute the tokens after end. None: unknown.
    compute_s: float | None = None
    # After this many seconds the worker stops waiting and computes what has not arrived.
    deadline_s: float = LOAD_DEADLINE_S
    # As in ReusePlan.
    precision: PrecisionUse = LOSSLESS

    def written_range(self, span: VariantSpan) -> tuple[int, int]:
        """Return the positions [start, end) of a span that the worker writes."""
        return max(span.start, self.first), min(span.end, self.end)

    def can_recompute(self, span: VariantSpan) -> bool:
        """Tell whether the worker can compute a span after the load, if it does not arrive."""
        if self.recompute is None:
            return False
        return max(span.start, self.first) >= self.recompute.exact_end


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Save one variant from a request's blocks after this step's forward pass."""

    request_id: str
    span: VariantSpan
    info: VariantInfo
    # Without the compute cost, which the worker measures.
    origin: Origin
    # By shard address: the deletes that the shard knew when the prompt's lookup was answered.
    as_of: Mapping[str, AsOf]
    blocks: tuple[int, ...]
    # As in LoadJob.
    traceparent: str = ""
    # Another engine waits for the value, so layers are sent while the next ones are computed.
    hands_off: bool = False


@dataclass(frozen=True, slots=True)
class ObserveJob:
    """Measure how the chunks of a finished request attend to the chunks before them.

    The scheduler keeps the request's blocks until the worker has finished or aborted the job.
    """

    request_id: str
    # The prompt, up to the end of the last observed chunk.
    token_ids: Sequence[int]
    blocks: tuple[int, ...]
    # Ascending and without gaps from position 0: the template first, then one range per chunk.
    segments: tuple[range, ...]
    # Chunk key of each segment.
    chunks: tuple[ChunkKey, ...]
    # The request's saves by the index of their segment.
    saves: Mapping[int, SaveJob]


@dataclass(frozen=True, slots=True)
class ComputedRange:
    """Prompt tokens [first, end) of a request that the step's forward pass computes."""

    request_id: str
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class PromptSlice:
    """Runs of one prompt's positions that a pass recomputes.

    The blocks hold the KV of every position before the last run's end.

    Attributes:
        token_ids: The prompt.
        blocks: Its block table.
        runs: Ascending, each of maximal length.
        chunks: Ranges whose KV was loaded and is not exact, ascending.
        shifted_runs: Positions of the chunks that no pass recomputes, ascending. This pass shifts
            them by its part of the chunk's change (``ChunkShift``).
    """

    token_ids: Sequence[int]
    blocks: Sequence[int]
    runs: Sequence[range]
    chunks: Sequence[range] = ()
    shifted_runs: Sequence[range] = ()

    @property
    def num_tokens(self) -> int:
        """Number of positions."""
        return sum(map(len, self.runs))

    @property
    def approximate(self) -> range:
        """Positions from the first to the last one that a pass recomputes, or that is not exact."""
        ranges = [*self.runs, *self.chunks]
        return range(min(one.start for one in ranges), max(one.stop for one in ranges))


@dataclass(frozen=True, slots=True)
class StepJobs:
    """What the scheduler asks of the worker in one step."""

    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()
    observes: tuple[ObserveJob, ...] = ()
    # With several ranks: loads of blends that have ended on all of them, with what any rank misses.
    # All ranks recompute them from this step on, or end them as failed.
    ended_loads: tuple[LoadOutcome, ...] = ()
    # A load that a finished request declined, to be measured in idle time.
    probe: LoadJob | None = None
    # No request runs or waits.
    is_idle: bool = False
    # Recomputed by the step's forward pass beside vLLM's own tokens.
    joint_recomputes: tuple[PromptSlice, ...] = ()
    # Number of requests that had arrived when the step began (``ArrivalCounter``).
    num_arrivals: int = 0
    # vLLM needs the blocks that are kept for observing: release all of them.
    release_kept_blocks: bool = False
    # Requests that have ended. vLLM may give their blocks to other requests in this step.
    finished_ids: tuple[str, ...] = ()
    # Of tracked requests only.
    computed: tuple[ComputedRange, ...] = ()
    # Tokens of all requests in the step.
    num_tokens: int = 0
    # Tokens that the forward pass recomputes beside them.
    recompute_tokens: int = 0
    # Of num_tokens, the prompt tokens. An estimate for untracked requests.
    prompt_tokens: int = 0
    # Size of the forward pass (``ReuseCosts.work``). It comes back with the seconds that it took.
    work: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """The result of a LoadJob."""

    request_id: str
    # Prompt tokens that hold usable KV, recomputed and missing ones included.
    tokens: int
    # Fetched for them.
    num_bytes: int
    seconds: float
    # The first variant that did not arrive.
    missing_variant: VariantKey | None
    # Why the load failed. Empty: it did not.
    reason: str
    # Positions that did not arrive and that the worker recomputed.
    missing_ranges: tuple[range, ...] = ()
    # Of tokens, those that are not exact.
    blended_tokens: int = 0
    recomputed_tokens: int = 0
    # Seconds of the selection and of recomputation before the request resumed, waits included.
    recompute_s: float = 0.0
    # Of these, seconds of the selection.
    select_s: float = 0.0
    # Of the selected positions, those that the request's next pass has to recompute.
    left_to_recompute: tuple[range, ...] = ()
    # If that pass has to recompute any positions: the loaded ranges that are not exact, and tokens
    # of them that it shifts.
    loaded_chunks: tuple[range, ...] = ()
    shifted_runs: tuple[range, ...] = ()
    # Number of values behind missing_ranges, by reason.
    missing_reasons: Mapping[str, int] = field(default_factory=dict)
    # The load's whole deadline passed before the worker stopped waiting.
    timed_out: bool = False
    # Written values and their bytes, by tier: one of the worker's, or STORE_TIER.
    values_by_tier: Mapping[str, int] = field(default_factory=dict)
    bytes_by_tier: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProbeOutcome:
    """The result of a load that was made to measure it."""

    # Has the id of the request that declined the load.
    outcome: LoadOutcome
    # What was to be loaded: the first variants of the job.
    variants: tuple[VariantKey, ...]


@dataclass(frozen=True, slots=True)
class MeasuredPass:
    """How long a forward pass took."""

    # Predicted cost (``ReuseCosts.pass_cost``).
    work: float
    seconds: float
    # Whether it also recomputed tokens of blends.
    recomputed: bool = False


@dataclass(frozen=True, slots=True)
class TierChange:
    """A tier of the worker stores a variant from now on."""

    tier: str
    # Whether the value may serve ``exact`` reuse.
    exact: bool


@dataclass(slots=True)
class StepReport:
    """What the worker reports to the scheduler after a step."""

    outcomes: list[LoadOutcome] = field(default_factory=list)
    # The passes that computed prompt tokens.
    passes: list[MeasuredPass] = field(default_factory=list)
    # By variant: where the worker now stores it. None: no tier of the worker does any more.
    tier_changes: Mapping[VariantKey, TierChange | None] = field(default_factory=dict)
    # Declined loads that the worker has measured.
    probes: list[ProbeOutcome] = field(default_factory=list)
    # The worker's rank.
    rank: int = 0
    # Loads of blends that have ended on this rank, which waits for ``StepJobs.ended_loads``.
    ended_loads: list[LoadOutcome] = field(default_factory=list)
