"""Writes small models in GGUF, as llama.cpp would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.quants import quantize

QUANTIZED = "blk.0.ffn_down.weight"
"""A tensor with 8 bits for each number. The others have 32."""
TOKENS = ("<|end|>", "<|user|>", "a", "b", "ab", "1", "Ġ")
"""Two special tokens, letters, a merge, a digit, a space."""


def llama_fields(**changes: Any) -> dict[str, Any]:
    """Fields of a Llama with one layer, hidden size 64 and two heads of 32."""
    return {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 128,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": list(TOKENS),
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": "{{ messages }}",
        **changes,
    }


def llama_tensors() -> dict[str, npt.NDArray[np.float32]]:
    """Random float32 tensors of llama_fields, by their names in GGUF."""
    drawn = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (len(TOKENS), 64),
        "output_norm.weight": (64,),
        "blk.0.attn_norm.weight": (64,),
        "blk.0.attn_q.weight": (64, 64),
        "blk.0.attn_k.weight": (32, 64),
        "blk.0.attn_v.weight": (32, 64),
        "blk.0.attn_output.weight": (64, 64),
        "blk.0.ffn_norm.weight": (64,),
        "blk.0.ffn_gate.weight": (96, 64),
        "blk.0.ffn_up.weight": (96, 64),
        "blk.0.ffn_down.weight": (64, 96),
    }
    return {name: drawn.normal(size=shape).astype("<f4") for name, shape in shapes.items()}


def write_llama(path: Path, **changes: Any) -> Path:
    """Write the Llama of llama_fields with llama_tensors."""
    fields = llama_fields(**changes)
    writer = GGUFWriter(path, fields.pop("general.architecture"))
    for key, value in fields.items():
        kind = GGUFValueType.get_type(value)
        inner = GGUFValueType.get_type(value[0]) if kind is GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, kind, inner)
    for name, values in llama_tensors().items():
        number_type = GGMLQuantizationType.Q8_0 if name == QUANTIZED else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(values, number_type), raw_dtype=number_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
