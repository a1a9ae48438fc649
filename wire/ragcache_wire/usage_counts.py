"""The counts of usage, as messages and as values."""

from __future__ import annotations

from typing import Final

from ragcache_core.access.usage import COUNT_NAMES, Period, UsageCounts
from ragcache_wire.v1 import retriever_pb2 as pb

PERIODS: Final = {
    Period.MINUTE: pb.USAGE_PERIOD_MINUTE,
    Period.DAY: pb.USAGE_PERIOD_DAY,
    Period.MONTH: pb.USAGE_PERIOD_MONTH,
}
"""Number of each period in messages."""

PERIOD_OF: Final = {number: period for period, number in PERIODS.items()}


def counts_message(counts: UsageCounts) -> pb.UsageCounts:
    """Return counts as a message."""
    return pb.UsageCounts(**{name: getattr(counts, name) for name in COUNT_NAMES})


def counts_of(message: pb.UsageCounts) -> UsageCounts:
    """Return the counts of a message."""
    return UsageCounts(*(getattr(message, name) for name in COUNT_NAMES))
