"""Environment and mounts of the pods that read the model: gateway, retriever and engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ragcache_operator.builders.pods.environment import EnvValue, FromSecret
from ragcache_operator.builders.pods.pod import Mount
from ragcache_operator.builders.site import MODEL_FOLDER
from ragcache_operator.spec import ModelSpec

HUB_START_S: Final = 1800
"""Time for a pod to download weights from the hub."""


def model_environment(model: ModelSpec) -> Mapping[str, EnvValue]:
    """Return variables for the Hugging Face libraries.

    A folder is complete. Without HF_HUB_OFFLINE, the libraries would ask the hub at each start.
    """
    if model.parsed_source.kind != "hf":
        return {"HF_HUB_OFFLINE": "1"}
    if model.token_secret is None:
        return {}
    return {"HF_TOKEN": FromSecret.of(model.token_secret)}


def model_mounts(model: ModelSpec) -> list[Mount]:
    """Return the read-only mount of a source that is a volume."""
    source = model.parsed_source
    match source.kind:
        case "pvc":
            claim = {"claimName": source.claim, "readOnly": True}
            volume = {"persistentVolumeClaim": claim}
        case "image":
            volume = {"image": {"reference": source.value, "pullPolicy": "IfNotPresent"}}
        case _:
            return []
    return [Mount("model", MODEL_FOLDER, volume, read_only=True)]
