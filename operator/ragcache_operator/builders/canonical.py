"""Canonical form of quantities, as the API server stores them.

The server stores a CPU of ``0.5`` as ``500m`` and ``2048Mi`` as ``2Gi``. Without the canonical
form, the operator would find a difference.
"""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal

_MILLI = Decimal("1e-3")
_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_DECIMAL = {-3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E"}
_POWERS = {suffix: Decimal(10) ** power for power, suffix in _DECIMAL.items()}
_POWERS |= {"n": Decimal("1e-9"), "u": Decimal("1e-6")}
_POWERS |= {suffix: Decimal(1024) ** power for power, suffix in enumerate(_BINARY)}
_QUANTITY = re.compile(r"([+-]?[0-9.]+)(?:[eE]([+-]?[0-9]+)|([A-Za-z]*))", re.ASCII)


def canonical(quantity: str) -> str:
    """Return the canonical form of a quantity.

    It is an integer with the largest suffix of the same format (binary, decimal or exponent) that
    keeps the value exact. Fractions of a thousandth are rounded up.

    Raises:
        ValueError: The text is not a quantity.
    """
    match = _QUANTITY.fullmatch(quantity)
    if match is None:
        raise ValueError(f"{quantity!r} is not a quantity")
    number, exponent, suffix = Decimal(match[1]), match[2], match[3] or ""
    if suffix not in _POWERS:
        raise ValueError(f"{quantity!r} is not a quantity")
    if exponent is not None:
        return _decimal(number.scaleb(int(exponent)), exponents=True)
    value = number * _POWERS[suffix]
    if suffix in _BINARY[1:] and value == value.to_integral_value() and abs(value) >= 1024:
        return _binary(int(value))
    return _decimal(value, exponents=False)


def _binary(value: int) -> str:
    power = 0
    while value and value % 1024 == 0 and power < len(_BINARY) - 1:
        value //= 1024
        power += 1
    return f"{value}{_BINARY[power]}"


def _decimal(value: Decimal, *, exponents: bool) -> str:
    count, power = int((value / _MILLI).to_integral_value(ROUND_CEILING)), -3
    if count == 0:
        return "0"
    while count % 1000 == 0 and power < max(_DECIMAL):
        count //= 1000
        power += 3
    if exponents:
        return f"{count}e{power}" if power else str(count)
    return f"{count}{_DECIMAL[power]}"
