"""What a worker needs to put a prompt together from chunks of other prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ragcache_core.identity.keys import KVSpace
from ragcache_engine.blend.attention import AttentionObserver
from ragcache_engine.blend.recomputer import Recomputer
from ragcache_engine.kv_cache.paged_cache import PagedCache
from ragcache_kv.rotation import KeyRotation, Pairing, read_rope

_PROBED = (1, 78, 900)
"""Positions at which our rotation is compared with the model's own."""

_TOLERANCE = 0.02
"""Of lengths: keys are rounded to bfloat16 twice, which has about three decimal digits."""


@dataclass(frozen=True, slots=True)
class BlendComponents:
    """rotation: of the model's keys. recomputer, observer: for the worker's main thread only."""

    rotation: KeyRotation
    recomputer: Recomputer
    observer: AttentionObserver


def blender(
    model: torch.nn.Module,
    recomputer: Recomputer,
    cache: PagedCache,
    config: dict[str, Any],
    space: KVSpace,
) -> BlendComponents:
    """Of the model that a vLLM model runner has loaded.

    config: its config.json. Raises ValueError or RagCacheError, saying why, where the model's keys
    cannot be moved.
    """
    rotary = _rotary(model)
    pairing = Pairing.HALVES if rotary.is_neox_style else Pairing.NEIGHBOURS
    rotation = KeyRotation(read_rope(config, pairing), space.dtype)
    _compare(rotation, rotary, next(model.parameters()).device, cache.shape.dtype)
    return BlendComponents(rotation, recomputer, AttentionObserver(cache, recomputer))


def _rotary(model: torch.nn.Module) -> Any:
    """The one rotary embedding that all layers share, or have alike. Raises ValueError."""
    from vllm.model_executor.layers.rotary_embedding.base import (  # noqa: PLC0415
        RotaryEmbeddingBase,
    )

    modules = [module for module in model.modules() if isinstance(module, RotaryEmbeddingBase)]
    found = {repr(module): module for module in modules}
    if len(found) != 1:
        raise ValueError(f"it has {len(found)} kinds of rotary embedding")
    return next(iter(found.values()))


def _compare(rotation: KeyRotation, rotary: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Raises ValueError where the model turns keys otherwise than we do."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(4, rotation.rope.head_dim, generator=generator).to(device, dtype)

    def turned(position: int) -> torch.Tensor:
        positions = torch.full((len(keys),), position, dtype=torch.int64, device=device)
        # It may work in place.
        _, there = rotary.forward_native(positions, keys.clone(), keys.clone())
        return there.reshape(keys.shape).contiguous()  # type: ignore[no-any-return]

    first, *others = _PROBED
    for position in others:
        wanted = turned(position)
        moved = rotation.rotate_keys(turned(first), position - first)
        error = float((moved.float() - wanted.float()).norm() / wanted.float().norm())
        if not error < _TOLERANCE:
            raise ValueError(
                f"its keys turn otherwise than its config.json says (by {error:.2f} of their"
                f" length, {position - first} positions on)"
            )
