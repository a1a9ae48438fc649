"""Chooses the number type of a model that runs on this machine's processor."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Final

from ragcache_core.cost.cpu_number_type import is_slow_number_type, parse_cpu_features
from ragcache_operator.spec.ragcache import ModelSpec, RagCache

_CPU_INFO: Final = Path("/proc/cpuinfo")


def read_cpu_features(file: Path = _CPU_INFO) -> Set[str] | None:
    """Return the instruction sets of the first processor, or None if the system does not say."""
    try:
        return parse_cpu_features(file.read_text())
    except OSError:
        return None


def use_fast_number_type(cache: RagCache, features: Set[str] | None) -> RagCache:
    """Return the object with a number type that this processor computes fast.

    For auto, vLLM takes 16 bits. Where float32 is faster, the weights then need twice the memory. A
    ``dtype`` other than auto is the user's decision and stays. GPUs compute 16 bits fast.

    Args:
        features: What ``read_cpu_features`` returns.
    """
    on_gpu = any(engine.device == "cuda" for engine in cache.spec.engines)
    if on_gpu or not is_slow_number_type("bfloat16", features):
        return cache
    engines = tuple(
        one if one.model is None else one.model_copy(update={"model": _fast(one.model)})
        for one in cache.spec.engines
    )
    changes = {"model": _fast(cache.spec.model), "engines": engines}
    return cache.model_copy(update={"spec": cache.spec.model_copy(update=changes)})


def _fast(model: ModelSpec) -> ModelSpec:
    return model if model.dtype != "auto" else model.model_copy(update={"dtype": "float32"})
