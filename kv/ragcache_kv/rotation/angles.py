"""Cosines and sines of a difference in position."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ragcache_kv.codecs.numbers import Floats
from ragcache_kv.rotation.rope import Rope

_HELD = 256
"""Turns kept: every layer of a chunk wants the same one, and chunks come layer by layer."""


@lru_cache(_HELD)
def turn(rope: Rope, delta: int) -> Floats:
    """[2, rotary_dim / 2]: cosines, then sines, of delta tokens. Nobody writes to it.

    Angles are float64, where delta times a float32 frequency is exact: at 100,000 tokens a float32
    angle would be off by as much as bfloat16 rounds.
    """
    angles = np.array(rope.frequencies) * delta
    return np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)
