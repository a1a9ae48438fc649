"""The configurations of the check of model families, without an engine."""

from __future__ import annotations

import pytest

from ragcache_core.identity.fingerprint import CLASS_DEFAULTS, decoder_config, kv_space
from ragcache_kv.rotation import Pairing, read_rope
from tools.models.__main__ import summary
from tools.models.check import Outcome
from tools.models.families import FAMILIES, MAX_LENGTH

TWO_TABLES = {"gemma3", "gemma3, images", "cohere2", "exaone4", "llama4"}
"""Families whose layers differ in their rotation."""

NO_ROTATION = {"opt", "gemma4", "deepseek_v3"}
"""Families whose keys cannot be moved by one rotation for each layer."""

HAS_STATES = {"qwen3_5"}
"""Families with layers that have states in place of KV."""


@pytest.mark.parametrize("name", sorted({*FAMILIES} - NO_ROTATION))
def test_the_rotation_of_a_family_is_read(name: str) -> None:
    from transformers import AutoConfig

    family = FAMILIES[name]
    parsed = AutoConfig.for_model(**family.config).to_dict()
    settings = {**family.config, **parsed}
    config = {"text_config": settings} if family.reads_images else settings
    rope = read_rope(decoder_config(config), Pairing.HALVES, MAX_LENGTH)
    assert bool(rope.by_layer) == (name in TWO_TABLES)
    assert kv_space("f", config, "auto").num_layers == family.config["num_hidden_layers"]


@pytest.mark.parametrize(
    "kind",
    sorted(
        {FAMILIES[name].config["model_type"] for name in {*FAMILIES} - NO_ROTATION - HAS_STATES}
    ),
)
def test_sizes_that_are_left_out_are_those_of_the_class_in_transformers(kind: str) -> None:
    from transformers import AutoConfig

    known = AutoConfig.for_model(kind)
    for name, size in CLASS_DEFAULTS.get(kind, {}).items():
        assert getattr(known, name) == size
    given = {
        "model_type": kind,
        "hidden_size": 480,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
    }
    head_dim = getattr(AutoConfig.for_model(**given), "head_dim", None) or 480 // 12
    assert kv_space("f", given, "auto").head_dim == head_dim


def test_a_summary_counts_outcomes_and_names_families() -> None:
    found = {
        "a": Outcome("blend"),
        "b": Outcome("blend"),
        "c": Outcome("refused", "why"),
        "d": Outcome("reference", "no torchvision"),
    }
    assert summary(found) == {
        "families_blend": 2,
        "families_exact": 0,
        "families_refused": 1,
        "families_reference": 1,
        "families_failed": 0,
        "families": {
            "a": {"kind": "blend", "reason": ""},
            "b": {"kind": "blend", "reason": ""},
            "c": {"kind": "refused", "reason": "why"},
            "d": {"kind": "reference", "reason": "no torchvision"},
        },
    }
