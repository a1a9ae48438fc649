"""The connector refuses at start what it does not support. With real vLLM."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.processes import launch_engine, wait_for_engine

pytestmark = pytest.mark.timeout(300)

# In a process of its own, because importing vLLM is slow, logs warnings and cannot be undone.
_RUN = """
import json
from dataclasses import replace
from types import SimpleNamespace
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs
)
from ragcache_core.errors import InvalidInput
from ragcache_core.identity.keys import KVSpace
from ragcache_engine.vllm_interface import requirements
from ragcache_engine.kv_cache.paged_cache import CacheShape
from ragcache_wire.settings import EngineSettings


def error_of(what, *args):
    try:
        what(*args)
    except InvalidInput as error:
        return [error.field, str(error)]
    return None


def config(**changes):
    of = {
        "parallel_config.world_size_across_dp": 1,
        "parallel_config.tensor_parallel_size": 1,
        "parallel_config.decode_context_parallel_size": 1,
        "model_config.hf_config": SimpleNamespace(),
        "model_config.hf_overrides": {},
        "model_config.quantization": None,
        "model_config.model": "org/name",
        "model_config.revision": "main",
        "model_config.code_revision": None,
        "model_config.hf_config_path": None,
        "model_config.config_format": "auto",
        "model_config.model_class_overrides": {},
        "load_config.load_format": "auto",
        "model_config.enable_sleep_mode": False,
        "cache_config.cache_dtype": "auto",
        "kv_transfer_config.kv_role": "kv_both",
        "kv_transfer_config.kv_load_failure_policy": "recompute",
    }
    made = SimpleNamespace(speculative_config=None)
    given = {name.replace("__", "."): value for name, value in changes.items()}
    for name, value in (of | given).items():
        part, _, field = name.rpartition(".")
        if part and not hasattr(made, part):
            setattr(made, part, SimpleNamespace())
        setattr(getattr(made, part) if part else made, field, value)
    return made


def refused(**changes):
    settings = EngineSettings(cachestore="127.0.0.1:9")
    return error_of(requirements.check_config, config(**changes), settings)


def kept(*specs):
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    config = SimpleNamespace(kv_cache_groups=groups)
    return error_of(requirements.check_full_attention, config, 512)


