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
        space: KV space of the model.
        tracer: Makes the spans of requests that are part of a trace.
    """

    settings: EngineSettings
    space: KVSpace
    tracer: Tracer = field(default_factory=Tracer)
