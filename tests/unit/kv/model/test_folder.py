"""The fingerprint of a model folder follows every file that changes KV, and no other one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from ragcache_core.errors import InvalidInput
from ragcache_core.identity import fingerprint as fingerprints
from ragcache_kv.model.folder import load_model_folder

Tensors = dict[str, NDArray[np.float32]]

VOCABULARY, HIDDEN, LAYERS = 512, 256, 8
CONFIG: Mapping[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "rope_parameters": {"rope_theta": 10000.0},
    "torch_dtype": "bfloat16",
    "_name_or_path": "somewhere",
}
TOKENIZER = b'{"model": {}}'


def tensors() -> Tensors:
    """Return weights of 7 MiB: the embedding, and two matrices of each layer."""
    rng = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        shapes[f"model.layers.{layer}.mlp.down_proj.weight"] = (HIDDEN, 3 * HIDDEN)
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = (HIDDEN,)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write(folder: Path, weights: Tensors, config: Mapping[str, Any] = CONFIG) -> Path:
    """Write a model in two files."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes(TOKENIZER)
    names = sorted(weights)
    for number, part in enumerate((names[:6], names[6:]), start=1):
        file = folder / f"model-{number}-of-2.safetensors"
        save_file({name: weights[name] for name in part}, file, {"format": "pt"})
    return folder


def fingerprint(folder: Path) -> str:
    return load_model_folder(str(folder)).fingerprint


