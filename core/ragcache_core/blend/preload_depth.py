"""Preloading of layers: how far loading runs ahead of computing (Cache-Craft §3.4.2).

Layers are loaded one after the other, in the order they are computed in, while others are computed.
"""

from __future__ import annotations

import math

_ROUNDING = 1e-9


def preload_depth(num_layers: int, compute_s: float, load_s: float) -> int:
    """L_p of eq. 16: layers to have before computing starts so that it never waits again.

    num_layers: L, 1 or more. compute_s, load_s: seconds for all layers (T_prefill, T_load), finite,
    0 or more. The result is in [1, num_layers]: 1 where computing takes as long as loading or
    longer (line 1 of Algorithm 2), or nothing is to be loaded. Eq. 16 is no whole number as a rule;
    rounded up, as with a layer fewer the last ones would come late.
    """
    if num_layers < 1:
        raise ValueError(f"a model has 1 layer or more, not {num_layers}")
    if not all(math.isfinite(seconds) and seconds >= 0 for seconds in (compute_s, load_s)):
        raise ValueError("seconds are finite and 0 or more")
    if compute_s >= load_s:
        return 1
    depth = (num_layers - 1) * (1.0 - compute_s / load_s) + 1.0
    return min(num_layers, math.ceil(depth - _ROUNDING * num_layers))
