"""Names everything of vLLM that the plugin imports, overrides, replaces or reads.

It reads vLLM's source, so it takes no import of vLLM. It runs with each version that the plugin
supports: what a version lacks or calls otherwise is found here by name, before an engine fails.
"""

from __future__ import annotations

import ast
import functools
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
ENGINE = ROOT / "services/engine/ragcache_engine"

MEMBERS = {
    "vllm.v1.worker.worker_base.WorkerBase": ("__init__", "model_runner"),
    "vllm.v1.engine.core.EngineCore": ("preprocess_add_request",),
    "vllm.v1.core.block_pool.BlockPool": (
        *("enable_caching", "enable_kv_cache_events", "hash_block_size"),
        *("get_cached_block", "take_events"),
    ),
    "vllm.v1.request.Request": (
        *("_block_hasher", "block_hashes", "kv_transfer_params", "lora_request"),
        *("num_computed_tokens", "prompt_token_ids", "request_id", "sampling_params"),
    ),
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": (
        *("_model_forward", "attn_groups", "device", "model", "model_config"),
        *("supports_mm_inputs", "vllm_config"),
    ),
    "vllm.v1.worker.utils.AttentionGroup": (*("backend", "get_metadata_builder", "layer_names"),),
    "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl": (
        *("do_kv_cache_update", "forward", "scale"),
    ),
    "vllm.v1.attention.backend.AttentionMetadataBuilder": ("build", "kv_cache_spec"),
}
"""By class: members that the plugin replaces or reads."""

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1"


def imports() -> list[tuple[str, str]]:
    """Return the module and the name of each import of vLLM in the engine's part."""
    return sorted(
        {
            (node.module, alias.name)
            for source in ENGINE.rglob("*.py")
            for node in ast.walk(ast.parse(source.read_text()))
            if isinstance(node, ast.ImportFrom)
            and node.module is not None
            and node.module.split(".")[0] == "vllm"
            for alias in node.names
        }
    )


@functools.cache
def module_of(name: str) -> ast.Module:
    """Return the source of a module of vLLM, without running it."""
    package = find_spec("vllm")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent.joinpath(*name.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


def class_of(path: str) -> ast.ClassDef:
    module, _, name = path.rpartition(".")
    [found] = [
        node
        for node in module_of(module).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    return found


def members_of(found: ast.ClassDef) -> set[str]:
    """Return the methods, fields and attributes of a class of its own."""
    names = set()
    for node in ast.walk(found):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def parameters_of(found: ast.ClassDef) -> dict[str, list[str]]:
    return {
        node.name: [
            one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        ]
        for node in found.body
        if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize(("module", "name"), imports())
def test_what_is_imported_is_defined(module: str, name: str) -> None:
    defined = set()
    for node in ast.walk(module_of(module)):
        match node:
            case ast.ClassDef(name=one) | ast.FunctionDef(name=one) | ast.Name(id=one):
                defined.add(one)
            case ast.alias(name=one, asname=other):
                defined.add(other or one)
    assert name in defined or module_of(f"{module}.{name}")


@pytest.mark.parametrize("path", MEMBERS)
def test_members_that_are_replaced_or_read_are_there(path: str) -> None:
    assert set(MEMBERS[path]) - members_of(class_of(path)) == set()


def test_the_connector_has_vllms_methods_with_their_parameters() -> None:
    ours = next(
        node
        for node in ast.parse((ENGINE / "connector.py").read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "RagCacheConnector"
    )
    theirs = parameters_of(class_of(CONNECTOR))
    differ = {
        name: (theirs.get(name), parameters)
        for name, parameters in parameters_of(ours).items()
        if not name.startswith("_") and theirs.get(name) != parameters
    }
    assert differ == {}


def test_the_connector_implements_what_vllm_demands() -> None:
    ours = parameters_of(
        next(
            node
            for node in ast.parse((ENGINE / "connector.py").read_text()).body
            if isinstance(node, ast.ClassDef) and node.name == "RagCacheConnector"
        )
    )
    demanded = {
        node.name
        for node in class_of(CONNECTOR).body
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(one).endswith("abstractmethod") for one in node.decorator_list)
    }
    assert demanded
    assert demanded <= ours.keys()
