"""A row of the metrics catalogue: one instrument, with its names, unit, labels and meaning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import product
from typing import Final

_UNIT_SUFFIXES: Final = {"s": "seconds", "By": "bytes"}
"""What OpenTelemetry's rules for Prometheus append to a name, by unit."""

_MAX_KNOWN_SERIES: Final = 64


class InstrumentKind(StrEnum):
    """What an instrument measures."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Label:
    """A label of an instrument, with a bound of its values.

    Attributes:
        name: Name of the OpenTelemetry attribute.
        values: All values, if they are known.
        max_values: Most values that one process has.
        meaning: What the values are, if they are not listed.
    """

    name: str
    values: tuple[str, ...]
    max_values: int
    meaning: str = ""

    @property
    def prometheus_name(self) -> str:
        """Name of the label in Prometheus."""
        return self.name.replace(".", "_")


@dataclass(frozen=True, slots=True)
class Instrument:
    """One instrument.

    Attributes:
        name: OpenTelemetry name.
        unit: UCUM unit, like ``s``, ``By``, ``1`` or ``{token}``.
        description: What it counts or measures, for users.
        buckets: Upper bounds of a histogram's buckets, ascending, without infinity.
    """

    name: str
    kind: InstrumentKind
    unit: str
    description: str
    labels: tuple[Label, ...] = field(default=())
    buckets: tuple[float, ...] = field(default=())

    @property
    def family_name(self) -> str:
        """Name of the family in Prometheus, by OpenTelemetry's rules, without ``_total``."""
        name = self.name.replace(".", "_")
        suffix = _UNIT_SUFFIXES.get(self.unit)
        return name if suffix is None or name.endswith(f"_{suffix}") else f"{name}_{suffix}"

    @property
    def prometheus_name(self) -> str:
        """Name in Prometheus. A histogram's series also end in _bucket, _count or _sum."""
        is_counter = self.kind is InstrumentKind.COUNTER
        return f"{self.family_name}_total" if is_counter else self.family_name

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of its labels in Prometheus."""
        return tuple(label.prometheus_name for label in self.labels)

    def known_series(self) -> Iterator[tuple[str, ...]]:
        """Yield the label values of every series, if all of them are known and few.

        Series that exist from the start let a query tell zero from nothing.
        """
        if self.labels and all(label.values for label in self.labels):
            found = list(product(*(label.values for label in self.labels)))
            if len(found) <= _MAX_KNOWN_SERIES:
                yield from found


def one_of(name: str, *values: str) -> Label:
    """Return a label whose values are known."""
    return Label(name, values, len(values))


def at_most(name: str, max_values: int, meaning: str) -> Label:
    """Return a label with a bounded number of values."""
    return Label(name, (), max_values, meaning)


def counter(name: str, unit: str, description: str, *labels: Label) -> Instrument:
    """Return a sum that only grows."""
    return Instrument(name, InstrumentKind.COUNTER, unit, description, labels)


def gauge(name: str, unit: str, description: str, *labels: Label) -> Instrument:
    """Return a value that goes up and down."""
    return Instrument(name, InstrumentKind.GAUGE, unit, description, labels)


def histogram(
    name: str, unit: str, description: str, *labels: Label, buckets: Sequence[float]
) -> Instrument:
    """Return a distribution."""
    kind = InstrumentKind.HISTOGRAM
    return Instrument(name, kind, unit, description, labels, tuple(buckets))
