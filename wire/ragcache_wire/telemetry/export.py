"""Starts the export of metrics over OTLP, where a collector is set."""

from __future__ import annotations

from typing import Protocol

from prometheus_client import CollectorRegistry


class MetricsExport(Protocol):
    """An export that runs until it is closed."""

    def close(self) -> None:
        """Export once more, within some seconds."""


class NoMetricsExport:
    """The export of a part without a collector, which sends nothing."""

    def close(self) -> None:
        """Do nothing."""


def export_metrics(
    endpoint: str | None, part: str, instance: str, collectors: CollectorRegistry
) -> MetricsExport:
    """Export the metrics of a process from now on.

    Args:
        endpoint: Base URL, like http://collector:4318. None: nothing is exported.
        part: Name of the part.
        instance: Name of this process among those of the part.
        collectors: The metrics.
    """
    if endpoint is None:
        return NoMetricsExport()
    # It imports the SDK of OpenTelemetry, which parts without a collector do without.
    from ragcache_wire.telemetry.otlp_exporter import OtlpMetrics  # noqa: PLC0415

    return OtlpMetrics(endpoint, part, instance, collectors)
