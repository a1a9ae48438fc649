"""Cosines and sines of a difference of positions."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ragcache_kv.codecs.numbers import Floats
from ragcache_kv.rotation.rope import Rope

_CACHED = 256
"""Cached tables: all layers of a chunk need the same one, and chunks arrive layer by layer."""


@lru_cache(_CACHED)
def cos_sin(rope: Rope, delta: int) -> Floats:
    """Return the cosines and sines of a difference of delta tokens. Callers must not write to them.

    The angles are float64, where delta times a float32 frequency is exact. At 100,000 tokens the
    error of a float32 angle would be as large as the rounding of bfloat16.

    Returns:
        [2, rotary_dim / 2] float32: cosines, then sines.
    """
    angles = np.array(rope.frequencies) * delta
    return np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)
