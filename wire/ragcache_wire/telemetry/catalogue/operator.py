"""Instruments of the operator."""

from __future__ import annotations

from typing import Final

from ragcache_wire.telemetry.instrument import at_most, counter, gauge, histogram, one_of

_OURS: Final = one_of("kind", "RagCache", "RagCollection")

RECONCILE: Final = histogram(
    "ragcache.operator.reconcile",
    "s",
    "Duration of a reconcile pass, by kind and outcome.",
    _OURS,
    one_of("outcome", "done", "failed", "cancelled"),
    buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0),
)
APPLIES: Final = counter(
    "ragcache.operator.applies",
    "{object}",
    "Number of written children, by kind.",
    at_most("kind", 24, "kind of a Kubernetes object"),
)
LEADING: Final = gauge(
    "ragcache.operator.leading", "1", "1 while this replica leads and reconciles, else 0."
)
