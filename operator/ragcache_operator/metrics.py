"""Prometheus metrics of the operator process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ragcache_wire.telemetry.catalogue import operator as rows
from ragcache_wire.telemetry.metric_registry import MetricRegistry


class Metrics:
    """The metrics of one operator, in their own registry."""

    def __init__(self) -> None:
        registry = MetricRegistry("operator")
        self.registry = registry.collectors
        self._pass_seconds = registry.histogram(rows.RECONCILE)
        self._applies = registry.counter(rows.APPLIES)
        self.leading = registry.gauge(rows.LEADING)

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
