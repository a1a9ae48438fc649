"""The first token of an answer: prefill of a question over KV that has been loaded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from ragcache_core.identity.variant import ValueShape

QUESTION_TOKENS = 24


class Question:
    """A Llama of random weights with as many heads as the KV has, and a question to it."""

    def __init__(self, shape: ValueShape, chunk_tokens: int) -> None:
        width = shape.num_kv_heads * shape.head_dim
        config = LlamaConfig(
            vocab_size=8192,
            hidden_size=width,
            intermediate_size=width * 11 // 4,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_kv_heads,
            num_key_value_heads=shape.num_kv_heads,
            max_position_embeddings=32768,
        )
        self._model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
        self._ids = torch.arange(QUESTION_TOKENS)[None]
        self._shape = shape
        self._chunk_tokens = chunk_tokens

    def first_token(self, values: Sequence[NDArray[np.uint8]]) -> int:
        """Prefill over native values, in order."""
        shape = self._shape
        layout = (shape.num_layers, 2, self._chunk_tokens, shape.num_kv_heads, shape.head_dim)
        native = [torch.from_numpy(value).view(torch.bfloat16).view(layout) for value in values]
        with torch.inference_mode():
            cache = DynamicCache()
            for layer in range(shape.num_layers):
                # [tokens, heads, dim] of all chunks to [1, heads, tokens, dim]
                keys, rest = (
                    torch.cat([value[layer, half] for value in native]).transpose(0, 1)[None]
                    for half in (0, 1)
                )
                cache.update(keys, rest, layer)
            logits = self._model(self._ids, past_key_values=cache, logits_to_keep=1).logits
            return int(logits[0, -1].argmax())
