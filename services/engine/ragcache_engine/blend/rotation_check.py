"""Checks that each layer of the loaded model rotates its keys as its config says.

A token without tokens before it attends only to itself, so what enters each layer is the same at
every position, and only the rotation of its keys differs. Passes compute such tokens at some
positions, and each layer's keys are compared with the rotated keys of position 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ragcache_engine.kv_cache.paged_cache import PagedCache
from ragcache_kv.rotation import KeyRotation, Rope

if TYPE_CHECKING:
    from ragcache_engine.blend.recomputer import Recomputer

_POSITIONS = (0, 1, 78, 900)

_TOKENS = (1, 23, 101, 239)
"""Ids of the tokens that are computed. Any will do. Rounding may send one token to another expert
at another position, and then its keys differ in later layers. So the best of them counts."""

_FIRST_BLOCK = 1
"""vLLM pads with block 0."""

_TOLERANCE, _LATER_TOLERANCE = 0.02, 0.1
"""Relative error of the rotated keys, in the first layer and in later ones. They are rounded to
bfloat16 twice, which has about three decimal digits. Attention sinks carry the error on from layer
to layer. A wrong rotation turns keys by about their length."""


def check_rotation(rope: Rope, recomputer: Recomputer, cache: PagedCache) -> None:
    """Compare the rotation of each layer's keys with ``rope``.

    The passes write to blocks that belong to no request, so call it before the first one.

    Raises:
        ValueError: If a layer rotates keys in another way.
    """
    longest = recomputer.vllm_config.model_config.max_model_len
    positions = [position for position in _POSITIONS if position < longest]
    errors = torch.stack(
        [_errors(rope, _keys(token, positions, recomputer, cache), positions) for token in _TOKENS]
    )
    for index, error in enumerate(errors.amin(0).tolist()):
        if not error < (_LATER_TOLERANCE if index else _TOLERANCE):
            raise ValueError(
                f"its layer {index} rotates keys in another way than its config.json says (by"
                f" {error:.2f} of their length)"
            )


def _keys(
    token: int, positions: Sequence[int], recomputer: Recomputer, cache: PagedCache
) -> torch.Tensor:
    """Compute a token at some positions. Return its keys: [layers, positions, heads, head_dim]."""
    block = [_FIRST_BLOCK]
    keys = []
    for position in positions:
        recomputer.compute_alone(token, block, position)
        keys.append(torch.stack([cache.keys(i, block, 0, 1)[0] for i in range(cache.num_layers)]))
    return torch.stack(keys, dim=1).cpu()


def _errors(rope: Rope, keys: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    """Return the largest relative error of each layer's keys, rotated from the first position."""
    dtype = str(keys.dtype).removeprefix("torch.")
    largest = torch.zeros(len(keys))
    for index, (first, *others) in enumerate(keys):
        rotation = KeyRotation(rope.of_layer(index), dtype)
        for position, expected in zip(positions[1:], others, strict=True):
            moved = rotation.rotate_keys(first.clone(), position).float()
            error = (moved - expected.float()).norm() / expected.float().norm()
            largest[index] = torch.maximum(largest[index], error)
    return largest
