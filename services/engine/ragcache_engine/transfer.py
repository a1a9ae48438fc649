"""What scheduler side and worker side tell each other, once per engine step.

The two sides live in different processes (on CPU and with tensor parallelism); these messages,
which vLLM pickles and carries, are all they share.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ragcache_core.keys import VariantKey
from ragcache_core.reuse import VariantInfo


@dataclass(frozen=True, slots=True)
class Span:
    """One variant's tokens [start, end) in the prompt of one request."""

    variant: VariantKey
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Load prompt tokens [first, end) into a request's blocks.

    spans: the variants that hold them, ascending; fetched whole, of the first and the last one
    maybe only a part is written. blocks: the request's block table, at least up to ``end``.
    """

    request_id: str
    spans: tuple[Span, ...]
    first: int
    end: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Save one variant from a request's blocks after this step's forward pass."""

    span: Span
    info: VariantInfo
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepJobs:
    """Scheduler to worker."""

    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """What became of a LoadJob.

    tokens: loaded and used. num_bytes: fetched for them. missing: the first variant that did not
    come, or None.
    """

    request_id: str
    tokens: int
    num_bytes: int
    seconds: float
    missing: VariantKey | None
    reason: str


@dataclass(slots=True)
class StepReport:
    """Worker to scheduler."""

    outcomes: list[LoadOutcome] = field(default_factory=list)
