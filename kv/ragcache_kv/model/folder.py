"""A model on disk, and the KV space that it defines."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
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

_COMMIT: Final = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A Hugging Face model on disk. config: Its config.json."""

    path: Path
    config: dict[str, Any]
    fingerprint: str

    def space(
        self,
        dtype: str,
        store_key: StoreKey | None = None,
        max_length: int | None = None,
        num_ranks: int = 1,
    ) -> KVSpace:
        """Return the KV space.

        Args:
            dtype: Of keys and values. ``auto``: that of the checkpoint.
            store_key: The platform's; None: it has none.
            max_length: Most tokens of prompt and answer together (``kv_space``).
            num_ranks: Tensor parallel ranks of an engine.
        """
        name_key = b"" if store_key is None else store_key.names
        space = kv_space(self.fingerprint, self.config, dtype, name_key, max_length)
        return replace(space, num_ranks=num_ranks)


def load_model_folder(
    source: str, revision: str | None = None, *, with_weights: bool = True
) -> ModelFolder:
    """Find a model and compute its fingerprint.

    The weights of a folder are a part of it, so a share of them is read. In the cache of the
    Hugging Face hub, the commit stands for the weights, and a name's weights are not downloaded.

    Args:
        source: A folder, or a Hugging Face name, whose snapshot is downloaded unless it is cached.
            A name may end with ``@COMMIT``.
        revision: Branch, tag or commit of a Hugging Face name without one. None: the default
            branch.
        with_weights: Whether KV of the model is stored. Without it, the weights of a folder are not
            read, and its fingerprint is another one.

    Raises:
        InvalidInput: The model does not exist, or it lacks files that serving needs.
    """
    path = _folder(source, ["*.json", "*.jinja"], revision)
    config = _read_json(path / "config.json")
    _tokenizer(path)
    try:
        others = {
            name: (path / name).read_bytes() for name in _OTHER_FILES if (path / name).is_file()
        }
        commit = _commit(path)
        if commit is None:
            weights = _weights(path, _vocabulary(config) if with_weights else None)
        else:
            weights = commit.encode()
    except (OSError, ValueError) as error:
        raise InvalidInput("model.source", str(error), "correct the model folder") from error
    return ModelFolder(path, config, model_fingerprint(config, others, weights))


def _commit(folder: Path) -> str | None:
    """Return the commit of a snapshot in the hub's cache; None for another folder.

    vLLM gives this folder in place of a name when it is offline.
    """
    name, parents = folder.name, [parent.name for parent in folder.parents]
    in_cache = parents[:1] == ["snapshots"] and parents[1].startswith("models--")
    return name if in_cache and _COMMIT.fullmatch(name) else None


def _weights(folder: Path, vocabulary: int | None) -> bytes:
    """Return the digest of a folder's weights. vocabulary None: of none."""
    names = [] if vocabulary is None else [file.name for file in folder.glob("*.safetensors")]
    if vocabulary is not None and not names:
        raise InvalidInput(
            "model.source", f"{folder} holds no *.safetensors", "name a model with safetensors"
        )
    return digest_weights(folder, names, vocabulary or 0)


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
