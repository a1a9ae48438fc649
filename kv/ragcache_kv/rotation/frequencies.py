"""The frequencies of a model's rotation: radians per token for each pair of a key's numbers.

They are computed in float32 where vLLM does so (``model_executor/layers/rotary_embedding``), since
its rounding belongs to the model. Over 100,000 tokens an exact frequency would drift by 0.01 from
the rounded one. The powers are rounded from float64, which equals torch but for a few last bits.

Each result is [rotary_dim / 2] in float64, so its product with a number of tokens is exact.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ragcache_kv.codecs.numbers import Floats

Frequencies = NDArray[np.float64]


def plain(theta: float, rotary_dim: int) -> Frequencies:
    """Return RoPE as published: theta ^ (-2j / rotary_dim)."""
    return _plain(theta, rotary_dim).astype(np.float64)


def linear(theta: float, rotary_dim: int, factor: float) -> Frequencies:
    """Return RoPE with positions divided by factor."""
    return np.divide(plain(theta, rotary_dim), factor)


def llama3(
    theta: float,
    rotary_dim: int,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_positions: float,
) -> Frequencies:
    """Return Llama 3.1 scaling: long waves divided by factor, short ones not, a ramp between."""
    own = _plain(theta, rotary_dim)
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


def ntk(theta: float, rotary_dim: int, factor: float, mixed_b: float | None) -> Frequencies:
    """Return fixed NTK scaling; with mixed_b the mixed one (kexue.fm/archives/9706)."""
    if mixed_b is None:
        own = _plain(theta * factor, rotary_dim)
        return (own / np.float32(factor ** (2 / rotary_dim))).astype(np.float64)
    half = rotary_dim // 2
    exponent = np.log(np.float32(factor)) / np.float32(half**mixed_b)
    grown = np.arange(1, half + 1, dtype=np.float32) ** np.float32(mixed_b)
    mixed: Floats = _plain(theta, rotary_dim) / np.exp(exponent * grown)
    return mixed.astype(np.float64)


def yarn(
    theta: float,
    rotary_dim: int,
    factor: float,
    original_max_positions: float,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> Frequencies:
    """Return YaRN scaling. Stored keys already contain its factor of cosine and sine."""
    low = _turning(beta_fast, theta, rotary_dim, original_max_positions)
    high = _turning(beta_slow, theta, rotary_dim, original_max_positions)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    high = high + 0.001 if low == high else high
    pairs = np.arange(rotary_dim // 2, dtype=np.float32)
    ramp = np.clip((pairs - np.float32(low)) / np.float32(high - low), np.float32(0), np.float32(1))
    own = 1 - ramp
    powers = _powers(theta, rotary_dim)
    extrapolated, interpolated = 1 / powers, 1 / (np.float32(factor) * powers)
    mixed: Floats = interpolated * (1 - own) + extrapolated * own
    return mixed.astype(np.float64)


def _turning(turns: float, theta: float, rotary_dim: int, max_positions: float) -> float:
    """Return the (fractional) index of the pair with so many turns within max_positions."""
    return rotary_dim * math.log(max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))


def _plain(theta: float, rotary_dim: int) -> Floats:
    return np.float32(1) / _powers(theta, rotary_dim)


def _powers(theta: float, rotary_dim: int) -> Floats:
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    return np.power(np.float64(np.float32(theta)), exponents.astype(np.float64)).astype(np.float32)
