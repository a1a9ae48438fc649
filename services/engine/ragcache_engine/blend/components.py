"""The components that a worker needs to blend chunks of other prompts into a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ragcache_core.identity.keys import KVSpace
from ragcache_engine.blend.attention import AttentionObserver
from ragcache_engine.blend.chunk_shift import ChunkShift
from ragcache_engine.blend.recomputer import Recomputer
from ragcache_engine.blend.rotation_check import check_rotation
from ragcache_engine.kv_cache.paged_cache import PagedCache
from ragcache_kv.rotation import KeyRotation, Pairing, read_rope


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
        cache: The worker's paged cache, without KV of requests.
        config: The settings of the model's decoder, as vLLM has read them.
        space: The KV space, which has the dtype.

    Raises:
        ValueError: If the model's keys cannot be moved to another position.
        RagCacheError: The same; both say why.
    """
    max_length = recomputer.vllm_config.model_config.max_model_len
    rope = read_rope(config, _pairing(model), max_length)
    if rope.by_layer and len(rope.by_layer) != cache.num_layers:
        raise ValueError(f"it has {cache.num_layers} layers, its config {len(rope.by_layer)}")
    observer = AttentionObserver(cache, recomputer)
    check_rotation(rope, recomputer, cache)
    recomputer.chunk_shift = ChunkShift(cache, rope)
    return BlendComponents(KeyRotation(rope, space.dtype), recomputer, observer)


def _pairing(model: torch.nn.Module) -> Pairing | None:
    """Return which numbers of a key form a pair; None: the model's modules do not say it.

    Raises:
        ValueError: If layers differ.
    """
    found = {
        bool(module.is_neox_style)
        for module in model.modules()
        if hasattr(module, "is_neox_style") and hasattr(module, "rotary_dim")
    }
    if len(found) > 1:
        raise ValueError("its layers pair the numbers of a key in several ways")
    if not found:
        return None
    return Pairing.HALVES if found.pop() else Pairing.NEIGHBOURS
