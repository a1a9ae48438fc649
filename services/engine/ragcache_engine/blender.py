"""What a worker needs to put a prompt together from chunks of other prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ragcache_core.keys import KVSpace
from ragcache_engine.attention import AttentionObserver
from ragcache_engine.loaded_model import loaded_model
from ragcache_engine.paged_cache import PagedCache
from ragcache_engine.recomputing import Recomputer
from ragcache_kv.rotation import KeyRotation, read_rope


@dataclass(frozen=True, slots=True)
class Blender:
    """rotation: of the model's keys. recomputer, observer: for the worker's main thread only."""

    rotation: KeyRotation
    recomputer: Recomputer
    observer: AttentionObserver


def blender(runner: Any, cache: PagedCache, config: dict[str, Any], space: KVSpace) -> Blender:
    """Of the model that a vLLM model runner has loaded.

    config: its config.json. Raises ValueError or RagCacheError, saying why, where the model's keys
    cannot be moved, or its attention is not plain.
    """
    model = loaded_model(runner, cache.shape.block_size)
    recomputer = Recomputer(model)
    rotation = KeyRotation(read_rope(config), space.dtype)
    return Blender(rotation, recomputer, AttentionObserver(cache, recomputer))
