"""What scheduler side and worker side tell each other, once per engine step.

The two sides live in different processes (on CPU and with tensor parallelism); these messages,
which vLLM pickles and carries, are all they share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ragcache_core.keys import VariantKey
from ragcache_core.storing import AsOf
from ragcache_core.variant import Origin, VariantInfo


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
    domain: access domain of the plan.
    """

    request_id: str
    spans: tuple[Span, ...]
    first: int
    end: int
    blocks: tuple[int, ...]
    domain: str


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Save one variant from a request's blocks after this step's forward pass.

    origin: all but its cost, which the worker measures. as_of: the deletes that the lookup knew of
    which the computation was planned on, by the shard's address.
    """

    request_id: str
    span: Span
    info: VariantInfo
    origin: Origin
    as_of: Mapping[str, AsOf]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Computing:
    """A request's prompt tokens [first, end) that the step's forward pass computes."""

    request_id: str
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class StepJobs:
    """Scheduler to worker.

    computing: of requests with a plan. num_tokens: of every request that runs in the step.
    """

    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()
    computing: tuple[Computing, ...] = ()
    num_tokens: int = 0


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
