"""What the files of an embedding model say: its limits, its prompts and its fingerprint."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_kv.model.weights import digest_weights

log = logging.getLogger(__name__)

_MAX_TOKENS = 8192
"""Chunks are shorter, and the time of attention grows with the square."""
_QUERY_PROMPTS = ("query",)
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")
_DESCRIBED_BY = (
    "config.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "tokenizer.json",
)
_DOWNLOADED = ["*.json", "*.safetensors", "*.txt"]
_NOT_DOWNLOADED = ["onnx/*", "openvino/*"]
_ENCODER_POSITIONS_OFFSET = frozenset({"roberta", "xlm-roberta", "camembert", "mpnet"})
"""Families whose positions begin after the padding token's."""
_MODE = "pooling_mode_"
_POOLINGS = {
    f"{_MODE}mean_tokens": "mean",
    f"{_MODE}mean": "mean",
    f"{_MODE}cls_token": "cls",
    f"{_MODE}cls": "cls",
}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """An embedding model in a folder.

    Attributes:
        fingerprint: Equal for copies of a model, and for no others. 32 hex digits.
        max_tokens: Most tokens of a text that the model reads.
        query_prompt: Text before each query.
        document_prompt: Text before each document.
        lower_case: Whether the model wants texts in lower case.
        pooling: ``mean`` or ``cls`` for a BERT that BertEncoder computes, else None.
    """

    folder: Path
    fingerprint: str
    max_tokens: int
    query_prompt: str
    document_prompt: str
    lower_case: bool
    pooling: str | None


def hub_reference(name: str, setting: str) -> tuple[str, str | None]:
    """Return the name of a model of the hub, and the commit that is wanted of it.

    Without a commit the log has a warning: the owner of the model may change what is loaded.

    Args:
        name: Like ``ORGANISATION/NAME@COMMIT``.
        setting: Variable that has the name, for the warning.
    """
    model, _, commit = name.partition("@")
    if not commit:
        log.warning("model files: not pinned setting=%s model=%s fix=add @COMMIT", setting, model)
    return model, commit or None


def download(name: str) -> Path:
    """Return the folder of a model of the Hugging Face hub, downloaded unless it is cached.

    Args:
        name: Like ``ORGANISATION/NAME@COMMIT``.

    Raises:
        InvalidInput: There is no such model.
        Unavailable: The hub does not answer.
    """
    import httpx  # noqa: PLC0415
    from huggingface_hub import snapshot_download  # noqa: PLC0415  slow to import
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError  # noqa: PLC0415

    model, commit = hub_reference(name, "RAGCACHE_EMBEDDER")
    try:
        return Path(
            snapshot_download(
                model,
                revision=commit,
                allow_patterns=_DOWNLOADED,
                ignore_patterns=_NOT_DOWNLOADED,
            )
        )
    except (LocalEntryNotFoundError, httpx.TransportError, OSError) as error:
        if isinstance(error, HfHubHTTPError) and not _is_temporary(error):
            raise _refused(f"hf:{name} cannot be downloaded: {error}") from error
        raise Unavailable("embedder", f"hf:{name} cannot be downloaded now: {error}") from error
    except ValueError as error:
        raise _refused(f"hf:{name} names no model: {error}") from error


def read_model_files(folder: Path) -> ModelFiles:
    """Read a folder in the form of sentence-transformers or of the transformers library.

    Raises:
        InvalidInput: It has no model that can be used.
    """
    config = _read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise _refused(f"{folder} holds no config.json")
    if not (folder / "tokenizer.json").is_file():
        raise _refused(f"{folder} holds no tokenizer.json, so its tokenizer is not a fast one")
    if not any(folder.glob("*.safetensors")):
        raise _refused(f"{folder} holds no *.safetensors")
    try:
        return _model_files(folder, config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _refused(f"{folder} has an unknown form: {error!r}") from error


def _model_files(folder: Path, config: Mapping[str, Any]) -> ModelFiles:
    settings = _read_json(folder / "sentence_bert_config.json") or {}
    prompts = _read_json(folder / "config_sentence_transformers.json") or {}
    return ModelFiles(
        folder=folder,
        fingerprint=_fingerprint(folder, config),
        max_tokens=_max_tokens(folder, config, settings),
        query_prompt=_prompt(prompts, _QUERY_PROMPTS),
        document_prompt=_prompt(prompts, _DOCUMENT_PROMPTS),
        lower_case=bool(settings.get("do_lower_case", False)),
        pooling=_bert_pooling(folder, config),
    )


def _max_tokens(folder: Path, config: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
    offset = 2 if config.get("model_type") in _ENCODER_POSITIONS_OFFSET else 0
    tokenizer = _read_json(folder / "tokenizer_config.json") or {}
    limits = [
        settings.get("max_seq_length"),
        tokenizer.get("model_max_length"),
        int(config.get("max_position_embeddings") or _MAX_TOKENS) - offset,
        _MAX_TOKENS,
    ]
    return min(int(limit) for limit in limits if limit)


def _prompt(settings: Mapping[str, Any], names: tuple[str, ...]) -> str:
    prompts = settings.get("prompts") or {}
    for name in (*names, settings.get("default_prompt_name")):
        if prompts.get(name):
            return str(prompts[name])
    return ""


def _bert_pooling(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the pooling of a model that BertEncoder computes, else None."""
    if (
        config.get("model_type") != "bert"
        or config.get("hidden_act", "gelu") != "gelu"
        or config.get("position_embedding_type", "absolute") != "absolute"
        or config.get("is_decoder", False)
    ):
        return None
    modules = _read_json(folder / "modules.json")
    if modules is None:
        return "mean"
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or set(kinds[2:]) - {"Normalize"}:
        return None
    pooling = _read_json(folder / modules[1]["path"] / "config.json") or {}
    if not pooling.get("include_prompt", True):
        return None
    modes = {name for name, chosen in pooling.items() if name.startswith(_MODE) and chosen is True}
    modes |= {_MODE + pooling["pooling_mode"]} if "pooling_mode" in pooling else set()
    return _POOLINGS.get(modes.pop()) if len(modes) == 1 else None


def _fingerprint(folder: Path, config: Mapping[str, Any]) -> str:
    """Return a digest of the settings and of the weights, sampled as those of a served model."""
    hasher = hashlib.blake2b(digest_size=16, person=b"ragcache-embed")
    pooling = sorted(path.relative_to(folder).as_posix() for path in folder.glob("*/config.json"))
    for name in (*_DESCRIBED_BY, *pooling):
        path = folder / name
        content = path.read_bytes() if path.is_file() else b""
        hasher.update(f"{name}\0{len(content)}\0".encode() + content)
    weights = [path.relative_to(folder).as_posix() for path in folder.rglob("*.safetensors")]
    try:
        hasher.update(digest_weights(folder, weights, int(config.get("vocab_size") or 0)))
    except (OSError, ValueError) as error:
        raise _refused(f"{folder} cannot be loaded: {error}") from error
    return hasher.hexdigest()


def _read_json(path: Path) -> Any:
    """Return the content of a file; None without the file."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _refused(f"{path} cannot be read: {error}") from error


def _is_temporary(error: Any) -> bool:
    status = getattr(error.response, "status_code", 500)
    return bool(status >= 500 or status == 429)


def _refused(problem: str) -> InvalidInput:
    return InvalidInput(
        "RAGCACHE_EMBEDDER", problem, "name a sentence-transformers model with safetensors"
    )
