"""Parse and format Kubernetes quantities: ``512Mi``, ``2G``, ``1.5Gi``, ``1e9``, ``250m``."""

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
_MAX_VALUE = 2**63 - 1
_MAX_CHARS = 64


def parse_quantity(text: str) -> int:
    """Return the value of a quantity, rounded up to an integer as Kubernetes does.

    Raises:
        ValueError: The text is not a quantity, or its value needs more than 63 bits.
    """
    return _parse(text, 1)


def parse_millis(text: str) -> int:
    """Return a quantity in thousandths, the unit of CPU cores, rounded up.

    Raises:
        ValueError: The text is not a quantity, or its value needs more than 63 bits.
    """
    return _parse(text, 1000)


def _parse(text: str, factor: int) -> int:
    """Return a quantity times a factor, rounded up."""
    match = _QUANTITY.fullmatch(text) if len(text) <= _MAX_CHARS else None
    if match is None:
        raise ValueError(f"{text!r} is not a quantity")
    number = Decimal(match["number"])
    if match["exponent"] is not None:
        value = number.scaleb(int(match["exponent"]))
    else:
        value = number * _SUFFIXES[match["suffix"] or ""]
    rounded = int((value * factor).to_integral_value(ROUND_CEILING))
    if abs(rounded) > _MAX_VALUE * factor:
        raise ValueError(f"{text!r} needs more than 63 bits")
    return rounded


def format_bytes(num_bytes: int) -> str:
    """Format a number of bytes with the largest binary suffix that divides it exactly."""
    for suffix in ("Ei", "Pi", "Ti", "Gi", "Mi", "Ki"):
        unit = int(_SUFFIXES[suffix])
        if num_bytes and num_bytes % unit == 0:
            return f"{num_bytes // unit}{suffix}"
    return str(num_bytes)