@pytest.fixture(params=["whole", "sampled"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Hash the small model whole, and sample it as a large one."""
    if request.param == "sampled":
        monkeypatch.setattr(fingerprints, "WHOLE_BYTES", 0)
        monkeypatch.setattr(fingerprints, "MAX_SLICES", 16)
    return str(request.param)


def merge_lora(weights: Tensors) -> None:
    """Merge a low-rank update into one matrix, as ``merge_and_unload`` does."""
    rng = np.random.default_rng(1)
    down = rng.standard_normal((HIDDEN, 4), dtype=np.float32)
    up = rng.standard_normal((4, 3 * HIDDEN), dtype=np.float32)
    weights["model.layers.4.mlp.down_proj.weight"] += 1e-3 * down @ up


def train_a_norm(weights: Tensors) -> None:
    """Change one number of one small tensor."""
    weights["model.layers.3.input_layernorm.weight"][100] += 0.01


def train_a_token(weights: Tensors) -> None:
    """Train the embedding of one reserved token."""
    weights["model.embed_tokens.weight"][VOCABULARY // 2] += 0.01


def prune(weights: Tensors) -> None:
    """Set the smallest thousandth of a matrix to zero."""
    matrix = weights["model.layers.6.mlp.down_proj.weight"]
    matrix[np.abs(matrix) < np.quantile(np.abs(matrix), 0.001)] = 0


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("change", [merge_lora, train_a_norm, train_a_token, prune])
def test_changed_weights_have_another_fingerprint(
    tmp_path: Path, change: Callable[[Tensors], None]
) -> None:
    before = fingerprint(write(tmp_path / "base", tensors()))
    changed = tensors()
    change(changed)
    assert fingerprint(write(tmp_path / "tuned", changed)) != before


def test_one_number_of_a_small_model_changes_its_fingerprint(tmp_path: Path) -> None:
    before, changed = fingerprint(write(tmp_path / "base", tensors())), tensors()
    changed["model.layers.5.mlp.down_proj.weight"][17, 400] += 1
    assert fingerprint(write(tmp_path / "edited", changed)) != before


@pytest.mark.usefixtures("size")
def test_a_copy_of_a_model_has_its_fingerprint(tmp_path: Path) -> None:
    one, other = write(tmp_path / "a", tensors()), write(tmp_path / "b", tensors())
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for file in one.iterdir():  # as the hub's cache has it
        (linked / file.name).symlink_to(file)
    assert fingerprint(one) == fingerprint(other) == fingerprint(linked)


@pytest.mark.parametrize(
    "change",
    [
        {"num_experts_per_tok": 4},
        {"norm_topk_prob": False},
        {"layer_types": ["full_attention"] * LAYERS},
        {"query_pre_attn_scalar": 256},
        {"a_setting_of_a_later_model": 1},
        {"rope_parameters": {"rope_theta": 20000.0}},
    ],
)
def test_every_setting_of_the_model_changes_its_fingerprint(
    tmp_path: Path, change: Mapping[str, Any]
) -> None:
    before = fingerprint(write(tmp_path / "base", tensors()))
    changed = write(tmp_path / "changed", tensors(), {**CONFIG, **change})
    assert fingerprint(changed) != before


@pytest.mark.parametrize("name", ["params.json", "hf_quant_config.json"])
def test_other_files_with_settings_of_the_model_count(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "model", tensors())
    before = fingerprint(folder)
    (folder / name).write_text("{}")
    with_file = fingerprint(folder)
    (folder / name).write_text('{"a": 1}')
    assert len({before, with_file, fingerprint(folder)}) == 3


def test_a_model_whose_kv_is_not_stored_needs_no_weights(tmp_path: Path) -> None:
    (folder := tmp_path / "bare").mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_bytes(TOKENIZER)
    bare = load_model_folder(str(folder), with_weights=False)
    assert bare.space("auto").num_layers == LAYERS
    with pytest.raises(InvalidInput, match="safetensors"):
        load_model_folder(str(folder))
    whole = write(tmp_path / "whole", tensors())
    assert load_model_folder(str(whole), with_weights=False).fingerprint == bare.fingerprint
    assert load_model_folder(str(whole)).fingerprint != bare.fingerprint


def test_settings_of_generation_do_not_count(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", tensors())
    before = fingerprint(folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": 7}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "tokenizer_config.json").write_text("{}")
    settings = {"use_cache": False, "eos_token_id": 7, "transformers_version": "9", "dtype": "x"}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **settings}))
    assert fingerprint(folder) == before


def damage_header(raw: bytes) -> bytes:
    return raw[:8] + b"!" + raw[9:]


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: b"\xff" * 64,
        damage_header,
        lambda raw: raw[: len(raw) // 2],
        lambda raw: (2).to_bytes(8, "little") + b"[]",
        lambda raw: (13).to_bytes(8, "little") + b'{"a":{"b":1}}',
    ],
)
def test_a_damaged_file_is_refused_by_name(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    folder = write(tmp_path / "model", tensors())
    file = folder / "model-2-of-2.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(InvalidInput, match=r"model\.source.*model-2-of-2\.safetensors"):
        load_model_folder(str(folder))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a model in a cache of the hub, which can be read offline."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub" / "models--org--model"


def commit(hub: Path, name: str, weights: Tensors | None) -> str:
    """Add a commit of the main branch with the small files, and with weights if any are given."""
    snapshot = hub / "snapshots" / name
    snapshot.mkdir(parents=True)
    if weights is not None:
        write(snapshot, weights)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    (snapshot / "tokenizer.json").write_bytes(TOKENIZER)
    (hub / "refs").mkdir(exist_ok=True)
    (hub / "refs" / "main").write_text(name)
    return fingerprint(Path("org/model"))


def test_the_commit_stands_for_the_weights_of_a_hub_model(hub: Path) -> None:
    engine = commit(hub, "a" * 40, tensors())
    for file in (hub / "snapshots" / ("a" * 40)).glob("*.safetensors"):
        file.unlink()
    assert fingerprint(Path("org/model")) == engine, "a gateway has no weights"
    assert commit(hub, "b" * 40, None) != engine
    assert fingerprint(hub / "snapshots" / ("a" * 40)) == engine, "vLLM names it so offline"
    pinned = load_model_folder("org/model", "a" * 40)
    assert pinned.fingerprint == engine
