"""The frequencies of a model's rotation: radians per token for each pair of a key's numbers.

They are computed in float32 where vLLM does so (``model_executor/layers/rotary_embedding``), since
its rounding belongs to the model. Over 100,000 tokens an exact frequency would drift by 0.01 from
the rounded one. The powers are rounded from float64, which equals torch but for a few last bits.

Each result is [rotary_dim / 2] in float64, so its product with a number of tokens is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ragcache_kv.codecs.numbers import Floats

Frequencies = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PlainRope:
    """RoPE as published, which scalings change: theta ^ (-2j / rotary_dim)."""

    theta: float
    rotary_dim: int

    def powers(self) -> Floats:
        """Return theta ^ (2j / rotary_dim)."""
        exponents = np.arange(0, self.rotary_dim, 2, dtype=np.float32) / np.float32(self.rotary_dim)
        theta = np.float64(np.float32(self.theta))
        return np.power(theta, exponents.astype(np.float64)).astype(np.float32)

    def frequencies(self) -> Floats:
        """Return the frequencies."""
        return np.float32(1) / self.powers()


def plain(rope: PlainRope) -> Frequencies:
    """Return RoPE without scaling."""
    return rope.frequencies().astype(np.float64)


def linear(rope: PlainRope, factor: float) -> Frequencies:
    """Return RoPE with positions divided by factor."""
    return np.divide(plain(rope), factor)


def divided(rope: PlainRope, factors: Sequence[float]) -> Frequencies:
    """Return LongRoPE: each frequency divided by a factor of its own, [rotary_dim / 2].

    Source: LongRoPE (arXiv 2402.13753), section 3.
    """
    scaled: Floats = np.float32(1) / (np.array(factors, np.float32) * rope.powers())
    return scaled.astype(np.float64)


def llama3(
    rope: PlainRope,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_positions: float,
) -> Frequencies:
    """Return Llama 3.1 scaling: long waves divided by factor, short ones not, a ramp between."""
    own = rope.frequencies()
    waves = np.float32(2 * math.pi) / own
    span = high_freq_factor - low_freq_factor
    smooth = (
        (np.float32(original_max_positions) / waves - np.float32(low_freq_factor))
        / np.float32(span)
        if span
        else np.zeros_like(own)
    )
    slow = own / np.float32(factor)
    between = (1 - smooth) * own / np.float32(factor) + smooth * own
    result = np.where(waves > original_max_positions / low_freq_factor, slow, between)
    short = waves < original_max_positions / high_freq_factor
    return np.where(short, own, result).astype(np.float64)


def ntk(rope: PlainRope, factor: float, mixed_b: float | None) -> Frequencies:
    """Return fixed NTK scaling; with mixed_b the mixed one (kexue.fm/archives/9706)."""
    if mixed_b is None:
        own = PlainRope(rope.theta * factor, rope.rotary_dim).frequencies()
        return (own / np.float32(factor ** (2 / rope.rotary_dim))).astype(np.float64)
    half = rope.rotary_dim // 2
    exponent = np.log(np.float32(factor)) / np.float32(half**mixed_b)
    grown = np.arange(1, half + 1, dtype=np.float32) ** np.float32(mixed_b)
    mixed: Floats = rope.frequencies() / np.exp(exponent * grown)
    return mixed.astype(np.float64)


def yarn(
    rope: PlainRope,
    factor: float,
    original_max_positions: float,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> Frequencies:
    """Return YaRN scaling. Stored keys already contain its factor of cosine and sine."""
    low = _turning(beta_fast, rope, original_max_positions)
    high = _turning(beta_slow, rope, original_max_positions)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    high = high + 0.001 if low == high else high
    pairs = np.arange(rope.rotary_dim // 2, dtype=np.float32)
    ramp = np.clip((pairs - np.float32(low)) / np.float32(high - low), np.float32(0), np.float32(1))
    own = 1 - ramp
    powers = rope.powers()
    extrapolated, interpolated = 1 / powers, 1 / (np.float32(factor) * powers)
    mixed: Floats = interpolated * (1 - own) + extrapolated * own
    return mixed.astype(np.float64)


def _turning(turns: float, rope: PlainRope, max_positions: float) -> float:
    """Return the (fractional) index of the pair with so many turns within max_positions."""
    logarithm = math.log(max_positions / (turns * 2 * math.pi))
    return rope.rotary_dim * logarithm / (2 * math.log(rope.theta))
