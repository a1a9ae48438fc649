"""Writes small models in GGUF, as llama.cpp would."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

F32, Q4_1, Q8_0 = 0, 3, 8
_ALIGNMENT = 32

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


def llama_tensors(seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """Random float32 tensors of llama_fields, by their names in GGUF."""
    drawn = np.random.default_rng(seed)
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


def write_gguf(
    path: Path,
    fields: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, tuple[int, ...], bytes]],
) -> Path:
    """Write a file; a tensor is its type, its shape in torch's order, and its bytes."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    for key, value in fields.items():
        head += _string(key) + _value(value)
    body = b""
    for name, (kind, shape, data) in tensors.items():
        sizes = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += _string(name) + struct.pack("<I", len(shape)) + sizes
        head += struct.pack("<IQ", kind, len(body))
        body += data + b"\0" * (-len(data) % _ALIGNMENT)
    head += b"\0" * (-len(head) % _ALIGNMENT)
    path.write_bytes(head + body)
    return path


def write_llama(path: Path, seed: int = 0) -> Path:
    """Write the Llama of llama_fields with llama_tensors."""
    tensors = {
        name: (F32, values.shape, values.tobytes()) for name, values in llama_tensors(seed).items()
    }
    return write_gguf(path, llama_fields(), tensors)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: str | int | float | Sequence[Any]) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    inner = [_value(item) for item in value]
    return (
        struct.pack("<I", 9)
        + inner[0][:4]
        + struct.pack("<Q", len(inner))
        + b"".join(item[4:] for item in inner)
    )
