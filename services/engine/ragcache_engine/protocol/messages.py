"""What scheduler side and worker side tell each other, once per engine step.

The two sides live in different processes (on CPU and with tensor parallelism); these messages,
which vLLM pickles and carries, are all they share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ragcache_core.blend.token_ranking import InfluencedChunk
from ragcache_core.identity.keys import ChunkKey, VariantKey
from ragcache_core.identity.variant import Origin, VariantInfo
from ragcache_core.store_api import AsOf

NO_BLEND = "this engine cannot blend"
"""Reason of a load's failure, after which none is asked to be mended any more."""


LOAD_DEADLINE_S = 5.0
"""Of a load, where nobody says otherwise."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of the prompt of one request, and the variant that holds them.

    base_position: where the variant's first token stood when it was computed, if not there.
    """

    variant: VariantKey
    start: int
    end: int
    base_position: int | None = None

    @property
    def moved_by(self) -> int:
        """Positions from where it was computed to where it is used."""
        return 0 if self.base_position is None else self.start - self.base_position


@dataclass(frozen=True, slots=True)
class Repair:
    """What to do with a load that is not exact, once it is there (Cache-Craft §3.2).

    exact_end: position up to which the load is exact. token_ids: the prompt. chunks: those to mend,
    with the influence on each token. holes: what nothing is held of; computed in whole. budget:
    tokens to recompute beside them. scratch: blocks that belong to no request, for the KV of the
    question when it looks at the chunks.
    """

    exact_end: int
    token_ids: Sequence[int]
    chunks: tuple[InfluencedChunk, ...]
    holes: tuple[range, ...]
    budget: int
    scratch: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Load prompt tokens [first, end) into a request's blocks.

    spans: the variants that hold them, ascending; fetched whole, of the first and the last one
    maybe only a part is written. blocks: the request's block table, at least up to ``end``.
    domain: access domain of the plan. repair: None where all of it is exact. traceparent: the span
    that the request is part of, as W3C Trace Context writes it; empty where it is not traced.
    compute_s: seconds that computing what follows is predicted to take; None: not known.
    deadline_s: seconds after which what has not come is computed.
    """

    request_id: str
    spans: tuple[Span, ...]
    first: int
    end: int
    blocks: tuple[int, ...]
    domain: str
    repair: Repair | None = None
    traceparent: str = ""
    compute_s: float | None = None
    deadline_s: float = LOAD_DEADLINE_S

    def part(self, span: Span) -> tuple[int, int]:
        """What of a span is written: positions from the first until the second."""
        return max(span.start, self.first), min(span.end, self.end)

    def may_lack(self, span: Span) -> bool:
        """Whether what span has can be computed later, when the load is mended."""
        return self.repair is not None and max(span.start, self.first) >= self.repair.exact_end


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Save one variant from a request's blocks after this step's forward pass.

    origin: all but its cost, which the worker measures. as_of: the deletes that the lookup knew of
    which the computation was planned on, by the shard's address. traceparent: as of a LoadJob.
    """

    request_id: str
    span: Span
    info: VariantInfo
    origin: Origin
    as_of: Mapping[str, AsOf]
    blocks: tuple[int, ...]
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class ObserveJob:
    """See what chunks of a request that has ended took from those before them.

    Its blocks are kept until this is done or given up. token_ids: of the prompt, up to the last
    chunk's end. segments: ascending without gaps from position 0, the template first, then a chunk
    each. chunks: key of each segment. saves: what was saved of the request, by the place of its
    segment.
    """

    request_id: str
    token_ids: Sequence[int]
    blocks: tuple[int, ...]
    segments: tuple[range, ...]
    chunks: tuple[ChunkKey, ...]
    saves: Mapping[int, SaveJob]


@dataclass(frozen=True, slots=True)
class Computing:
    """A request's prompt tokens [first, end) that the step's forward pass computes."""

    request_id: str
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class StepJobs:
    """Scheduler to worker.

    let_go: of all blocks that are kept for observing; vLLM needs them. ended: requests whose blocks
    may be others' in this step. computing: of requests with a plan. num_tokens: of every request
    that runs in the step; prompt_tokens: those of prompts, as far as is known. work: what computing
    all of them is (``ReuseCosts.work``), which comes back with the seconds that it took.
    """

    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()
    observes: tuple[ObserveJob, ...] = ()
    let_go: bool = False
    ended: tuple[str, ...] = ()
    computing: tuple[Computing, ...] = ()
    num_tokens: int = 0
    prompt_tokens: int = 0
    work: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """What became of a LoadJob.

    tokens: loaded and used, those that were repaired among them, holes and what did not come
    included. num_bytes: fetched for them.
    missing: the first variant that did not come, or None. reason: why it failed, or "".
    lost: what did not come of a load that is mended; why_lost: values of these, by reason.
    late: all of its time had passed before what did not come was given up.
    blended: of tokens, those that are not exact.
    repaired: tokens that were computed anew. repair_s: seconds that this took, waits included.
    values_from, bytes_from: values that were written and their bytes, by where they came from.
    """

    request_id: str
    tokens: int
    num_bytes: int
    seconds: float
    missing: VariantKey | None
    reason: str
    lost: tuple[range, ...] = ()
    blended: int = 0
    repaired: int = 0
    repair_s: float = 0.0
    why_lost: Mapping[str, int] = field(default_factory=dict)
    late: bool = False
    values_from: Mapping[str, int] = field(default_factory=dict)
    bytes_from: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class StepReport:
    """Worker to scheduler.

    passes: work and seconds of passes that computed prompts. kept: values that have come to a tier
    of the worker's, by its name, or left all: None.
    """

    outcomes: list[LoadOutcome] = field(default_factory=list)
    passes: list[tuple[float, float]] = field(default_factory=list)
    kept: Mapping[VariantKey, str | None] = field(default_factory=dict)
