"""Which rotations are read from a config.json, and which are refused for which reason."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.errors import InvalidInput
from ragcache_kv.rotation import Pairing, read_rope

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


def config(**fields: Any) -> dict[str, Any]:
    return {"model_type": "llama", "head_dim": 64, "rope_theta": 10_000.0, **fields}


def test_plain_rope_as_published() -> None:
    rope = read_rope(config())
    assert (rope.head_dim, rope.rotary_dim, rope.pairing) == (64, 64, Pairing.HALVES)
    np.testing.assert_allclose(rope.frequencies, 1e4 ** (-np.arange(32) / 32), rtol=2**-22)


@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 4.0}, LLAMA3, YARN])
def test_old_and_new_locations_of_settings_are_equivalent(scaling: dict[str, Any]) -> None:
    new = {"model_type": "mistral", "hidden_size": 256, "num_attention_heads": 4, "head_dim": None}
    new |= {"rope_parameters": {**scaling, "rope_theta": 5e5, "partial_rotary_factor": 0.5}}
    old = {**new, "rope_parameters": None, "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    renamed = {"type" if name == "rope_type" else name: value for name, value in scaling.items()}
    assert read_rope(new) == read_rope(old | {"rope_scaling": renamed})
    assert read_rope(new).rotary_dim == 32


def test_a_length_beside_the_settings_goes_first() -> None:
    given = config(rope_scaling=LLAMA3, max_position_embeddings=131072)
    short = {**LLAMA3, "original_max_position_embeddings": 1024}
    assert read_rope(given | {"original_max_position_embeddings": 1024}) == read_rope(
        given | {"rope_scaling": short}
    )
    without = {name: LLAMA3[name] for name in LLAMA3 if not name.startswith("original")}
    assert read_rope(config(rope_scaling=without, max_position_embeddings=8192)) == read_rope(given)


def test_kinds_of_models_pair_as_their_code_does() -> None:
    assert read_rope(config(model_type="cohere")).pairing is Pairing.NEIGHBOURS
    assert read_rope(config(model_type="glm4")).rotary_dim == 32
    unknown = config(model_type="another")
    assert read_rope(unknown, Pairing.NEIGHBOURS).pairing is Pairing.NEIGHBOURS
    assert read_rope(config(), Pairing.NEIGHBOURS).pairing is Pairing.NEIGHBOURS


@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "default"}, {"type": "default"}])
def test_no_scaling(scaling: dict[str, Any] | None) -> None:
    assert read_rope(config(rope_scaling=scaling)) == read_rope(config())


def test_llama_2_knows_its_theta() -> None:
    assert read_rope({"model_type": "llama", "head_dim": 64}) == read_rope(config())


BY_TYPE: dict[str, Any] = {
    "model_type": "gemma3_text",
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    },
}
UNLIKE_SHARES = {
    **BY_TYPE,
    "rope_parameters": {
        "sliding_attention": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        "full_attention": {"rope_theta": 10_000.0},
    },
}
LONGROPE = {
    "model_type": "phi3",
    "original_max_position_embeddings": 4096,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0] * 32,
        "long_factor": [2.0 + pair for pair in range(32)],
    },
}


def test_each_type_of_layer_has_a_table_of_its_own() -> None:
    rope = read_rope(config(**BY_TYPE))
    local = read_rope(config(model_type="gemma3_text", rope_theta=10_000.0)).frequencies
    linear = {"rope_type": "linear", "factor": 8.0}
    wide = read_rope(config(model_type="gemma3_text", rope_theta=1e6, rope_scaling=linear))
    assert rope.by_layer == (local, wide.frequencies, local)
    assert rope.of_layer(1) == wide
    assert rope.tables == ([rope.of_layer(0), wide], [0, 1, 0])
    assert wide.tables == ([wide], [0])
    assert rope.of_layers(range(1, 3)).by_layer == (wide.frequencies, local)
    assert rope.of_layers(range(1, 3)).of_layer(0) == wide
    assert wide.of_layers(range(1, 3)) is wide


def test_types_of_layers_with_equal_tables_are_one_rotation() -> None:
    same = {kind: {"rope_theta": 10_000.0} for kind in BY_TYPE["layer_types"]}
    assert read_rope(config(**{**BY_TYPE, "rope_parameters": same})).by_layer == ()


def test_layers_that_do_not_rotate_have_frequencies_of_zero() -> None:
    own = read_rope(config()).frequencies
    still = (0.0,) * len(own)
    assert read_rope(config(no_rope_layers=[1, 0, 1])).by_layer == (own, still, own)
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
    rope = read_rope(config(model_type="exaone4", **windows))
    assert rope.by_layer == (own, still)


def test_the_most_tokens_of_a_sequence_choose_the_table_of_longrope() -> None:
    plain = read_rope(config(model_type="phi3")).frequencies
    assert read_rope(config(**LONGROPE), max_length=4096).frequencies == plain
    long = read_rope(config(**LONGROPE), max_length=4097).frequencies
    assert long == pytest.approx([own / (2 + pair) for pair, own in enumerate(plain)], rel=1e-6)


def test_minimax_names_the_rotated_numbers() -> None:
    assert read_rope(config(model_type="minimax_m2", rotary_dim=32)).rotary_dim == 32


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("rope_scaling.rope_type", {"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "length"),
    ("rope_scaling.type", {"rope_scaling": {"type": "dynamic", "alpha": 1000.0}}, "length"),
    ("rope_scaling.type", {"rope_scaling": {"type": "longrope"}}, "two tables"),
    ("rope_parameters", UNLIKE_SHARES, "unlike shares"),
    ("no_rope_layers", {**BY_TYPE, "no_rope_layers": [1, 0]}, "length"),
    ("rope_scaling.type", {"rope_scaling": {"type": "su"}}, "two tables"),
    ("rope_scaling.type", {"rope_scaling": {"type": "mrope"}}, "three numbers"),
    ("rope_scaling.type", {"rope_scaling": {"type": "novel"}}, "unknown"),
    ("rope_scaling.rope_type", {"rope_scaling": {"rope_type": "yarn", "type": "x"}}, "agree"),
    ("rope_parameters.mrope_section", {"rope_parameters": {"mrope_section": [1]}}, "three numbers"),
    (
        "rope_parameters.rope_type",
        {"rope_parameters": {"rope_type": "proportional"}},
        "not rotated",
    ),
    ("rope_parameters.full_attention", {"rope_parameters": {"full_attention": {}}}, "layers"),
    ("rope_parameters", {"rope_parameters": [1]}, "no object"),
    ("rope_local_base_freq", {"rope_local_base_freq": 1e4}, "layers"),
    ("alibi", {"alibi": True}, "no rotary"),
    ("position_embedding_type", {"position_embedding_type": "alibi"}, "no rotary"),
    ("position_embedding_type", {"position_embedding_type": ["rope"]}, "no rotary"),
    ("kv_lora_rank", {"kv_lora_rank": 512}, "latent"),
    ("use_mrope", {"use_mrope": True}, "three numbers"),
    ("dual_chunk_attention_config", {"dual_chunk_attention_config": {"chunk_size": 1}}, "chunk"),
    ("model_type", {"model_type": "bloom"}, "unknown"),
    ("model_type", {"model_type": ["llama"]}, "unknown"),
    ("head_dim", {"head_dim": None}, "cannot be read"),
    ("head_dim", {"head_dim": 1 << 40}, "no size"),
    ("rope_scaling", {"rope_scaling": {"type": "ntk", "factor": 2, "mixed_b": 1e17}}, "finite"),
    ("rope_parameters.rope_theta", {"rope_theta": "many"}, "not a positive number"),
    ("rope_parameters.rope_theta", {"rope_theta": True}, "not a positive number"),
    ("rope_parameters.rope_theta", {"rope_theta": 1}, "above 1"),
    ("rope_parameters.rope_theta", {"rope_theta": None, "model_type": "qwen2"}, "missing"),
    ("rope_parameters.partial_rotary_factor", {"partial_rotary_factor": 1.5}, "96 of 64"),
    ("rope_parameters.partial_rotary_factor", {"rotary_pct": 0.33}, "21 of 64"),
    ("rope_scaling.factor", {"rope_scaling": {"type": "linear"}}, "missing"),
    ("rope_scaling.factor", {"rope_scaling": {"type": "linear", "factor": 0}}, "not a positive"),
    (
        "rope_scaling.factor",
        {"rope_scaling": {"type": "ntk", "factor": math.nan}},
        "not a positive",
    ),
    (
        "rope_scaling.original_max_position_embeddings",
        {"rope_scaling": {"type": "yarn", "factor": 2.0}},
        "missing",
    ),
]


@pytest.mark.parametrize(("field", "fields", "reason"), REFUSED)
def test_what_cannot_be_rotated_is_refused(field: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        read_rope(config(**fields))
    assert refusal.value.field == f"config.json {field}"
    assert reason in refusal.value.problem


def test_layers_that_all_rotate_are_not_refused() -> None:
    assert read_rope(config(no_rope_layers=[1, 1])) == read_rope(config(use_mrope=False))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
)
names = st.sampled_from([*LLAMA3, "rope_theta", "head_dim", "hidden_size", "rope_dim"]) | (
    st.sampled_from(["num_attention_heads", "partial_rotary_factor", "max_position_embeddings"])
    | st.sampled_from(["mixed_b", "beta_fast", "beta_slow", "truncate", "model_type"])
)
numbers = st.sampled_from([1, 1.0, 0.5, 2, 64, 96, 4096, 1e-17, 1e17, -1, 10**400, math.inf])
kinds = st.sampled_from(["default", "linear", "llama3", "ntk", "yarn"])


@given(
    fields=st.dictionaries(names, anything | numbers),
    inner=st.dictionaries(names, anything | numbers) | anything,
    kind=kinds,
)
def test_any_config_is_read_or_refused(fields: dict[str, Any], inner: Any, kind: str) -> None:
    inner = {**inner, "rope_type": kind} if isinstance(inner, dict) else inner
    try:
        rope = read_rope({**config(), **fields, "rope_scaling": inner})
    except InvalidInput:
        return
    assert len(rope.frequencies) == rope.rotary_dim // 2
    assert 0 < rope.rotary_dim <= rope.head_dim
