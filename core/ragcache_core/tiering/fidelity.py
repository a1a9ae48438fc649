"""What can be done with a variant as it is held: coarser always, finer never."""

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
"""Codecs that lose something, by the mean error that ``bench/codecs.py`` measures on KV of the
bundled model."""

BITS = {Codec.INT4: 4} | dict.fromkeys(FINEST_FIRST[:-1], 8)
"""Bits of a number in a codec that loses something, scales aside."""


@dataclass(frozen=True, slots=True)
class ReEncodingDecision:
    """What follows from what is held and what is wanted.

    re_encode: the precision to hold it in from now on; None: as it is. want_better: it deserves
    more than can be made of it, and the next full computation should replace it.
    """

    re_encode: Precision | None
    want_better: bool


@cache
def decide_re_encoding(held: Precision, wanted: Precision) -> ReEncodingDecision:
    """Go as far towards wanted as held allows, keys and values apart.

    Precision lost does not come back, so a wish for finer changes no byte. Nor does one for another
    codec of the same width: an E4M3 made of INT8 has the errors of both and saves nothing.
    """
    key, better_key = _settle(held.key, wanted.key)
    value, better_value = _settle(held.value, wanted.value)
    target = Precision(key, value)
    return ReEncodingDecision(target if target != held else None, better_key or better_value)


def _settle(held: Codec, wanted: Codec) -> tuple[Codec, bool]:
    if held.lossless:
        # PACKED and NATIVE are the same numbers; only packing saves bytes.
        return (held if wanted is Codec.NATIVE else wanted), False
    if wanted.lossless or FINEST_FIRST.index(wanted) < FINEST_FIRST.index(held):
        return held, True
    return (wanted if BITS[wanted] < BITS[held] else held), False
