"""A model on disk, and the KV space that it defines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.fingerprint import kv_space, model_fingerprint
from ragcache_core.identity.keys import KVSpace
from ragcache_core.identity.store_key import StoreKey
from ragcache_kv.model.weights import digest_weights

_OTHER_FILES: Final = ("tokenizer.json", "params.json", "hf_quant_config.json")
"""Files besides config.json that change KV. The last two have settings that vLLM reads: those of
Mistral's format, and those of quantization by ModelOpt."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A Hugging Face model on disk. config: Its config.json."""

    path: Path
    config: dict[str, Any]
    fingerprint: str

    def space(self, dtype: str, store_key: StoreKey | None = None) -> KVSpace:
        """Return the KV space with KV of dtype (``auto``: that of the checkpoint)."""
        name_key = b"" if store_key is None else store_key.names
        return kv_space(self.fingerprint, self.config, dtype, name_key)


def load_model_folder(
    source: str, revision: str | None = None, *, with_weights: bool = True
) -> ModelFolder:
    """Find a model and compute its fingerprint, which reads a part of the weights.

    Args:
        source: A folder, or a Hugging Face name, whose snapshot is downloaded unless it is cached.
            A name may end with ``@COMMIT``.
        revision: Branch, tag or commit of a Hugging Face name without one. None: the default
            branch.
        with_weights: Whether KV of the model is stored. Without it, weights are neither downloaded
            nor read, and the fingerprint is another one.

    Raises:
        InvalidInput: The model does not exist, or it lacks files that serving needs.
    """
    patterns = ["*.json", "*.jinja", *(["*.safetensors"] if with_weights else [])]
    path = _folder(source, patterns, revision)
    config = _read_json(path / "config.json")
    _tokenizer(path)
    names = [file.name for file in path.glob("*.safetensors")] if with_weights else []
    if with_weights and not names:
        raise InvalidInput(
            "model.source", f"{path} holds no *.safetensors", "name a model with safetensors"
        )
    try:
        others = {
            name: (path / name).read_bytes() for name in _OTHER_FILES if (path / name).is_file()
        }
        weights = digest_weights(path, names, _vocabulary(config))
    except (OSError, ValueError) as error:
        raise InvalidInput("model.source", str(error), "correct the model folder") from error
    return ModelFolder(path, config, model_fingerprint(config, others, weights))


def find_tokenizer(source: str) -> Path:
    """Return the folder with a model's tokenizer. It downloads no weights.

    Raises:
        InvalidInput: The model does not exist, or it has no tokenizer.json.
    """
    folder = _folder(source, ["tokenizer*", "special_tokens_map.json", "*.jinja", "config.json"])
    return _tokenizer(folder).parent


def _folder(source: str, patterns: list[str], revision: str | None = None) -> Path:
    path = Path(source)
    if path.is_dir():
        return path
    name, _, commit = source.partition("@")
    return _snapshot(name, patterns, commit or revision)


def _vocabulary(config: Mapping[str, Any]) -> int:
    """Return the number of tokens that a model knows; 0: unknown."""
    for settings in (config, config.get("text_config")):
        size = settings.get("vocab_size") if isinstance(settings, dict) else None
        if isinstance(size, int):
            return size
    return 0


def _tokenizer(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InvalidInput(
            "model.source",
            f"{folder} holds no tokenizer.json",
            "name a model with a fast tokenizer",
        )
    return path


def _snapshot(name: str, patterns: list[str], revision: str | None) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415  only for names, not for folders
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
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
