"""The configurations of the check of model families, without an engine."""

from __future__ import annotations

import pytest

from ragcache_core.identity.fingerprint import decoder_config, kv_space
from ragcache_kv.rotation import Pairing, read_rope
from tools.models.__main__ import summary
from tools.models.check import Outcome
from tools.models.families import FAMILIES, MAX_LENGTH

TWO_TABLES = {"gemma3", "gemma3, images", "cohere2", "exaone4"}
"""Families whose layers differ in their rotation."""

NO_ROTATION = {"opt", "gemma4", "deepseek_v3"}
"""Families whose keys cannot be moved by one rotation for each layer."""


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
