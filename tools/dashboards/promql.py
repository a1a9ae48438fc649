"""Builds PromQL from rows of the metrics catalogue, so that no query names an unknown metric."""

from __future__ import annotations

from typing import Final

from ragcache_wire.telemetry.instrument import Instrument

WINDOW: Final = "$__rate_interval"
RAGCACHES: Final = ('namespace=~"$namespace"', 'ragcache=~"$ragcache"')
"""Matchers of the RagCaches that a dashboard's variables select."""


def series(row: Instrument, *matchers: str, suffix: str = "") -> str:
    """Return the selector of an instrument's series.

    Args:
        matchers: Conditions on labels, like ``tier="disk"``.
        suffix: ``_bucket``, ``_count`` or ``_sum`` of a histogram.
    """
    inside = f"{{{','.join(matchers)}}}" if matchers else ""
    return f"{row.prometheus_name}{suffix}{inside}"


def rate(row: Instrument, *matchers: str, suffix: str = "", window: str = WINDOW) -> str:
    """Return the growth per second."""
    return f"rate({series(row, *matchers, suffix=suffix)}[{window}])"


def increase(row: Instrument, *matchers: str, window: str, suffix: str = "") -> str:
    """Return the growth in a time."""
    return f"increase({series(row, *matchers, suffix=suffix)}[{window}])"


def total(expression: str, *by: str) -> str:
    """Return the sum, by some labels."""
    return f"sum by ({', '.join(by)}) ({expression})" if by else f"sum({expression})"


def highest(expression: str, *by: str) -> str:
    """Return the maximum, by some labels."""
    return f"max by ({', '.join(by)}) ({expression})" if by else f"max({expression})"


def lowest(expression: str, *by: str) -> str:
    """Return the minimum, by some labels."""
    return f"min by ({', '.join(by)}) ({expression})" if by else f"min({expression})"


def quantile(
    share: float, row: Instrument, *matchers: str, by: tuple[str, ...] = (), window: str = WINDOW
) -> str:
    """Return a quantile of a histogram, by some labels."""
    buckets = total(rate(row, *matchers, suffix="_bucket", window=window), *by, "le")
    return f"histogram_quantile({share:g}, {buckets})"


def mean(row: Instrument, *matchers: str, by: tuple[str, ...] = ()) -> str:
    """Return the mean of a histogram's values, by some labels."""
    sums = total(rate(row, *matchers, suffix="_sum"), *by)
    return f"{sums} / {total(rate(row, *matchers, suffix='_count'), *by)}"
