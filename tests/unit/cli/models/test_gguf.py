"""Reading models in GGUF."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_cli.models.gguf import read_gguf
from ragcache_core.errors import InvalidInput
from tests.helpers.gguf import F32, Q4_1, Q8_0, llama_fields, write_gguf, write_llama

_BYTES = st.integers(0, 255)
_HALF = st.integers(-1000, 1000).map(lambda number: number / 8)


def test_fields_and_tensors_are_read_as_written(tmp_path: Path) -> None:
    values = np.arange(6, dtype="<f4").reshape(2, 3)
    model = read_gguf(
        write_gguf(tmp_path / "m", llama_fields(), {"x.weight": (F32, (2, 3), values.tobytes())})
    )
    assert model.fields["llama.block_count"] == 1
    assert model.fields["tokenizer.ggml.merges"] == ["a b"]
    assert model.tensors["x.weight"].shape == (2, 3)
    assert np.array_equal(model.tensors["x.weight"].dequantized(), values)


@given(st.lists(_BYTES, min_size=16, max_size=16), _HALF, _HALF)
def test_blocks_of_four_bits_have_a_scale_and_a_minimum(
    tmp_path_factory: pytest.TempPathFactory, halves: list[int], scale: float, minimum: float
) -> None:
    data = struct.pack("<ee", scale, minimum) + bytes(halves)
    path = tmp_path_factory.getbasetemp() / "q4_1.gguf"
    model = read_gguf(write_gguf(path, {"a": 1}, {"x": (Q4_1, (32,), data)}))
    values = [byte & 15 for byte in halves] + [byte >> 4 for byte in halves]
    assert model.tensors["x"].dequantized().tolist() == [v * scale + minimum for v in values]


@given(st.lists(st.integers(-128, 127), min_size=32, max_size=32), _HALF)
def test_blocks_of_eight_bits_have_a_scale(
    tmp_path_factory: pytest.TempPathFactory, values: list[int], scale: float
) -> None:
    data = struct.pack("<e32b", scale, *values)
    path = tmp_path_factory.getbasetemp() / "q8_0.gguf"
    model = read_gguf(write_gguf(path, {"a": 1}, {"x": (Q8_0, (1, 32), data)}))
    assert model.tensors["x"].dequantized().tolist() == [[v * scale for v in values]]


@pytest.mark.parametrize("keep", [0, 3, 20, 300, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = write_llama(tmp_path / "m")
    path.write_bytes(path.read_bytes()[:keep].rstrip(b"\0"))
    with pytest.raises(InvalidInput, match="is not a readable GGUF file"):
        read_gguf(path)


def test_another_format_and_another_tensor_type_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("{}" * 100)
    unknown = write_gguf(tmp_path / "m", {"a": 1}, {"x": (99, (32,), b"")})
    for path in (tmp_path / "text", unknown, tmp_path / "missing"):
        with pytest.raises(InvalidInput, match="is not a readable GGUF file"):
            read_gguf(path)
