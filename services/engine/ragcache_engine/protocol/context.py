"""What both halves of the connector know of their engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from ragcache_core.identity.keys import KVSpace
from ragcache_wire.settings import EngineSettings
from ragcache_wire.tracing import Tracer


@dataclass(frozen=True, slots=True)
class EngineContext:
    """An engine and its model.

    Attributes:
        settings: The engine's settings.
        space: KV space of the model. In a worker of several ranks, with the heads of its rank.
        tracer: Makes the spans of requests that are part of a trace.
        rank: The worker's rank among ``space.num_ranks``.
    """

    settings: EngineSettings
    space: KVSpace
    tracer: Tracer = field(default_factory=Tracer)
    rank: int = 0
