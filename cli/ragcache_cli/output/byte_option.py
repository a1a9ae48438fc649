"""Options that are numbers of bytes."""

from __future__ import annotations

from ragcache_core.errors import InvalidInput
from ragcache_operator.spec.quantity import parse_quantity


def parse_bytes(option: str, text: str) -> int:
    """Return the bytes of a quantity like ``2Gi``. Raises InvalidInput."""
    try:
        num_bytes = parse_quantity(text)
    except ValueError as error:
        raise InvalidInput(option, str(error), "write bytes like 512Mi or 2Gi") from error
    if num_bytes < 0:
        raise InvalidInput(option, f"{text!r} is below 0", "write bytes like 512Mi or 2Gi")
    return num_bytes
