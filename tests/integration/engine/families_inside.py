"""Checks in a vLLM engine whether chunks of several model families can be blended.

``python -m tests.integration.engine.families_inside FOLDER`` makes small models there and prints
one JSON object.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "vocab_size": 384,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 383,
}

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama, scaled as llama 3": {
        "model_type": "llama",
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    },
    "llama, linear": {
        "model_type": "llama",
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
    "mistral": {
        "model_type": "mistral",
        "num_key_value_heads": 1,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "qwen 2, yarn": {
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    },
    "qwen 3": {
        "model_type": "qwen3",
        "num_key_value_heads": 2,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "mistral, sliding window": {
        "model_type": "mistral",
        "num_key_value_heads": 2,
        "sliding_window": 64,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}

CHUNK, SHIFT = 90, 131


def inside(worker: Any, config: dict[str, Any], first: list[int], second: list[int]) -> Any:
    """Return findings of a worker that has just prefilled second, which ends with first's chunk."""
    import torch

    from ragcache_core.identity.keys import KVSpace
    from ragcache_engine.blend.components import make_blend_components
    from ragcache_engine.blend.recomputer import Recomputer, access_model
    from ragcache_engine.kv_cache.paged_cache import PagedCache

    runner = worker.model_runner
    [[group]] = runner.attn_groups
    layers = runner.vllm_config.compilation_config.static_forward_context
    cache = PagedCache({name: layers[name] for name in group.layer_names}, runner.device)
    shape = cache.shape
    space = KVSpace("", cache.num_layers, shape.num_kv_heads, shape.head_dim, "bfloat16")
    try:
        recomputer = Recomputer(access_model(runner, shape.block_size))
        components = make_blend_components(runner.model, recomputer, cache, config, space)
    except Exception as refused:
        return {"refused": str(refused)}

    def table(number: int) -> list[int]:
        return [20 * number + i for i in range(-(-len(second) // shape.block_size))]

    def error(found: torch.Tensor, expected: torch.Tensor) -> float:
        return float((found.float() - expected.float()).norm() / expected.float().norm())

    own = runner.input_batch.block_table[0].get_numpy_array()[0]
    prefilled = cache.read(own[: len(table(1))].tolist(), 0, len(second))
    components.recomputer.recompute(second, table(1), [range(len(second))])
    computed = cache.read(table(1), 0, len(second))
    components.recomputer.recompute(first, table(2), [range(len(first))])
    chunk = cache.read(table(2), len(first) - CHUNK, len(first))
    # Keys of the first layer depend only on their token and position.
    there = computed[:1, :, -CHUNK:].contiguous()
    here = chunk[:1].contiguous()
    unmoved = error(here[:, 0], there[:, 0])
    components.rotation.rotate_part(here, SHIFT)
    return {
        "whole_equals_prefill": bool(torch.equal(computed, prefilled)),
        "moved_error": error(here[:, 0], there[:, 0]),
        "unmoved_error": unmoved,
        "values_equal": bool(torch.equal(here[:, 1], there[:, 1])),
    }


def make(folder: Path, family: Mapping[str, Any]) -> dict[str, Any]:
    """Write a model with random weights. Return its config.json."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from harness.tiny_model import write_tokenizer

    folder.mkdir(parents=True)
    write_tokenizer(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model(**SHAPE, **family)
    model = AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    written: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return written


def check(folder: Path, family: Mapping[str, Any]) -> dict[str, Any]:
    """Make one model, and check it inside an engine."""
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    config = make(folder, family)
    rng = random.Random(1)

    def ids(count: int) -> list[int]:
        return [rng.randrange(340) for _ in range(count)]

    chunk = ids(CHUNK)
    first, second = [*ids(60), *chunk], [*ids(60 + SHIFT), *chunk]
    engine = LLM(str(folder), enforce_eager=True, max_model_len=1024, disable_log_stats=True)
    asked = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    engine.generate({"prompt_token_ids": second}, asked, use_tqdm=False)
    # vLLM replaces some kernels when an engine starts, which fails the second time.
    current_platform.register_triton_kernel_overrides = lambda: None
    [found] = engine.collective_rpc(inside, args=(config, first, second))
    del engine
    gc.collect()
    cleanup_dist_env_and_memory()
    result: dict[str, Any] = found
    return result


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the worker can run a function
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    folder = Path(argv[0])
    found = {
        name: check(folder / str(number), family)
        for number, (name, family) in enumerate(FAMILIES.items())
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
