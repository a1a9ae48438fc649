"""How a model gets into the pods that read it: the gateway, the retriever and the engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ragcache_operator.builders.pods.environment import EnvValue, FromSecret
from ragcache_operator.builders.pods.pod import Mount
from ragcache_operator.builders.site import MODEL_FOLDER
from ragcache_operator.spec import ModelSpec

HUB_START_S: Final = 1800
"""For weights to come from the hub, which every pod gets for itself."""


def model_environment(model: ModelSpec) -> Mapping[str, EnvValue]:
    """What libraries that read models are told.

    A folder is whole: without being told so, every start would ask the hub about it.
    """
    if model.parsed_source.kind != "hf":
        return {"HF_HUB_OFFLINE": "1"}
    if model.token_secret is None:
        return {}
    return {"HF_TOKEN": FromSecret.of(model.token_secret)}


def model_mounts(model: ModelSpec) -> list[Mount]:
    """The volume it lies on, for a source that is one; always read-only."""
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
