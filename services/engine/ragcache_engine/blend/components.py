"""The components that a worker needs to blend chunks of other prompts into a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ragcache_core.identity.keys import KVSpace
from ragcache_engine.blend.attention import AttentionObserver
from ragcache_engine.blend.chunk_shift import ChunkShift
from ragcache_engine.blend.recomputer import Recomputer
from ragcache_engine.kv_cache.paged_cache import PagedCache
from ragcache_kv.rotation import KeyRotation, Pairing, read_rope

_CHECKED_POSITIONS = (1, 78, 900)
"""Positions at which our rotation is compared with the model's own."""

_TOLERANCE = 0.02
"""Relative error of the rotated keys. They are rounded to bfloat16 twice, which has about three
decimal digits."""


@dataclass(frozen=True, slots=True)
class BlendComponents:
    """The rotation of the model's keys, its recomputer and its attention observer.

    Only the worker's main thread may use the recomputer and the observer.
    """

    rotation: KeyRotation
    recomputer: Recomputer
    observer: AttentionObserver


def make_blend_components(
    model: torch.nn.Module,
    recomputer: Recomputer,
    cache: PagedCache,
    config: dict[str, Any],
    space: KVSpace,
) -> BlendComponents:
    """Build the components for the model that a vLLM model runner has loaded.

    Args:
        model: The loaded model.
        recomputer: Passes of that model.
        cache: The worker's paged cache.
        config: The model's config.json.
        space: The KV space, which has the dtype.

    Raises:
        ValueError: If the model's keys cannot be moved to another position.
        RagCacheError: The same; both say why.
    """
    rotary = _rotary_embedding(model)
    pairing = Pairing.HALVES if rotary.is_neox_style else Pairing.NEIGHBOURS
    rotation = KeyRotation(read_rope(config, pairing), space.dtype)
    _check_rotation(rotation, rotary, next(model.parameters()).device, cache.shape.dtype)
    recomputer.chunk_shift = ChunkShift(cache, rotation.rope)
    return BlendComponents(rotation, recomputer, AttentionObserver(cache, recomputer))


def _rotary_embedding(model: torch.nn.Module) -> Any:
    """Return the rotary embedding that all layers share. Raises ValueError if they differ."""
    from vllm.model_executor.layers.rotary_embedding.base import (  # noqa: PLC0415
        RotaryEmbeddingBase,
    )

    modules = [module for module in model.modules() if isinstance(module, RotaryEmbeddingBase)]
    found = {repr(module): module for module in modules}
    if len(found) != 1:
        raise ValueError(f"it has {len(found)} kinds of rotary embedding")
    return next(iter(found.values()))


def _check_rotation(
    rotation: KeyRotation, rotary: Any, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise ValueError if the model rotates keys in another way than ``rotation``."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(4, rotation.rope.head_dim, generator=generator).to(device, dtype)

    def rotated_by_model(position: int) -> torch.Tensor:
        positions = torch.full((len(keys),), position, dtype=torch.int64, device=device)
        # The embedding may work in place.
        _, there = rotary.forward_native(positions, keys.clone(), keys.clone())
        return there.reshape(keys.shape).contiguous()  # type: ignore[no-any-return]

    first, *others = _CHECKED_POSITIONS
    for position in others:
        expected = rotated_by_model(position)
        moved = rotation.rotate_keys(rotated_by_model(first), position - first)
        error = float((moved.float() - expected.float()).norm() / expected.float().norm())
        if not error < _TOLERANCE:
            raise ValueError(
                f"it rotates keys in another way than its config.json says (by {error:.2f} of"
                f" their length, {position - first} positions on)"
            )
