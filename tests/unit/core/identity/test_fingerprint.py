"""A fingerprint changes exactly with what changes KV."""

from __future__ import annotations

from typing import Any

import pytest

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.fingerprint import kv_space, model_fingerprint
from ragcache_core.identity.keys import KVSpace

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rope_theta": 10000.0,
    "dtype": "float16",
    "_name_or_path": "somewhere",
}
FILES = {"tokenizer.json": b"tokenizer", "params.json": b"{}"}


def fingerprint(
    config: dict[str, Any] = CONFIG,
    other_files: dict[str, bytes] = FILES,
    weights: bytes = b"weights",
) -> str:
    return model_fingerprint(config, other_files, weights)


@pytest.mark.parametrize(
    "other",
    [
        fingerprint(config=CONFIG | {"rope_theta": 1.0}),
        fingerprint(config=CONFIG | {"rope_scaling": {"factor": 2}}),
        fingerprint(config=CONFIG | {"num_hidden_layers": 4}),
        fingerprint(config=CONFIG | {"num_experts_per_tok": 2}),
        fingerprint(config=CONFIG | {"attn_logit_softcapping": 50.0}),
        fingerprint(config=CONFIG | {"text_config": {"dtype": "float16"}}),
        fingerprint(other_files=FILES | {"tokenizer.json": b"another"}),
        fingerprint(other_files={"tokenizer.json": b"tokenizer"}),
        fingerprint(other_files={"tokenizer.json": b"tokenizer{}", "params.json": b""}),
        fingerprint(weights=b"others"),
    ],
)
def test_another_model_has_another_fingerprint(other: str) -> None:
    assert other != fingerprint()


def test_the_folder_of_a_model_does_not_matter() -> None:
    moved = {name: CONFIG[name] for name in reversed(CONFIG)} | {"_name_or_path": "elsewhere"}
    assert fingerprint(config=moved) == fingerprint()


def test_the_dtype_is_part_of_the_space_and_not_of_the_fingerprint() -> None:
    assert fingerprint(config=CONFIG | {"dtype": "bfloat16"}) == fingerprint()


def test_a_space_has_the_sizes_of_the_config() -> None:
    assert kv_space("f", CONFIG, "bfloat16") == KVSpace("f", 3, 2, 8, "bfloat16")


def test_missing_sizes_follow_from_the_others() -> None:
    config = {name: value for name, value in CONFIG.items() if name != "num_key_value_heads"}
    assert kv_space("f", config, "float32").num_kv_heads == 8
    assert kv_space("f", config | {"head_dim": 32}, "float32").head_dim == 32


@pytest.mark.parametrize(
    ("named", "dtype"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float32"}, "bfloat16"),
        ({}, "bfloat16"),
    ],
)
def test_auto_resolves_as_in_the_engine(named: dict[str, str], dtype: str) -> None:
    config = {name: value for name, value in CONFIG.items() if name != "dtype"}
    assert kv_space("f", config | named, "auto").dtype == dtype


@pytest.mark.parametrize("missing", ["num_attention_heads", "num_hidden_layers", "hidden_size"])
def test_a_config_without_sizes_is_rejected(missing: str) -> None:
    config = {name: value for name, value in CONFIG.items() if name != missing}
    with pytest.raises(InvalidInput, match=r"config\.json"):
        kv_space("f", config, "auto")
