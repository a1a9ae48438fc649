"""Writes small embedding models with random weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import BertProcessing

WORDS: Final = (
    *("the", "volcano", "erupts", "lava", "flows", "bread", "is", "baked", "satellite", "planet"),
    *("moon", "query", "doc", ":"),
)
LETTERS: Final = "abcdefghijklmnopqrstuvwxyz0123456789.,?!"
BERT_CONFIG: Final[dict[str, Any]] = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "hidden_act": "gelu",
    "max_position_embeddings": 48,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}
POOLING: Final[dict[str, Any]] = {
    "word_embedding_dimension": 32,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": True,
}


def write_model_files(
    folder: Path,
    *,
    seed: int = 0,
    modules: Sequence[str] = (),
    pooling: dict[str, Any] | None = None,
) -> Path:
    """Write a BERT, and modules as sentence-transformers writes them. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    config = BERT_CONFIG | {"vocab_size": tokenizer.get_vocab_size()}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(config, seed), folder / "model.safetensors", {"format": "pt"})
    if modules:
        paths = ["", *(f"{i}_{kind}" for i, kind in enumerate(modules[1:], 1))]
        rows = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, path) in enumerate(zip(modules, paths, strict=True))
        ]
        (folder / "modules.json").write_text(json.dumps(rows))
        for path in paths[1:]:
            (folder / path).mkdir(exist_ok=True)
        (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    return folder


def _tokenizer() -> Tokenizer:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, *LETTERS, *(f"##{c}" for c in LETTERS)]
    tokenizer = Tokenizer(WordPiece({t: i for i, t in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer()
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.post_processor = BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    return tokenizer


def _weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    draw = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]

    def linear(name: str, rows: int, columns: int) -> dict[str, Any]:
        weight = draw.standard_normal((rows, columns), np.float32) / columns**0.5
        bias = draw.standard_normal(rows, np.float32) / 10
        return {f"{name}.weight": weight, f"{name}.bias": bias}

    def norm(name: str) -> dict[str, Any]:
        weight = 1 + draw.standard_normal(hidden, np.float32) / 10
        return {f"{name}.weight": weight, f"{name}.bias": weight - 1}

    def table(rows: int) -> Any:
        return draw.standard_normal((rows, hidden), np.float32)

    tensors = {
        "embeddings.word_embeddings.weight": table(config["vocab_size"]),
        "embeddings.position_embeddings.weight": table(config["max_position_embeddings"]),
        "embeddings.token_type_embeddings.weight": table(config["type_vocab_size"]),
        **norm("embeddings.LayerNorm"),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        for part in ("query", "key", "value"):
            tensors |= linear(f"{layer}.attention.self.{part}", hidden, hidden)
        tensors |= linear(f"{layer}.attention.output.dense", hidden, hidden)
        tensors |= norm(f"{layer}.attention.output.LayerNorm")
        tensors |= linear(f"{layer}.intermediate.dense", inner, hidden)
        tensors |= linear(f"{layer}.output.dense", hidden, inner)
        tensors |= norm(f"{layer}.output.LayerNorm")
    return tensors
