"""A model on disk, and the KV space that it defines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.fingerprint import (
    WEIGHT_SAMPLE_BYTES,
    WeightsSample,
    kv_space,
    model_fingerprint,
)
from ragcache_core.identity.keys import KVSpace


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A Hugging Face model on disk. config: Its config.json."""

    path: Path
    config: dict[str, Any]
    fingerprint: str

    def space(self, dtype: str) -> KVSpace:
        """Return the KV space with KV of dtype (``auto``: that of the checkpoint)."""
        return kv_space(self.fingerprint, self.config, dtype)


def load_model_folder(source: str) -> ModelFolder:
    """Find a model and compute its fingerprint. It reads at most 2 MiB of each weights file.

    Args:
        source: A folder, or a Hugging Face name, whose snapshot is downloaded unless it is cached.

    Raises:
        InvalidInput: The model does not exist, or it lacks files that serving needs.
    """
    path = _folder(source, ["*.json", "*.safetensors", "*.jinja"])
    config = _read_json(path / "config.json")
    tokenizer = _tokenizer(path)
    weights = [_sample(file) for file in sorted(path.glob("*.safetensors"))]
    if not weights:
        raise InvalidInput(
            "model.source", f"{path} holds no *.safetensors", "name a model with safetensors"
        )
    fingerprint = model_fingerprint(config, tokenizer.read_bytes(), weights)
    return ModelFolder(path, config, fingerprint)


def find_tokenizer(source: str) -> Path:
    """Return the folder with a model's tokenizer. It downloads no weights.

    Raises:
        InvalidInput: The model does not exist, or it has no tokenizer.json.
    """
    folder = _folder(source, ["tokenizer*", "special_tokens_map.json", "*.jinja", "config.json"])
    return _tokenizer(folder).parent


def _folder(source: str, patterns: list[str]) -> Path:
    path = Path(source)
    return path if path.is_dir() else _snapshot(source, patterns)


def _tokenizer(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InvalidInput(
            "model.source",
            f"{folder} holds no tokenizer.json",
            "name a model with a fast tokenizer",
        )
    return path


def _snapshot(name: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415  only for names, not for folders
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError) as error:
        raise InvalidInput(
            "model.source",
            f"{name!r} is neither a folder nor a model on the Hugging Face hub: {error}",
            "check the name, the token and the network, or name a folder",
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidInput(
            "model.source", f"{path} cannot be read: {error}", "name a Hugging Face model folder"
        ) from error
    if not isinstance(value, dict):
        raise InvalidInput(
            "model.source", f"{path} is not a JSON object", "correct the model folder"
        )
    return value


def _sample(path: Path) -> WeightsSample:
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(WEIGHT_SAMPLE_BYTES)
        file.seek(max(0, size - WEIGHT_SAMPLE_BYTES))
        return WeightsSample(path.name, size, first, file.read(WEIGHT_SAMPLE_BYTES))
