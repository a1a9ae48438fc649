"""Reads what the sizes need to know of a model, from its folder or the catalog."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ragcache_cli.local.site import checkout_model
from ragcache_cli.models.catalog import FETCHED_MODELS
from ragcache_core.errors import InvalidInput
from ragcache_core.identity.fingerprint import kv_space
from ragcache_core.sizing.choices import SizedModel
from ragcache_kv.model_weights import read_weights_bytes
from ragcache_kv.values.layout import ELEMENT_BYTES, value_bytes
from ragcache_operator.builders.components.weights import weights_bytes
from ragcache_operator.spec import BUNDLED_MODELS, ModelSpec

KvType = Literal["auto", "bfloat16", "float16", "float32"]
_BUNDLED = "bundled:"


@dataclass(frozen=True, slots=True)
class ReadModel:
    """A model. source: Its ``spec.model.source``; None for a folder of this machine."""

    size: SizedModel
    source: str | None


def read_model(name: str, dtype: KvType, given_weights_bytes: int | None) -> ReadModel:
    """Read a bundled model, like ``smollm2``, or a folder with a ``config.json``.

    Args:
        given_weights_bytes: Size of the weights. None: that of the files.

    Raises:
        InvalidInput: There is no such model, or its size is unknown.
    """
    bundled = name.removeprefix(_BUNDLED)
    if bundled in BUNDLED_MODELS:
        source = f"{_BUNDLED}{bundled}"
        config = _bundled_config(bundled)
        num_bytes = weights_bytes(ModelSpec(source=source, dtype=dtype))
        return ReadModel(_sized(config, dtype, given_weights_bytes or num_bytes), source)
    folder = Path(name)
    if not folder.is_dir():
        names = ", ".join(BUNDLED_MODELS)
        raise InvalidInput("--model", f"{name!r} is no folder and none of {names}", "name one")
    config = _read_config(folder / "config.json")
    if given_weights_bytes is None:
        given_weights_bytes = read_weights_bytes(str(folder), dtype)
    if given_weights_bytes is None:
        raise InvalidInput(
            "--weights", f"is not given, and {folder} has no weights", "write bytes like 16Gi"
        )
    return ReadModel(_sized(config, dtype, given_weights_bytes), None)


def _bundled_config(name: str) -> dict[str, Any]:
    """Return the sizes of a bundled model in the words of ``config.json``."""
    if name in FETCHED_MODELS:
        return dict(FETCHED_MODELS[name].kv_config)
    folder = checkout_model(name)
    if folder is None:
        raise InvalidInput("--model", f"this installation has no {name}", "name another model")
    return _read_config(folder / "config.json")


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        problem = f"{path} cannot be read ({error})"
        raise InvalidInput("--model", problem, "name a Hugging Face model folder") from error
    if not isinstance(config, dict):
        raise InvalidInput("--model", f"{path} is no JSON object", "correct the model folder")
    return config


def _sized(config: dict[str, Any], dtype: KvType, num_bytes: int) -> SizedModel:
    space = kv_space("", config, dtype)
    if space.dtype not in ELEMENT_BYTES:
        known = ", ".join(ELEMENT_BYTES)
        raise InvalidInput("--dtype", f"{space.dtype} is none of {known}", "name one of them")
    token_bytes = value_bytes(space, 1)
    if token_bytes <= 0:
        raise InvalidInput("config.json", "gives KV without bytes", "name a decoder model")
    return SizedModel(token_bytes, space.num_layers, space.dtype, num_bytes)
