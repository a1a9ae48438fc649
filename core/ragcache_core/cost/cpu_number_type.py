"""Which number types a processor multiplies fast."""

from __future__ import annotations

from collections.abc import Set
from typing import Final

_16_BITS: Final = ("bfloat16", "float16")
_FEATURES_FOR_16_BITS: Final = (
    frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"}),
    frozenset({"bf16"}),
)
"""Features of an x86 processor, and of an Arm processor, with which torch multiplies bfloat16."""


def parse_cpu_features(cpu_info: str) -> Set[str] | None:
    """Return the instruction sets of the first processor of ``/proc/cpuinfo``; None without any."""
    for line in cpu_info.splitlines():
        name, _, value = line.partition(":")
        if name.strip().lower() in ("flags", "features"):
            return frozenset(value.split())
    return None


def is_slow_number_type(number_type: str, features: Set[str] | None) -> bool:
    """Whether a processor computes a number type several times slower than float32.

    Without these instructions torch multiplies numbers of 16 bits one at a time: a prompt of a
    thousand tokens takes 17 s in place of 2 s with the bundled model.

    Args:
        number_type: A name like ``bfloat16``.
        features: What ``parse_cpu_features`` returns.
    """
    if number_type not in _16_BITS or features is None:
        return False
    return not any(needed <= features for needed in _FEATURES_FOR_16_BITS)
