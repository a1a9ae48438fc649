"""Converts a Llama in GGUF into a folder that vLLM and the Hugging Face libraries read.

The same input gives the same bytes on every machine: the arithmetic is that of float32 and the
files are written here.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from gguf.gguf_reader import GGUFReader, ReaderTensor
from gguf.quants import dequantize

from ragcache_core.errors import InvalidInput

Fields = Mapping[str, Any]
"""The fields of a GGUF file."""

_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of modules in GGUF and in transformers."""
_CONTROL: Final = 3
"""Token type of special tokens."""
_HEADER_ALIGNMENT: Final = 8


class _Reader(GGUFReader):
    """A reader of an ordinary array. A slice of a mapped one takes numpy several times as long."""

    @property  # type: ignore[override]
    def data(self) -> npt.NDArray[np.uint8]:
        """The content of the file."""
        return self._data

    @data.setter
    def data(self, mapped: npt.NDArray[np.uint8]) -> None:
        self._data = np.asarray(mapped)


def convert(source: Path, folder: Path) -> None:
    """Write config, tokenizer, chat template and bfloat16 weights of a GGUF file into a folder.

    Raises:
        InvalidInput: The file holds no Llama with SmolLM's tokenizer.
    """
    model = _Reader(source)
    fields = {name: field.contents() for name, field in model.fields.items()}
    found = (fields.get("general.architecture"), fields.get("tokenizer.ggml.pre"))
    if found != ("llama", "smollm"):
        raise InvalidInput(str(source), f"holds {found}", "use a Llama with SmolLM's tokenizer")
    _write_json(
        folder / "config.json",
        _config(fields, is_tied=all(tensor.name != "output.weight" for tensor in model.tensors)),
    )
    _write_json(folder / "generation_config.json", _generation_config(fields))
    _write_json(folder / "tokenizer.json", tokenizer_of(fields))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields))
    template = fields["tokenizer.chat_template"]
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_weights(model.tensors, fields, folder / "model.safetensors")


def _config(fields: Fields, *, is_tied: bool) -> dict[str, Any]:
    """Return the content of config.json."""
    heads = fields["llama.attention.head_count"]
    hidden = fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "dtype": "bfloat16",
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "head_dim": fields.get("llama.rope.dimension_count", hidden // heads),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        # A float32, in its shortest decimal form.
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_parameters": {
            "rope_theta": fields["llama.rope.freq_base"],
            "rope_type": "default",
        },
        "tie_word_embeddings": is_tied,
        "use_cache": True,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    }


def _generation_config(fields: Fields) -> dict[str, Any]:
    """Return defaults for requests that set none.

    A model of this size writes nonsense at vLLM's default temperature of 1.
    """
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "temperature": 0.0,
    }


def tokenizer_of(fields: Fields) -> dict[str, Any]:
    """Return the content of tokenizer.json: byte-level BPE in which every digit is one token."""
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = fields["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == _CONTROL
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "add_prefix_space": False},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [pair.split(" ") for pair in fields["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(fields: Fields) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "backend": "tokenizers",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "tokenizer_class": "TokenizersBackend",
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
    }


def _write_weights(given: Sequence[ReaderTensor], fields: Fields, path: Path) -> None:
    """Write the tensors as bfloat16, one after the other in the order of their names.

    Source: https://huggingface.co/docs/safetensors, section Format.
    """
    tensors = {renamed(tensor.name): tensor for tensor in given}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(tensors):
        # GGUF has the fastest dimension first.
        shape = tensors[name].shape[::-1].tolist()
        start, end = end, end + 2 * tensors[name].n_elements
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _HEADER_ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for name in sorted(tensors):
            file.write(bfloat16(_in_order(tensors[name], fields)).data)


def renamed(name: str) -> str:
    """Return the name in transformers of a tensor: blk.3.attn_q.weight is model.layers.3.…"""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if layer:
        return f"model.layers.{layer[1]}.{_NAMES[layer[2]]}.weight"
    return f"{_NAMES[name.removesuffix('.weight')]}.weight"


def _in_order(tensor: ReaderTensor, fields: Fields) -> npt.NDArray[np.float32]:
    """Dequantize a tensor, with the rows of queries and keys in the order of transformers.

    llama.cpp rotates neighbouring rows of a head together, and transformers the rows of both
    halves of a head.
    """
    values = dequantize(tensor.data, tensor.tensor_type)
    heads_field = {"attn_q": "head_count", "attn_k": "head_count_kv"}
    module = tensor.name.split(".")[-2]
    if module not in heads_field:
        return values
    heads = fields[f"llama.attention.{heads_field[module]}"]
    rows, columns = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round finite numbers to bfloat16, ties to even; returns the bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    # In place: the largest tensor has 28 million numbers.
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    return rounded.astype(np.uint16)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
