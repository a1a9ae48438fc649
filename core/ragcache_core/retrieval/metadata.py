"""Metadata of documents: fields with a text, a number, a truth value, or a list of these.

Filters compare texts. The text of a number or a truth value is its JSON form, so 2024 and "2024"
are the same to a filter. A list passes a test if one of its values does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final, TypeAlias

from ragcache_core.errors import InvalidInput

Scalar: TypeAlias = str | int | float | bool
MetadataValue: TypeAlias = Scalar | list[Scalar]

MAX_LIST_VALUES: Final = 256
"""Each value is a row of an index."""
SCALARS: Final = "a text, a number, true or false"

_MAX_EXACT: Final = 2.0**53
_DATE: Final = r"\d{4}-\d\d-\d\d"
_ISO: Final = re.compile(
    rf"{_DATE}([T ]\d\d:\d\d(:\d\d([.,]\d+)?)?(Z|[+-]\d\d(:?\d\d)?)?)?", re.ASCII | re.IGNORECASE
)
_EPOCH: Final = datetime(1970, 1, 1)
_MICROSECOND: Final = timedelta(microseconds=1)
_DAY_US: Final = 86_400_000_000


def text_of(value: Scalar) -> str:
    """Return the text that filters compare. A number without a fraction has none in its text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < _MAX_EXACT:
        return str(int(value))
    return str(value)


def name_of(value: object) -> str | None:
    """Return the text of a name that may be a number, such as an id; None for another type."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    return text_of(value)


def texts_of(value: MetadataValue) -> tuple[str, ...]:
    """Return the texts of a field's values."""
    values = value if isinstance(value, list) else [value]
    return tuple(map(text_of, values))


def number_of(text: str) -> float | None:
    """Return the number that a text spells, or None. NaN is not a number here."""
    try:
        number = float(text)
    except ValueError:
        return None
    return None if math.isnan(number) else number


def instant_of(text: str) -> int | None:
    """Return the Unix microseconds of an ISO date or date-time, or None for other texts.

    A date is the start of its day. Without a zone it is in UTC.
    """
    text = text.strip().upper()
    if _ISO.fullmatch(text) is None:
        return None
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        return None
    # An aware time of the year 1 or 9999 may lie outside in UTC.
    offset = parsed.utcoffset() or timedelta()
    return (parsed.replace(tzinfo=None) - _EPOCH - offset) // _MICROSECOND


def end_of(text: str) -> int | None:
    """Return the Unix microseconds after the day of an ISO date, or after a date-time; or None."""
    start_us = instant_of(text)
    if start_us is None:
        return None
    return start_us + (_DAY_US if re.fullmatch(_DATE, text.strip()) else 1)


def checked_metadata(field: str, fields: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Return metadata without nulls.

    Args:
        field: Path of the metadata, for errors.

    Raises:
        InvalidInput: A value is of another type, or a list has too many. The error names its path.
    """
    found: dict[str, MetadataValue] = {}
    for name, value in fields.items():
        path = f"{field}.{name}"
        if not isinstance(value, list):
            if value is not None:
                found[name] = _checked(path, value)
            continue
        if len(value) > MAX_LIST_VALUES:
            problem = f"has {len(value)} values"
            raise InvalidInput(path, problem, f"send at most {MAX_LIST_VALUES}")
        found[name] = [
            _checked(f"{path}[{i}]", one) for i, one in enumerate(value) if one is not None
        ]
    return found


def _checked(path: str, value: Any) -> Scalar:
    if isinstance(value, dict):
        fix = f"write its members as fields of their own, such as {path.rpartition('.')[2]}.NAME"
        raise InvalidInput(path, "is an object", fix)
    if not isinstance(value, str | int | float):
        raise InvalidInput(path, "is of another type", f"send {SCALARS}")
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidInput(path, "is not a finite number", f"send {SCALARS}")
    return value
