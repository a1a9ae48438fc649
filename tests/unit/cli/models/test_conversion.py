"""From GGUF to a folder that vLLM reads."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_cli.models.conversion import bfloat16, convert, renamed, tokenizer_of
from ragcache_core.errors import InvalidInput
from tests.unit.cli.models.gguf_model import QUANTIZED, llama_fields, llama_tensors, write_llama


def read_weights(path: Path) -> dict[str, npt.NDArray[np.float32]]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    weights = {}
    for name, described in header.items():
        start, end = (8 + length + offset for offset in described["data_offsets"])
        bits = np.frombuffer(data[start:end], "<u2").astype(np.uint32) << 16
        weights[name] = bits.view(np.float32).reshape(described["shape"])
    return weights


@pytest.fixture
def made(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    convert(write_llama(tmp_path / "m.gguf"), folder)
    return folder


def test_the_folder_describes_the_model(made: Path) -> None:
    config = json.loads((made / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["hidden_size"], config["head_dim"], config["vocab_size"]) == (64, 32, 7)
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"]
    assert json.loads((made / "generation_config.json").read_text())["temperature"] == 0.0
    assert (made / "chat_template.jinja").read_text() == "{{ messages }}"


def test_weights_are_those_of_the_file_in_bfloat16(made: Path) -> None:
    weights, given = read_weights(made / "model.safetensors"), llama_tensors()
    assert weights.keys() == {renamed(name) for name in given}
    for name in ("token_embd.weight", "blk.0.attn_v.weight"):
        assert np.allclose(weights[renamed(name)], given[name], rtol=2**-8)
    # It has 8 bits for each number in the file.
    quantized = weights[renamed(QUANTIZED)]
    assert quantized.shape == given[QUANTIZED].shape
    assert np.allclose(quantized, given[QUANTIZED], atol=0.05)


def test_queries_and_keys_have_their_pairs_in_halves_of_a_head(made: Path) -> None:
    """Row 2i + j of a head in GGUF is row i + j * 16 of the head in transformers."""
    weights, given = read_weights(made / "model.safetensors"), llama_tensors()
    for module, heads in (("q", 2), ("k", 1)):
        ours = weights[f"model.layers.0.self_attn.{module}_proj.weight"].reshape(heads, 32, 64)
        theirs = given[f"blk.0.attn_{module}.weight"].reshape(heads, 32, 64)
        for pair in range(16):
            assert np.allclose(ours[:, pair], theirs[:, 2 * pair], rtol=2**-8)
            assert np.allclose(ours[:, pair + 16], theirs[:, 2 * pair + 1], rtol=2**-8)


def test_the_same_file_gives_the_same_bytes(made: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    again.mkdir()
    convert(tmp_path / "m.gguf", again)
    for file in made.iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes()


@given(
    st.floats(
        width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**126), max_value=2.0**126
    )
)
def test_rounding_to_bfloat16_takes_the_nearest(value: float) -> None:
    rounded = int(bfloat16(np.array([value], np.float32))[0])

    def number(bits: int) -> float:
        return float(np.array([bits << 16], np.uint32).view(np.float32)[0])

    error = abs(number(rounded) - value)
    for other in (rounded - 1, rounded + 1):
        if 0 <= other < 1 << 16 and other & 0x7F80 != 0x7F80:
            distance = abs(number(other) - value)
            assert error < distance or (error == distance and rounded % 2 == 0)


def test_the_tokenizer_splits_digits_and_keeps_special_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_of(llama_fields())))
    assert tokenizer.encode("<|user|>ab 11").ids == [1, 4, 6, 5, 5]
    assert tokenizer.decode([4, 6, 5, 5]) == "ab 11"


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m", **{"general.architecture": "gpt2"})
    with pytest.raises(InvalidInput, match="gpt2"):
        convert(path, tmp_path)
