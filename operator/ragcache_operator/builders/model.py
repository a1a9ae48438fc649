"""Environment and mounts of the pods that read the model, and the size of its weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from ragcache_operator.builders.environment import EnvValue, FromSecret
from ragcache_operator.builders.placement import MODEL_CACHE_FOLDER, model_folder
from ragcache_operator.builders.pod import Mount
from ragcache_operator.spec.quantity import parse_quantity
from ragcache_operator.spec.ragcache import ModelSpec


def model_environment(*models: ModelSpec) -> Mapping[str, EnvValue]:
    """Return variables for the Hugging Face libraries.

    A folder is complete. Without HF_HUB_OFFLINE, the libraries would ask the hub at each start.
    """
    if all(model.parsed_source.kind != "hf" for model in models):
        return {"HF_HUB_OFFLINE": "1"}
    tokens = [model.token_secret for model in models if model.token_secret is not None]
    return {"HF_TOKEN": FromSecret.of(tokens[0])} if tokens else {}


def model_mounts(model: ModelSpec, number: int = 0) -> list[Mount]:
    """Return the read-only mount of a source that is a volume.

    Args:
        number: Number of the model in a pod that reads several.
    """
    source = model.parsed_source
    match source.kind:
        case "pvc":
            claim = {"claimName": source.claim, "readOnly": True}
            volume = {"persistentVolumeClaim": claim}
        case "image":
            volume = {"image": {"reference": source.value, "pullPolicy": "IfNotPresent"}}
        case _:
            return []
    name = f"model-{number}" if number else "model"
    return [Mount(name, model_folder(number), volume, read_only=True)]


def model_cache_mounts(model: ModelSpec) -> list[Mount]:
    """Return the writable mount of the claim for downloads and compiled code, if there is one."""
    if model.cache is None:
        return []
    volume = {"persistentVolumeClaim": {"claimName": model.cache.claim}}
    return [Mount("model-cache", MODEL_CACHE_FOLDER, volume)]


def model_cache_environment(model: ModelSpec) -> Mapping[str, EnvValue]:
    """Return variables that put the caches of vLLM and its libraries on the claim.

    vLLM keeps what torch.compile made below its own root, by a hash of model and configuration.
    """
    if model.cache is None:
        return {}
    return {
        "HF_HOME": f"{MODEL_CACHE_FOLDER}/huggingface",
        "VLLM_CACHE_ROOT": f"{MODEL_CACHE_FOLDER}/vllm",
        "TRITON_CACHE_DIR": f"{MODEL_CACHE_FOLDER}/triton",
    }


_BUNDLED_BYTES: Final = {"smollm2": 269_060_552, "tinyrag": 5_369_152}
_PARAMETERS: Final = re.compile(
    r"(?<![a-z0-9.])(?:([1-9][0-9]?)x)?([0-9]{1,4}(?:[._][0-9]{1,3})?)([bm])"
    r"(?![a-z0-9]|[-_ ]?(?:tokens?|steps)(?![a-z]))",
    re.ASCII | re.IGNORECASE,
)
"""A number of parameters in a name: 8B, 0.6B, 1_8b, 135M, or experts like 8x7B.

A number before ``-tokens`` or ``-steps`` tells how the model was trained.
"""
_UNITS: Final = {"b": 10**9, "m": 10**6}


def weights_bytes(model: ModelSpec) -> int:
    """Return the size of the weights in memory, in bytes. 0 if nothing tells it.

    The operator reads no volume and asks no hub. Without ``spec.model.weights`` the size of a
    model that is not bundled is a guess from the number of parameters in its name. An engine whose
    guess was too low to start reports the real size (``ragcache_engine.start``). Nothing corrects a
    guess that is too high: the pods request more memory than they use, and may fit on no node.
    """
    if model.weights is not None:
        return parse_quantity(model.weights)
    source = model.parsed_source
    if source.kind == "bundled":
        stored_bytes = _BUNDLED_BYTES[source.value]
        # Both are stored as bfloat16.
        return stored_bytes * 2 if model.dtype == "float32" else stored_bytes
    return _guess_parameters(source.value) * (4 if model.dtype == "float32" else 2)


def _guess_parameters(name: str) -> int:
    """Return the first number of parameters in the last part of a path; 0 if there is none.

    Later numbers often tell something else, such as the tokens of the training.
    """
    found = _PARAMETERS.search(name.partition("@")[0].rstrip("/").rpartition("/")[2])
    if found is None:
        return 0
    experts, number, unit = found.groups()
    return int(int(experts or 1) * float(number.replace("_", ".")) * _UNITS[unit.lower()])
