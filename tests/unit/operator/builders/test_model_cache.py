"""Where engines keep what they downloaded and compiled, by spec.model.cache."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.operator import build, container_of, env_of, pod_of

HUB = {"source": "hf:Qwen/Qwen3-0.6B"}
FOLDERS = {
    "HF_HOME": "/model-cache/huggingface",
    "VLLM_CACHE_ROOT": "/model-cache/vllm",
    "TRITON_CACHE_DIR": "/model-cache/triton",
}


def claims_of(children: list[Any], part: str) -> dict[str, str]:
    """Return the claims that a component's pods may write to, by folder."""
    volumes = {one["name"]: one.get("persistentVolumeClaim") for one in _volumes(children, part)}
    return {
        mount["mountPath"]: claim["claimName"]
        for mount in container_of(children, part)["volumeMounts"]
        if (claim := volumes.get(mount["name"])) and not mount.get("readOnly")
    }


def _volumes(children: list[Any], part: str) -> list[Any]:
    found: list[Any] = pod_of(children, part)["volumes"]
    return found


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_engines_keep_downloads_and_compiled_code_on_the_claim(device: str) -> None:
    model = HUB | {"cache": {"claim": "caches"}}
    children = build(model=model, engines=[{"name": "main", "device": device}])
    assert claims_of(children, "engine-main") == {"/model-cache": "caches"}
    assert env_of(children, "engine-main").items() >= FOLDERS.items()


def test_without_a_claim_they_are_on_the_scratch_volume() -> None:
    children = build(model=HUB)
    assert claims_of(children, "engine-main") == {}
    environment = env_of(children, "engine-main")
    assert environment["HF_HOME"] == "/tmp/huggingface"
    assert not {"VLLM_CACHE_ROOT", "TRITON_CACHE_DIR"} & environment.keys()


def test_no_other_component_may_write_to_the_claim() -> None:
    children = build(model=HUB | {"cache": {"claim": "caches"}})
    for part in ("gateway", "retriever"):
        assert claims_of(children, part) == {}
        assert env_of(children, part)["HF_HOME"] == "/tmp/huggingface"


def test_each_group_has_the_cache_of_its_model() -> None:
    own = {"source": "hf:a/b", "name": "b", "cache": {"claim": "of-b"}}
    engines = [{"name": "main"}, {"name": "b", "model": own}]
    children = build(model=HUB | {"cache": {"claim": "of-a"}}, engines=engines)
    assert claims_of(children, "engine-main") == {"/model-cache": "of-a"}
    assert claims_of(children, "engine-b") == {"/model-cache": "of-b"}


def test_a_claim_whose_name_begins_like_that_of_the_model_is_another_one() -> None:
    model = {"source": "pvc:models-2/llama", "cache": {"claim": "models"}}
    assert claims_of(build(model=model), "engine-main") == {"/model-cache": "models"}
