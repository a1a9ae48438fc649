"""A fingerprint changes exactly with what changes KV."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.fingerprint import (
    ALL_SLICES,
    MAX_SLICES,
    MIN_SLICES,
    SLICE_BYTES,
    WHOLE_BYTES,
    StoredTensor,
    hashed_ranges,
    kv_space,
    model_fingerprint,
    read_tensors,
)
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


LARGE = StoredTensor("large", 1, range(64, 64 + WHOLE_BYTES))
"""A tensor that makes a model too large to hash it whole."""


def bytes_of(groups: list[tuple[range, ...]], tensor: StoredTensor) -> int:
    """Return how many bytes of a tensor are hashed, each counted once."""
    ranges = sorted((one for group in groups for one in group), key=lambda one: one.start)
    count, end = 0, tensor.span.start
    for one in ranges:
        count += max(0, min(one.stop, tensor.span.stop) - max(one.start, end))
        end = max(end, one.stop)
    return count


def matrix(name: str, rows: int, row_bytes: int, start: int = 0) -> StoredTensor:
    return StoredTensor(name, rows, range(start, start + rows * row_bytes))


@st.composite
def models(draw: st.DrawFn) -> list[StoredTensor]:
    tensors, start = [], draw(st.integers(8, 4096))
    for number in range(draw(st.integers(1, 8))):
        one = matrix(
            f"layers.{number}.{draw(st.sampled_from(('q', 'k', 'v')))}",
            draw(st.integers(0, 5000)),
            draw(st.integers(1, 9000)),
            start,
        )
        tensors.append(one)
        start = one.span.stop
    return tensors


@given(models(), st.booleans())
def test_every_tensor_is_hashed_within_its_bounds(
    tensors: list[StoredTensor], is_large: bool
) -> None:
    files = [tensors, [LARGE]] if is_large else [tensors]
    groups = hashed_ranges(files, 0)[0]
    hashed = [one for group in groups for one in group]
    assert all(one and one.step == 1 for one in hashed)
    assert sum(map(len, hashed)) == sum(bytes_of(groups, one) for one in tensors), "none twice"
    for tensor in tensors:
        size = len(tensor.span)
        bound = MAX_SLICES * SLICE_BYTES if is_large else size
        assert bytes_of(groups, tensor) == min(size, bound)


@given(st.integers(MAX_SLICES * SLICE_BYTES + 1, 1 << 26), st.integers(0, 1 << 20))
def test_a_change_of_one_part_in_sixty_four_is_always_noticed(size: int, start: int) -> None:
    """A slice lies in each of the equal parts, so no larger part is left out."""
    tensor = StoredTensor("matrix", 1, range(start, start + size))
    [group] = hashed_ranges([[tensor], [LARGE]], 0)[0]
    assert len(group) == MAX_SLICES
    for index, one in enumerate(group):
        assert start + size * index // MAX_SLICES <= one.start
        assert one.stop <= start + size * (index + 1) // MAX_SLICES


def test_slices_lie_in_different_columns() -> None:
    """A sample of one column would not notice a change of the others."""
    rows, row_bytes = 4096, 1 << 15
    [group] = hashed_ranges([[matrix("down_proj", rows, row_bytes)], [LARGE]], 0)[0]
    columns = {one.start % row_bytes // SLICE_BYTES for one in group}
    assert columns == set(range(row_bytes // SLICE_BYTES))


@pytest.mark.parametrize(
    ("name", "rows", "whole"),
    [
        ("model.embed_tokens.weight", 32_000, True),
        ("model.embed_tokens.weight", 32_064, True),  # padded
        ("model.layers.0.mlp.up_proj.weight", 31_999, False),
        ("lm_head.weight", 32_000, False),
    ],
)
def test_the_embedding_is_hashed_whole(name: str, rows: int, whole: bool) -> None:
    tensor = matrix(name, rows, 2048)
    groups = hashed_ranges([[tensor], [LARGE]], 32_000)[0]
    assert (bytes_of(groups, tensor) == len(tensor.span)) == whole


def test_a_model_with_many_tensors_is_sampled_within_the_bound() -> None:
    def slices_of(count: int) -> int:
        tensors = [matrix(f"experts.{n}", 1024, 1024, n << 20) for n in range(count)]
        groups = hashed_ranges([tensors, [LARGE]], 0)[0]
        return sum(map(len, groups)) // count

    assert slices_of(256) == MAX_SLICES
    assert slices_of(2048) == ALL_SLICES // 2049
    assert slices_of(40_000) == MIN_SLICES


def header(**tensors: object) -> bytes:
    return json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()


def test_tensors_are_read_in_the_order_of_their_bytes() -> None:
    raw = header(
        b={"dtype": "BF16", "shape": [2, 3], "data_offsets": [4, 16]},
        a={"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
    )
    assert read_tensors(raw, range(100, 116)) == (
        StoredTensor("a", 1, range(100, 104)),
        StoredTensor("b", 2, range(104, 116)),
    )


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"{", "no safetensors header"),
        (b"[]", "no safetensors header"),
        (b"[" * 100_000, "no safetensors header"),
        (header(a={}), "no safetensors header"),
        (header(a={"shape": [1], "data_offsets": [0]}), "no safetensors header"),
        (header(a={"shape": [1], "data_offsets": [0, 1, 2]}), "no safetensors header"),
        (header(a={"shape": ["x"], "data_offsets": [0, 1]}), "no safetensors header"),
        (header(a={"shape": [1], "data_offsets": [0, 17]}), "lacks bytes of the tensor a"),
        (header(a={"shape": [1], "data_offsets": [-1, 4]}), "lacks bytes of the tensor a"),
        (header(a={"shape": [1], "data_offsets": [8, 4]}), "lacks bytes of the tensor a"),
    ],
)
def test_a_damaged_header_is_refused(raw: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_tensors(raw, range(100, 116))


def test_a_decoder_inside_of_another_model_has_its_own_sizes() -> None:
    whole = {"model_type": "mistral3", "dtype": "float16", "text_config": CONFIG}
    assert kv_space("f", whole, "auto") == kv_space("f", CONFIG, "float16")


def test_sizes_that_the_class_of_a_model_implies_may_be_left_out() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
    space = kv_space("f", {"text_config": text}, "auto")
    assert space == KVSpace("f", 34, 4, 256, "bfloat16")


def test_a_text_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(InvalidInput, match="text_config"):
        kv_space("f", {"text_config": [1]}, "auto")


_LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("field", "rope"),
    [
        ("rope_scaling", _LONGROPE),
        ("rope_parameters", _LONGROPE),
        (
            "rope_parameters",
            {"sliding_attention": {"rope_theta": 1e4}, "full_attention": _LONGROPE},
        ),
    ],
)
def test_the_two_rotations_of_longrope_are_two_spaces(field: str, rope: dict[str, Any]) -> None:
    config = CONFIG | {field: rope}
    short, edge, long = (kv_space("f", config, "float16", max_length=n) for n in (100, 4096, 4097))
    assert short == edge == kv_space("f", config, "float16")
    assert long != short
    assert kv_space("f", CONFIG, "float16", max_length=4097) == kv_space("f", CONFIG, "float16")
