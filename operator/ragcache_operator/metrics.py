"""What the operator counts of itself, for Prometheus."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """One operator's counters in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._pass_seconds = Histogram(
            "ragcache_operator_reconcile_seconds",
            "One pass over an object, by its kind and outcome.",
            ("kind", "outcome"),
            buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0),
            registry=self.registry,
        )
        self._applied = Counter(
            "ragcache_operator_applies_total",
            "Children written, by kind.",
            ("kind",),
            registry=self.registry,
        )
        self.leading = Gauge(
            "ragcache_operator_leading",
            "1 while this replica reconciles.",
            registry=self.registry,
        )

    @contextmanager
    def time_pass(self, kind: str) -> Iterator[None]:
        """Time a pass over an object of a kind."""
        started = time.monotonic()
        outcome = "failed"
        try:
            yield
            outcome = "done"
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self._pass_seconds.labels(kind, outcome).observe(time.monotonic() - started)

    def applied(self, kind: str) -> None:
        """Count a child that was written."""
        self._applied.labels(kind).inc()
