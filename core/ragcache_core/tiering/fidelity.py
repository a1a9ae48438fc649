"""Which re-encodings a stored value allows: always to a coarser codec, never to a finer one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ragcache_core.identity.variant import Codec, Precision

FINEST_FIRST = (
    Codec.INT8,
    Codec.E4M3,
    Codec.E5M2,
    Codec.GSE8_125,
    Codec.GSE8_134,
    Codec.GSE8,
    Codec.INT4,
)
"""Lossy codecs by the mean error that ``bench/codecs.py`` measures on KV of the bundled model."""

BITS = {Codec.INT4: 4} | dict.fromkeys(FINEST_FIRST[:-1], 8)
"""Bits per number of each lossy codec, without scales."""


@dataclass(frozen=True, slots=True)
class ReEncodingDecision:
    """What to do with a stored value.

    Attributes:
        re_encode: The new precision. None: no change.
        wants_higher_precision: The policy gives it more precision than re-encoding can restore. The
            next full computation should replace it.
    """

    re_encode: Precision | None
    wants_higher_precision: bool


@cache
def decide_re_encoding(stored: Precision, assigned: Precision) -> ReEncodingDecision:
    """Move from the stored precision towards the assigned one as far as possible.

    Keys and values are decided separately. Lost precision cannot be restored, so a finer assignment
    changes nothing. Another codec of the same width changes nothing either: E4M3 made from INT8
    would have the errors of both and save nothing.
    """
    key, wants_key = _decide(stored.key, assigned.key)
    value, wants_value = _decide(stored.value, assigned.value)
    target = Precision(key, value)
    return ReEncodingDecision(target if target != stored else None, wants_key or wants_value)


def _decide(stored: Codec, assigned: Codec) -> tuple[Codec, bool]:
    if stored.lossless:
        # PACKED and NATIVE have the same numbers, but PACKED has fewer bytes.
        return (stored if assigned is Codec.NATIVE else assigned), False
    if assigned.lossless or FINEST_FIRST.index(assigned) < FINEST_FIRST.index(stored):
        return stored, True
    return (assigned if BITS[assigned] < BITS[stored] else stored), False
