"""Makes a Llama of the shape of a 3B model with random weights, on the GPU that will run it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER = 3072, 28, 24, 8, 128, 8192
VOCABULARY = 16384


def make_model(folder: Path, tokenizer: Path) -> Path:
    """Write about 5.7 GB of bfloat16 weights in the layout of transformers; return the folder.

    Args:
        folder: Where to write.
        tokenizer: A model folder whose tokenizer is copied. Prompts are token ids, so nothing uses
            it but the fingerprint of the model.
    """
    import torch  # noqa: PLC0415  slow to import
    from safetensors.torch import save_file  # noqa: PLC0415

    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
        "hidden_act": "silu",
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": VOCABULARY - 1,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)

    def weight(rows: int, columns: int) -> torch.Tensor:
        drawn = torch.randn(rows, columns, generator=generator, device=device, dtype=torch.bfloat16)
        # Larger than usual initial weights: attention is then not uniform.
        return (drawn * (1.5 / columns**0.5)).cpu()

    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    tensors = {"model.embed_tokens.weight": weight(VOCABULARY, HIDDEN), "model.norm.weight": ones}
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        tensors |= {
            f"{layer}.input_layernorm.weight": ones.clone(),
            f"{layer}.post_attention_layernorm.weight": ones.clone(),
            f"{layer}.self_attn.q_proj.weight": weight(HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": weight(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": weight(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": weight(HIDDEN, HEADS * HEAD_DIM),
            f"{layer}.mlp.gate_proj.weight": weight(INNER, HIDDEN),
            f"{layer}.mlp.up_proj.weight": weight(INNER, HIDDEN),
            f"{layer}.mlp.down_proj.weight": weight(HIDDEN, INNER),
        }
    save_file(tensors, folder / "model.safetensors")
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return folder