sizes = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
full = FullAttentionSpec(**sizes)
part_full = FullAttentionSpec(**sizes, sliding_window=64)
window = SlidingWindowSpec(**sizes, sliding_window=64)
all_tokens = SlidingWindowSpec(**sizes, sliding_window=512)
latent = MLAAttentionSpec(**sizes)
uniform = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"0": window})
cache = SimpleNamespace(shape=CacheShape(2, 16, 32, torch.bfloat16), num_layers=4)
space = KVSpace("", 4, 2, 32, "bfloat16")
print(json.dumps({
    "nothing": refused(),
    "two ranks": refused(
        parallel_config__world_size_across_dp=2, parallel_config__tensor_parallel_size=2
    ),
    "pipeline": refused(
        parallel_config__world_size_across_dp=4, parallel_config__tensor_parallel_size=2
    ),
    "context": refused(
        parallel_config__world_size_across_dp=2,
        parallel_config__tensor_parallel_size=2,
        parallel_config__decode_context_parallel_size=2,
    ),
    "heads": error_of(requirements.check_ranks, replace(space, num_ranks=3)),
    "a head for each rank": error_of(requirements.check_ranks, replace(space, num_ranks=2)),
    "overrides": refused(model_config__hf_overrides={"rope_theta": 1}),
    "revision": refused(model_config__revision="v2"),
    "commit": refused(model_config__revision="0" * 40),
    "revision of a folder": refused(model_config__model="/", model_config__revision="v2"),
    "offline": refused(model_config__revision=None),
    "revision of code": refused(model_config__code_revision="v2"),
    "config of another model": refused(model_config__hf_config_path="org/other"),
    "own config": refused(model_config__hf_config_path="org/name"),
    "custom config": refused(model_config__config_format="mine"),
    "other class": refused(model_config__model_class_overrides={"A": "b:C"}),
    "pickles": refused(load_config__load_format="pt"),
    "random weights": refused(load_config__load_format="dummy"),
    "streamed": refused(load_config__load_format="runai_streamer"),
    "sleep": refused(model_config__enable_sleep_mode=True),
    "dtype": refused(cache_config__cache_dtype="fp8"),
    "producer": refused(kv_transfer_config__kv_role="kv_producer"),
    "policy": refused(kv_transfer_config__kv_load_failure_policy="fail"),
    "full": kept(full),
    "windows in some layers": kept(part_full),
    "window": kept(window),
    "uniform windows": kept(uniform),
    "windows of all tokens": kept(all_tokens),
    "latent vectors": kept(latent),
    "two groups": kept(full, window),
    "latent attention": refused(model_config__use_mla=True),
    "state": refused(model_config__is_hybrid=True),
    "scales": refused(
        model_config__hf_config=SimpleNamespace(
            quantization_config={"kv_cache_scheme": {"type": "float"}}
        )
    ),
    "layout": error_of(requirements.check_layout, cache, space),
    "other layers": error_of(requirements.check_layout, cache, KVSpace("", 5, 2, 32, "bfloat16")),
}))
"""

ARGUMENTS = "engines[].args"


def test_an_unsupported_configuration_is_refused_with_field_and_fix() -> None:
    argv = [sys.executable, "-c", _RUN]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    expected_errors = {
        "nothing": None,
        "two ranks": None,
        "pipeline": (ARGUMENTS, "spec.engines[].tensorParallel"),
        "context": (ARGUMENTS, "--decode-context-parallel-size"),
        "heads": ("engines[].tensorParallel", "divides 2"),
        "a head for each rank": None,
        "overrides": (ARGUMENTS, "config.json"),
        "revision": (ARGUMENTS, "--revision"),
        "commit": None,
        "revision of a folder": None,
        "offline": None,
        "revision of code": (ARGUMENTS, "--code-revision"),
        "config of another model": (ARGUMENTS, "--hf-config-path"),
        "own config": None,
        "custom config": (ARGUMENTS, "--config-format"),
        "other class": (ARGUMENTS, "--model-class-overrides"),
        "pickles": (ARGUMENTS, "--load-format"),
        "random weights": (ARGUMENTS, "--load-format"),
        "streamed": None,
        "sleep": (ARGUMENTS, "--enable-sleep-mode"),
        "dtype": (ARGUMENTS, "--kv-cache-dtype"),
        "producer": ("kv_role", "kv_both"),
        "policy": ("kv_load_failure_policy", "recompute"),
        "full": None,
        "windows in some layers": None,
        "window": ("model.source", "--disable-sliding-window"),
        "uniform windows": ("model.source", "SlidingWindowSpec"),
        "windows of all tokens": None,
        "latent vectors": ("model.source", "MLAAttentionSpec"),
        "two groups": ("model.source", "in 2 ways"),
        "latent attention": ("model.source", "(MLA)"),
        "state": ("model.source", "Mamba"),
        "scales": ("model.source", "kv_cache_scheme"),
        "layout": None,
        "other layers": ("model.source", "(4, 2, 32, 'bfloat16')"),
    }
    assert found.keys() == expected_errors.keys()
    for case, expected in expected_errors.items():
        if expected is None:
            assert found[case] is None, case
        else:
            assert found[case][0] == expected[0], case
            assert expected[1] in found[case][1], case


_OTHER_VLLM = """
import json, sys
from types import ModuleType
vllm = ModuleType("vllm")  # without anything that the connector imports
sys.modules["vllm"] = vllm
from ragcache_core.errors import InvalidInput
from ragcache_engine import plugin
plugin.vllm_version = lambda: "0.33.0"
plugin.register()  # an engine without the connector starts
try:
    import ragcache_engine.connector
except InvalidInput as error:
    print(json.dumps([error.field, str(error)]))
"""


def test_an_unsupported_vllm_is_refused_before_it_is_imported() -> None:
    argv = [sys.executable, "-c", _OTHER_VLLM]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    field, found = json.loads(done.stdout)
    assert field == "vllm"
    assert "is version 0.33.0" in found
    assert "install 0.31.x or 0.32.x" in found


@pytest.mark.slow
def test_a_model_with_a_sliding_window_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "window"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
    engine = launch_engine(tmp_path, folder, "127.0.0.1:9")
    with pytest.raises(RuntimeError):
        wait_for_engine(engine)
    found = engine.service.log.read_text()
    assert "model.source: has KV of kind SlidingWindowSpec" in found
    assert "--disable-sliding-window" in found
