"""What the reconciler remembers of one RagCache between two passes."""

from __future__ import annotations

from dataclasses import dataclass, field

from ragcache_operator.status.gateway_client import ShardReset, StoreUsage
from ragcache_operator.status.retriever_state import RetrieverState


@dataclass(slots=True)
class DriftCorrection:
    """How often the operator has corrected an object, and when it may do so again."""

    count: int = 0
    not_before_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ClaimRefusal:
    """Why the API server refused to grow a claim to a size, and when to try again."""

    size: str
    message: str
    retry_s: float


@dataclass(slots=True)
class ReconcileState:
    """State between passes. After a restart the operator starts with an empty state.

    Times ending in ``_s`` are of the monotonic clock.
    """

    test_failures: int = 0
    next_test_s: float = 0.0
    api_failures: int = 0
    rejections: int = 0
    store_usage: StoreUsage | None = None
    blend_verdict: str | None = None
    """Last verdict of the gateway about blends; None before the first."""
    next_usage_s: float = 0.0
    retriever: RetrieverState = field(default_factory=RetrieverState)
    next_retriever_s: float = 0.0
    slow_types: dict[str, str] = field(default_factory=dict)
    """The data type that each engine computes slowly, by uid of its pod. Empty if it is fast."""
    gpu_capacity: dict[str, int] | None = None
    """How many of each extended resource that pods wait for the nodes have, as last read."""
    next_nodes_s: float = 0.0
    next_secret_s: dict[str, float] = field(default_factory=dict)
    reported: frozenset[str] = frozenset()
    """Messages of unsupported features that an Event has reported."""
    reported_resets: frozenset[ShardReset] = frozenset()
    """Resets of shards that an Event has reported."""
    claim_refusals: dict[str, ClaimRefusal] = field(default_factory=dict)
    """By name of the claim."""
    corrections: dict[tuple[str, str, str], DriftCorrection] = field(default_factory=dict)


def backoff_s(steps: tuple[float, ...], failures: int) -> float:
    """Return the wait after a number of consecutive failures. The last step repeats."""
    return steps[min(failures, len(steps) - 1)]
