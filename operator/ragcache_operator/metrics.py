"""Prometheus metrics of the operator process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """The metrics of one operator, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._pass_seconds = Histogram(
            "ragcache_operator_reconcile_seconds",
            "Duration of a reconcile pass, by kind and outcome.",
            ("kind", "outcome"),
            buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0),
            registry=self.registry,
        )
        self._applies = Counter(
            "ragcache_operator_applies_total",
            "Number of written children, by kind.",
            ("kind",),
            registry=self.registry,
        )
        self.leading = Gauge(
            "ragcache_operator_leading",
            "1 while this replica leads and reconciles, else 0.",
            registry=self.registry,
        )

    @contextmanager
    def time_pass(self, kind: str) -> Iterator[None]:
        """Measure the duration and the outcome of a reconcile pass."""
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

    def count_apply(self, kind: str) -> None:
        """Count one written child."""
        self._applies.labels(kind).inc()
