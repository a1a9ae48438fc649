"""Quantities as Kubernetes writes them: ``512Mi``, ``2G``, ``1.5Gi``, ``1e9``, ``250m``."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal

_SUFFIXES = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    **{suffix: Decimal(1000) ** (i + 1) for i, suffix in enumerate(("k", "M", "G", "T", "P", "E"))},
    **{f"{suffix}i": Decimal(1024) ** (i + 1) for i, suffix in enumerate("KMGTPE")},
}
_QUANTITY = re.compile(
    r"(?P<number>[+-]?(?:\d+(?:\.\d*)?|\.\d+))"
    r"(?:(?P<suffix>[numkMGTPE]|[KMGTPE]i)|[eE](?P<exponent>[+-]?\d{1,2}))?",
    re.ASCII,
)
_LARGEST = 2**63 - 1
_LONGEST = 64


def parse_quantity(text: str) -> int:
    """Value of a quantity, fractions rounded up as Kubernetes does.

    Raises ValueError for what Kubernetes would not read and for values beyond 63 bits.
    """
    return _whole(text, 1)


def parse_millis(text: str) -> int:
    """Thousandths of a quantity, the unit of cores. Raises ValueError as parse_quantity does."""
    return _whole(text, 1000)


def _whole(text: str, units: int) -> int:
    """How many units of 1/units a quantity is, rounded up."""
    match = _QUANTITY.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        raise ValueError(f"{text!r} is no quantity")
    number = Decimal(match["number"])
    if match["exponent"] is not None:
        value = number.scaleb(int(match["exponent"]))
    else:
        value = number * _SUFFIXES[match["suffix"] or ""]
    whole = int((value * units).to_integral_value(ROUND_CEILING))
    if abs(whole) > _LARGEST * units:
        raise ValueError(f"{text!r} is beyond 63 bits")
    return whole


def format_bytes(num_bytes: int) -> str:
    """Quantity of a number of bytes, exact, in the largest binary unit that divides it."""
    for suffix in ("Ei", "Pi", "Ti", "Gi", "Mi", "Ki"):
        unit = int(_SUFFIXES[suffix])
        if num_bytes and num_bytes % unit == 0:
            return f"{num_bytes // unit}{suffix}"
    return str(num_bytes)
