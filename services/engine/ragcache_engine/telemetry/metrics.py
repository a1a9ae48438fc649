"""Adds the connector's counts to vLLM's own metrics (``/metrics`` of its server).

The worker counts loads, and the scheduler counts refused plans. vLLM adds these counts up and
carries them to the server's process, which has the Prometheus registry.
"""

from __future__ import annotations

import logging
import platform
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.prometheus import get_prometheus_registry

from ragcache_core.errors import InvalidInput
from ragcache_engine.telemetry.load_counts import DECODING, LoadCounts
from ragcache_wire.http_server import MetricsThread
from ragcache_wire.settings import EngineSettings
from ragcache_wire.telemetry.catalogue import engine as rows
from ragcache_wire.telemetry.instrument import Instrument
from ragcache_wire.telemetry.metric_registry import export_metrics

log = logging.getLogger("vllm.ragcache")

_STARTED: Final = threading.Event()


class LoadStats(KVConnectorStats):  # type: ignore[misc]
    """``LoadCounts`` in the form that vLLM carries and logs."""

    @property
    def _counts(self) -> LoadCounts:
        return LoadCounts.from_dict(self.data)

    def reset(self) -> None:
        """Set all counts to zero."""
        self.data = LoadCounts().to_dict()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Return the sum with the counts of another worker or step."""
        return LoadStats((self._counts + LoadCounts.from_dict(other.data)).to_dict())

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM's log line shows."""
        return self._counts.summary()

    def is_empty(self) -> bool:
        """Tell whether there is nothing to report."""
        return not self._counts


class LoadMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """``LoadCounts`` as Prometheus metrics, by engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[Any, Any],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        engines = [[str(value) for value in one] for one in per_engine_labelvalues.values()]
        counter = partial(_made, metric_types[Counter], labelnames, engines)
        histogram = partial(_made, metric_types[Histogram], labelnames, engines)
        self._tokens = counter(rows.PROMPT_TOKENS)
        self._saved_s = counter(rows.SAVED_SECONDS)
        self._excess_s = counter(rows.EXCESS_SECONDS)
        self._failures = counter(rows.LOAD_FAILURES)
        for engine in engines:
            # It exists before the first failure, so that a query tells zero from nothing.
            self._failures.labels(*engine, "load timed out")
        self._refused_plans = counter(rows.REFUSED_PLANS)
        self._load_s = histogram(rows.LOAD)
        self._recompute_s = histogram(rows.RECOMPUTE)
        self._prediction = histogram(rows.PREDICTION_RATIO)
        self._values = counter(rows.LOADED_VALUES)
        self._bytes = counter(rows.LOADED_BYTES)
        self._evicted = counter(rows.TIER_EVICTIONS)
        self._uses = counter(rows.REPORTED_USES)
        gauge = partial(_made, metric_types[Gauge], labelnames, engines)
        self._held_bytes = gauge(rows.TIER_BYTES)
        self._pending_s, self._decoding = gauge(rows.PENDING), gauge(rows.DECODING_REQUESTS)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of one or more steps."""
        labels = [str(value) for value in self.per_engine_labelvalues[engine_idx]]
        counts = LoadCounts.from_dict(transfer_stats_data)
        for metric, amounts in (
            (self._tokens, counts.tokens),
            (self._failures, counts.failures),
            (self._refused_plans, counts.refused_plans),
            (self._values, counts.values_by_tier),
            (self._bytes, counts.bytes_by_tier),
            (self._evicted, counts.evicted),
            (self._uses, counts.uses),
        ):
            for value, amount in amounts.items():
                metric.labels(*labels, value).inc(amount)
        self._saved_s.labels(*labels).inc(counts.saved_s)
        self._excess_s.labels(*labels).inc(counts.excess_s)
        for seconds in counts.load_s:
            self._load_s.labels(*labels).observe(seconds)
        for seconds in counts.recompute_s:
            self._recompute_s.labels(*labels).observe(seconds)
        for stage, ratios in counts.prediction_ratios.items():
            for ratio in ratios:
                self._prediction.labels(*labels, stage).observe(ratio)
        for tier, held_bytes in counts.held_bytes.items():
            self._held_bytes.labels(*labels, tier).set(held_bytes)
        for kind, number in counts.queue.items():
            if kind == DECODING:
                self._decoding.labels(*labels).set(number)
            else:
                self._pending_s.labels(*labels, kind).set(number)


def _made(
    metric_type: Any,
    labelnames: Sequence[str],
    engines: Sequence[Sequence[str]],
    row: Instrument,
) -> Any:
    """Return the metric of a row, of the type that vLLM chooses, with the series of each engine."""
    buckets = {"buckets": row.buckets} if row.buckets else {}
    made = metric_type(
        name=row.family_name,
        documentation=row.description,
        labelnames=[*labelnames, *row.label_names],
        **buckets,
    )
    for engine in engines:
        for values in row.known_series() if row.labels else [()]:
            made.labels(*engine, *values)
    return made


def serve_metrics(settings: EngineSettings) -> None:
    """Serve and export the metrics of this process from now on. Further calls do nothing.

    vLLM's server serves them beside the model's API, which only the gateway may reach.
    """
    if _STARTED.is_set():
        return
    _STARTED.set()
    # Without it, each counter has a second series with its time of creation.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = get_prometheus_registry()
    export_metrics(settings.otlp_endpoint, "engine", platform.node(), registry)
    if settings.metrics_listen is None:
        return
    try:
        MetricsThread(settings.metrics_listen, registry).start()
    except InvalidInput as error:
        # With several servers in one pod, one of them has the port, and it knows all counts.
        log.warning("metrics: not served error=%s", error)
