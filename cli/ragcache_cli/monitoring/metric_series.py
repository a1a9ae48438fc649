"""The series of a metrics page, and what two reads of it tell: increases and percentiles."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from ragcache_wire.telemetry.instrument import Instrument

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class MetricSeries:
    """The values of one read of metrics.

    Args:
        values: Value by labels, by the name of the series in Prometheus.
    """

    values: Mapping[str, Mapping[Labels, float]]

    @classmethod
    def parse(cls, pages: Iterable[str]) -> MetricSeries:
        """Read pages in Prometheus' text format. Raises ValueError if one is not."""
        values: dict[str, dict[Labels, float]] = defaultdict(dict)
        for page in pages:
            for family in text_string_to_metric_families(page):
                for sample in family.samples:
                    values[sample.name][frozenset(sample.labels.items())] = float(sample.value)
        return cls(values)

    def of(self, row: Instrument, **labels: str) -> dict[Labels, float]:
        """Return the series of a counter or a gauge that have these labels."""
        return self._named(row.prometheus_name, labels)

    def total(self, row: Instrument, **labels: str) -> float | None:
        """Return the sum of the series with these labels; None if there is none."""
        found = self.of(row, **labels)
        return math.fsum(found.values()) if found else None

    def buckets(self, row: Instrument) -> dict[Labels, float]:
        """Return the cumulative buckets of a histogram, with their label ``le``."""
        return self._named(f"{row.prometheus_name}_bucket", {})

    def _named(self, name: str, labels: Mapping[str, str]) -> dict[Labels, float]:
        wanted = labels.items()
        found = self.values.get(name, {})
        return {key: value for key, value in found.items() if wanted <= dict(key).items()}


def increases(before: Mapping[Labels, float], after: Mapping[Labels, float]) -> dict[Labels, float]:
    """Return by how much each counter grew. A counter that shrank has started again from 0."""
    return {
        labels: value - before[labels] if value >= before.get(labels, 0.0) and labels in before
        else value
        for labels, value in after.items()
    }  # fmt: skip


def rate(
    before: MetricSeries, after: MetricSeries, elapsed_s: float, row: Instrument, **labels: str
) -> float | None:
    """Return the increase of a counter per second; None if there is no such series."""
    grown = increases(before.of(row, **labels), after.of(row, **labels))
    return math.fsum(grown.values()) / elapsed_s if grown else None


def percentile(buckets: Mapping[Labels, float], share: float) -> float | None:
    """Estimate a percentile from the buckets of a histogram; None without an observation.

    Inside a bucket it interpolates linearly, as ``histogram_quantile`` of Prometheus does. Of the
    last bucket, which has no upper bound, it returns the lower bound.

    Args:
        buckets: Cumulative counts; the series of all other labels are added.
        share: From 0 to 1, like 0.95.
    """
    counts: dict[float, float] = defaultdict(float)
    for labels, count in buckets.items():
        counts[float(dict(labels)["le"])] += count
    bounds = sorted(counts)
    total = counts[bounds[-1]] if bounds else 0.0
    if total <= 0:
        return None
    wanted = share * total
    lower, below = 0.0, 0.0
    for bound in bounds:
        if counts[bound] >= wanted and counts[bound] > below:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (wanted - below) / (counts[bound] - below)
        lower, below = bound, counts[bound]
    return lower
