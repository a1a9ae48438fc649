"""Makes a Llama with random weights and a small byte-level tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
CORPUS = [
    "The service runs in region north and is owned by the team that answers its alerts.",
    "Answer the question from the documents. Which database does it use, and since when?",
    "If they do not contain the answer, reply: not in the documents.",
]


def make_tiny_model(
    folder: Path,
    *,
    layers: int = 4,
    hidden: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    max_length: int = 4096,
    seed: int = 0,
) -> Path:
    """Write the model into folder and return it. Weights are bf16 and a function of the seed."""
    # Imported here, because torch is slow to import and only needed to start an engine.
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = write_tokenizer(folder)
    head_dim = hidden // heads
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": vocabulary - 1,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generator = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int) -> torch.Tensor:
        # Larger than usual initial weights. Attention is then not uniform, so that wrong KV
        # changes the next token.
        scale = 2.0 / columns**0.5
        return (torch.randn(rows, columns, generator=generator) * scale).bfloat16()

    tensors = {
        "model.embed_tokens.weight": weight(vocabulary, hidden),
        "model.norm.weight": torch.ones(hidden).bfloat16(),
    }
    for index in range(layers):
        layer = f"model.layers.{index}"
        tensors |= {
            f"{layer}.input_layernorm.weight": torch.ones(hidden).bfloat16(),
            f"{layer}.post_attention_layernorm.weight": torch.ones(hidden).bfloat16(),
            f"{layer}.self_attn.q_proj.weight": weight(heads * head_dim, hidden),
            f"{layer}.self_attn.k_proj.weight": weight(kv_heads * head_dim, hidden),
            f"{layer}.self_attn.v_proj.weight": weight(kv_heads * head_dim, hidden),
            f"{layer}.self_attn.o_proj.weight": weight(hidden, heads * head_dim),
            f"{layer}.mlp.gate_proj.weight": weight(2 * hidden, hidden),
            f"{layer}.mlp.up_proj.weight": weight(2 * hidden, hidden),
            f"{layer}.mlp.down_proj.weight": weight(hidden, 2 * hidden),
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_tokenizer(folder: Path) -> int:
    """Write a tokenizer into folder. Return the size of its vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 1 << 20,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return int(tokenizer.get_vocab_size())


TINYRAG: Final[dict[str, Any]] = {
    "model": {"source": "bundled:tinyrag"},
    # Chunk sizes of its training: short chunks, and a hit includes its whole page.
    "retriever": {"chunking": {"size": 96, "overlap": 16, "window": 2}},
}
