"""Finds the names of metrics in PromQL, and those that the catalogue does not describe."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from ragcache_wire.telemetry.catalogue import all_rows
from ragcache_wire.telemetry.instrument import Instrument, InstrumentKind

_SKIPPED: Final = re.compile(
    r"\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"|\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)"
)
"""What has no names of metrics: matchers, ranges, strings and lists of labels."""
_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*\b(?!\s*\()")
_CALL: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*\s*\(")
_WORDS: Final = frozenset(
    ("and", "or", "unless", "bool", "offset", "group_left", "group_right", "Inf", "NaN")
)
OUR_PREFIXES: Final = ("ragcache_", "gen_ai_")
"""Names with these prefixes are recorded by RagCache itself."""


def names_in(expression: str) -> set[str]:
    """Return the names of metrics in a PromQL expression."""
    rest = _SKIPPED.sub(" ", expression)
    rest = _CALL.sub(" ( ", rest)
    return {name for name in _NAME.findall(rest) if name not in _WORDS}


def documented_names() -> set[str]:
    """Return the names of all series that the catalogue describes."""
    return {name for row in all_rows() for name in series_names(row)}


def series_names(row: Instrument) -> list[str]:
    """Return the names of the series of an instrument."""
    name = row.prometheus_name
    if row.kind is InstrumentKind.HISTOGRAM:
        return [f"{name}{suffix}" for suffix in ("_bucket", "_count", "_sum")]
    return [name]


def undocumented(names: Iterable[str], recorded: Iterable[str]) -> list[str]:
    """Return names that neither the catalogue nor a recording rule defines, sorted."""
    return sorted(set(names) - documented_names() - set(recorded))
