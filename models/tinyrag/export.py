"""Writes a trained model as a Hugging Face `LlamaForCausalLM` folder."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedTokenizerFast

from models.tinyrag.model import Shape

MAX_POSITIONS = 4096


def llama_config(shape: Shape, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """The configuration under which `LlamaForCausalLM` computes what `TinyLlama` does."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.head_width,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=shape.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )


def llama_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`TinyLlama` parameters under their Hugging Face names, in bfloat16, without the teachers."""
    return {
        f"model.{name}": tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in state.items()
        if not name.startswith("auxiliary.")
    }


def export(
    folder: Path,
    shape: Shape,
    state: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerFast,
    metrics: Mapping[str, object],
) -> None:
    """Writes every file of the model; each one appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        fresh = Path(name)
        llama_config(shape, tokenizer).save_pretrained(fresh)
        # vLLM takes a request's defaults from here: greedy, because there is one right answer.
        generation = {
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "temperature": 0.0,
        }
        (fresh / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        tokenizer.save_pretrained(fresh)
        save_file(llama_weights(state), fresh / "model.safetensors", metadata={"format": "pt"})
        (fresh / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
        for path in sorted(fresh.iterdir()):
            path.chmod(0o644)
            os.replace(path, folder / path.name)
