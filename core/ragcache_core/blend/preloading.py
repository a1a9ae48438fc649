"""Preloading of layers: how far loading runs ahead of computing (Cache-Craft §3.4.2).

Layers are loaded one after the other, in the order they are computed in, while others are computed.
Layers are numbered from 0 here, from 1 in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Step:
    """One layer's turn: start the loads of ``preload``, wait, compute ``layer``, let go of it.

    preload: layers whose loads start now; empty once all have. awaited: layers, from 0 on, that are
    loaded before this one is computed: as many as the depth for the first, then those up to itself.
    """

    layer: int
    preload: range
    awaited: int


@dataclass(frozen=True, slots=True)
class Preloading:
    """depth: L_p. wait_s: seconds to load so many. steps: one for each layer (Algorithm 2)."""

    depth: int
    wait_s: float
    steps: tuple[Step, ...]


def preload_depth(num_layers: int, compute_s: float, load_s: float) -> int:
    """L_p of eq. 16: layers to have before computing starts so that it never waits again.

    num_layers: L, 1 or more. compute_s, load_s: seconds for all layers (T_prefill, T_load), finite,
    0 or more. The result is in [1, num_layers]: 1 where computing takes as long as loading or
    longer (line 1 of Algorithm 2), or nothing is to be loaded. Eq. 16 is no whole number as a rule;
    rounded up, as with a layer fewer the last ones would come late.
    """
    if num_layers < 1:
        raise ValueError(f"a model has 1 layer or more, not {num_layers}")
    _check_times((compute_s, load_s))
    if compute_s >= load_s:
        return 1
    depth = (num_layers - 1) * (1.0 - compute_s / load_s) + 1.0
    return min(num_layers, math.ceil(depth - _ROUNDING * num_layers))


def preloading(compute_s: Sequence[float], load_s: Sequence[float]) -> Preloading:
    """Algorithm 2 for layers that need not be alike.

    compute_s, load_s: [num_layers] seconds for each layer, finite, 0 or more; 0 to load where it is
    in place already.

    Eq. 16 says that the layers after the first L_p are loaded while the first L - 1 are computed.
    For layers that differ that is asked of each: layer l, with all before it, is loaded no later
    than the layers before it are computed. Alike layers give eq. 16.

    Lines 3 and 4 preload up to layer i + L_p before layer i is computed, one more than L_p at the
    start. That agrees with the text if they start loads without waiting for them: the one more is
    loaded while layer i is computed. A buffer that layers are read into so holds depth + 1 of them.
    """
    if len(compute_s) != len(load_s) or not compute_s:
        raise ValueError("there are as many layers to load as to compute, 1 or more")
    _check_times(compute_s)
    _check_times(load_s)
    num_layers = len(compute_s)
    loaded = list(accumulate(load_s))
    computed = [0.0, *accumulate(compute_s)]
    late_s = max(end - start for end, start in zip(loaded, computed, strict=False))
    slack = _ROUNDING * loaded[-1]
    depth = 1 + next(layer for layer in range(num_layers) if loaded[layer] >= late_s - slack)
    steps = []
    started = 0
    for layer in range(num_layers):
        upto = max(started, min(layer + depth + 1, num_layers))
        steps.append(Step(layer, range(started, upto), max(depth, layer + 1)))
        started = upto
    return Preloading(depth, loaded[depth - 1], tuple(steps))


def _check_times(seconds: Sequence[float]) -> None:
    if not all(math.isfinite(value) and value >= 0 for value in seconds):
        raise ValueError("seconds are finite and 0 or more")
