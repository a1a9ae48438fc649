"""The metrics catalogue: every instrument of every part, one module for each part.

``docs/reference/metrics.md`` is generated from it. A part records only what is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Final

from ragcache_wire.telemetry.catalogue import (
    cachestore,
    engine,
    gateway,
    operator,
    retriever,
    standard,
)
from ragcache_wire.telemetry.instrument import Instrument

PARTS: Final = ("gateway", "retriever", "engine", "cachestore", "operator")

_MODULES: Final[Mapping[str, ModuleType]] = {
    "gateway": gateway,
    "retriever": retriever,
    "engine": engine,
    "cachestore": cachestore,
    "operator": operator,
    "standard": standard,
}


def rows_of(part: str) -> dict[str, Instrument]:
    """Return the instruments of a part by the name of their constant.

    Args:
        part: One of PARTS, or ``standard`` for what libraries record.
    """
    found = vars(_MODULES[part]).items()
    return {name: value for name, value in found if isinstance(value, Instrument)}


def all_rows() -> list[Instrument]:
    """Return every instrument."""
    return [row for part in _MODULES for row in rows_of(part).values()]
