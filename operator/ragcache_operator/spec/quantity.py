"""Parse and format Kubernetes quantities: ``512Mi``, ``2G``, ``1.5Gi``, ``1e9``, ``250m``."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal
from typing import Final

_BINARY: Final = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_DECIMAL: Final = {-3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E"}
_UNITS: Final = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    **{suffix: Decimal(10) ** power for power, suffix in _DECIMAL.items()},
    **{suffix: Decimal(1024) ** power for power, suffix in enumerate(_BINARY)},
}
_QUANTITY: Final = re.compile(
    r"(?P<number>[+-]?(?:\d+(?:\.\d*)?|\.\d+))"
    r"(?:(?P<suffix>[numkMGTPE]|[KMGTPE]i)|[eE](?P<exponent>[+-]?\d{1,2}))?",
    re.ASCII,
)
_MAX_VALUE: Final = 2**63 - 1
_MAX_CHARS: Final = 64


def parse_quantity(text: str) -> int:
    """Return the value of a quantity, rounded up to an integer as Kubernetes does.

    Raises:
        ValueError: The text is not a quantity, or its value needs more than 63 bits.
    """
    return _bounded(text, 1)


def parse_millis(text: str) -> int:
    """Return a quantity in thousandths, the unit of CPU cores, rounded up.

    Raises:
        ValueError: The text is not a quantity, or its value needs more than 63 bits.
    """
    return _bounded(text, 1000)


def canonical(text: str) -> str:
    """Return a quantity as the API server stores it: ``0.5`` is ``500m``, ``2048Mi`` is ``2Gi``.

    It is an integer with the largest suffix of the same format (binary, decimal or exponent) that
    keeps the value exact. Fractions of a thousandth are rounded up. Without the canonical form, the
    operator would find a difference.

    Raises:
        ValueError: The text is not a quantity.
    """
    value, match = _parse(text)
    is_binary = match["suffix"] in _BINARY[1:]
    if is_binary and value == value.to_integral_value() and abs(value) >= 1024:
        count, power = _divided(int(value), 1024, len(_BINARY) - 1)
        return f"{count}{_BINARY[power]}"
    count, power = _divided(int((value * 1000).to_integral_value(ROUND_CEILING)), 1000, 7)
    power = 3 * power - 3
    if count == 0:
        return "0"
    if match["exponent"] is not None:
        return f"{count}e{power}" if power else str(count)
    return f"{count}{_DECIMAL[power]}"


def format_bytes(num_bytes: int) -> str:
    """Format a number of bytes with the largest binary suffix that divides it exactly."""
    count, power = _divided(num_bytes, 1024, len(_BINARY) - 1)
    return f"{count}{_BINARY[power]}"


def _parse(text: str) -> tuple[Decimal, re.Match[str]]:
    match = _QUANTITY.fullmatch(text) if len(text) <= _MAX_CHARS else None
    if match is None:
        raise ValueError(f"{text!r} is not a quantity")
    number = Decimal(match["number"])
    if match["exponent"] is not None:
        return number.scaleb(int(match["exponent"])), match
    return number * _UNITS[match["suffix"] or ""], match


def _bounded(text: str, factor: int) -> int:
    """Return a quantity times a factor, rounded up."""
    rounded = int((_parse(text)[0] * factor).to_integral_value(ROUND_CEILING))
    if abs(rounded) > _MAX_VALUE * factor:
        raise ValueError(f"{text!r} needs more than 63 bits")
    return rounded


def _divided(count: int, base: int, most: int) -> tuple[int, int]:
    """Divide a number by a base while it divides exactly. Return the rest and the times."""
    power = 0
    while count and count % base == 0 and power < most:
        count //= base
        power += 1
    return count, power
