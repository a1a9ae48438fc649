"""Number of layers to load before computing starts.

Layers are loaded one after the other, in the order they are computed in, while earlier layers are
being computed.

Source: Cache-Craft section 3.4.2.
"""

from __future__ import annotations

import math

_ROUNDING = 1e-9


def preload_depth(num_layers: int, compute_s: float, load_s: float) -> int:
    """Return L_p of eq. 16: the layers to load before computing starts, so that it never waits.

    The result is in [1, num_layers]. It is 1 where computing takes at least as long as loading
    (line 1 of Algorithm 2), or where nothing is loaded. Eq. 16 is rounded up, because with one
    layer less the last layers would not be loaded in time.

    Args:
        num_layers: L, at least 1.
        compute_s: Seconds to compute all layers (T_prefill), finite, 0 or more.
        load_s: Seconds to load all layers (T_load), finite, 0 or more.
    """
    if num_layers < 1:
        raise ValueError(f"num_layers must be at least 1, not {num_layers}")
    if not all(math.isfinite(seconds) and seconds >= 0 for seconds in (compute_s, load_s)):
        raise ValueError("compute_s and load_s must be finite and 0 or more")
    if compute_s >= load_s:
        return 1
    depth = (num_layers - 1) * (1.0 - compute_s / load_s) + 1.0
    return min(num_layers, math.ceil(depth - _ROUNDING * num_layers))
