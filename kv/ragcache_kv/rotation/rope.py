"""Reads how a model rotates its keys from config.json, as vLLM 0.32 does.

It refuses a model whose stored keys cannot be moved by a rotation, with a reason. It also refuses
unknown kinds of models. Their settings do not tell which numbers of a key they pair, whether all
layers rotate, or whether a norm follows the rotation. Only a model's code tells that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any

import numpy as np

from ragcache_core.errors import InvalidInput
from ragcache_kv.codecs.numbers import Floats
from ragcache_kv.rotation import frequencies


class Pairing(StrEnum):
    """Which numbers of a key form a pair."""

    HALVES = "halves"  # j and j + rotary_dim / 2; vLLM's is_neox_style
    NEIGHBOURS = "neighbours"  # 2j and 2j + 1


@dataclass(frozen=True, slots=True)
class Rope:
    """How a model rotates its keys.

    Attributes:
        head_dim: Numbers of a key.
        rotary_dim: How many of them, from the first on, are rotated.
        pairing: Which of them form a pair.
        frequencies: Radians per token for each pair, [rotary_dim / 2].
        by_layer: The frequencies of each layer, if layers differ. Those of a layer that does not
            rotate are 0. ``frequencies`` are then those of the first layer.
    """

    head_dim: int
    rotary_dim: int
    pairing: Pairing
    frequencies: tuple[float, ...]
    by_layer: tuple[tuple[float, ...], ...] = ()

    def of_layer(self, index: int) -> Rope:
        """Return the rotation of one layer."""
        return (
            replace(self, frequencies=self.by_layer[index], by_layer=()) if self.by_layer else self
        )

    def of_layers(self, layers: range) -> Rope:
        """Return the rotation of arrays that have these layers only."""
        if not self.by_layer:
            return self
        kept = self.by_layer[layers.start : layers.stop]
        return replace(self, frequencies=kept[0], by_layer=kept)

    @property
    def tables(self) -> tuple[list[Rope], list[int]]:
        """The distinct rotations of layers, and the index of each layer's; one if all share it."""
        of_layers = self.by_layer or (self.frequencies,)
        distinct = list(dict.fromkeys(of_layers))
        ropes = [replace(self, frequencies=one, by_layer=()) for one in distinct]
        return ropes, [distinct.index(one) for one in of_layers]


@dataclass(frozen=True, slots=True)
class _Family:
    """How the code of a kind of model rotates.

    Attributes:
        pairing: Which numbers of a key it pairs.
        theta: Its default, if all versions share one.
        partial: Share of a key's numbers that it rotates.
        unrotated: Type of the layers that do not rotate (``layer_types``), if windows are used.
    """

    pairing: Pairing = Pairing.HALVES
    theta: float | None = None
    partial: float = 1.0
    unrotated: str | None = None


_FAMILIES = {
    "cohere": _Family(Pairing.NEIGHBOURS),
    "cohere2": _Family(Pairing.NEIGHBOURS, unrotated="full_attention"),
    "exaone4": _Family(unrotated="full_attention"),
    "gemma": _Family(),
    "gemma2": _Family(),
    "gemma3_text": _Family(),
    "glm4": _Family(Pairing.NEIGHBOURS, partial=0.5),
    "glm4_moe": _Family(partial=0.5),
    "gpt_oss": _Family(),
    "granite": _Family(),
    "llama": _Family(theta=10_000.0),
    "minimax_m2": _Family(),
    "ministral3": _Family(),
    "mistral": _Family(),
    "mixtral": _Family(),
    "phi3": _Family(),
    "qwen2": _Family(),
    "qwen2_moe": _Family(),
    "qwen3": _Family(),
    "qwen3_moe": _Family(),
}

_REFUSED_TYPES = {
    "dynamic": "its frequencies depend on the length of the whole sequence",
    "mrope": "a position is three numbers, not one",
    "proportional": "it pairs numbers across parts of a key that are not rotated",
}
_REFUSED_FIELDS = {
    "alibi": "the model has no rotary embedding",
    "dual_chunk_attention_config": "each chunk of attention rotates the keys again",
    "kv_lora_rank": "latent attention keeps no keys by head",
    "mrope_section": "a position is three numbers, not one",
    "use_fope": "a key's numbers are mixed, not rotated in pairs",
    "use_mrope": "a position is three numbers, not one",
    "xdrope_section": "a position is more than one number",
}
_FIX = "serve this model without reuse at other positions"
_LIMIT = 1e18  # so that products of two settings are finite in float32
_LARGEST_HEAD = 1 << 16
_THETA = ("rope_theta", "rotary_emb_base")
_PARTIAL = ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction")
_LAYER_TYPES = "layer_types"
_UNROTATED_LAYERS = "no_rope_layers"
_LOCAL_THETA = "rope_local_base_freq"
_LONGROPE = ("longrope", "su")


def read_rope(
    config: Mapping[str, Any], pairing: Pairing | None = None, max_length: int | None = None
) -> Rope:
    """Return the rotation of a model.

    Args:
        config: Its decoder's settings, as ``decoder_config`` or vLLM have them.
        pairing: From the engine's own rotary module (``is_neox_style``), if the caller has it. It
            replaces the knowledge about kinds of models here.
        max_length: Most tokens of prompt and answer. It chooses the table of a model that has one
            for short and one for long sequences, as in vLLM.

    Raises:
        InvalidInput: The keys of this model cannot be rotated, or the config is wrong. The error
            names the field.
    """
    family = _family(config, pairing)
    by_type = _by_layer_type(config)
    if not by_type and config.get(_LOCAL_THETA):
        raise InvalidInput(f"config.json {_LOCAL_THETA}", "layers differ in their rotation", _FIX)
    ropes = {
        kind: _read_one(one, family, pairing or family.pairing, max_length)
        for kind, one in (by_type or {"": config}).items()
    }
    layers = _layers(config, family, ropes)
    if len({rope.rotary_dim for rope in layers}) > 1:
        raise InvalidInput(
            "config.json rope_parameters", "layers rotate unlike shares of their keys", _FIX
        )
    first = layers[0]
    if all(rope == first for rope in layers):
        return first
    return replace(first, by_layer=tuple(rope.frequencies for rope in layers))


def _by_layer_type(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the settings of each type of layer; empty if all layers have the same ones."""
    given = config.get("rope_parameters")
    types = config.get(_LAYER_TYPES)
    if not isinstance(given, Mapping) or not isinstance(types, list):
        return {}
    if not types or not all(isinstance(kind, str) for kind in types):
        return {}
    wanted = set(types)
    if not all(isinstance(given.get(kind), Mapping) for kind in wanted):
        return {}
    return {
        kind: {**config, "rope_parameters": given[kind], "rope_scaling": None} for kind in wanted
    }


def _layers(
    config: Mapping[str, Any], family: _Family, ropes: Mapping[str, Rope]
) -> tuple[Rope, ...]:
    """Return the rotation of each layer, or only that of all layers."""
    every = ropes.get("")
    types = config.get(_LAYER_TYPES)
    unrotated = _unrotated_layers(config, family)
    if every is not None and not any(unrotated):
        return (every,)
    rotated = [every] * len(unrotated) if every else [ropes[kind] for kind in types or ()]
    if unrotated and len(unrotated) != len(rotated):
        raise InvalidInput(
            f"config.json {_UNROTATED_LAYERS}", "has another length than layer_types", _FIX
        )
    still = unrotated or [False] * len(rotated)
    return tuple(
        replace(rope, frequencies=(0.0,) * len(rope.frequencies)) if stays else rope
        for rope, stays in zip(rotated, still, strict=True)
    )


def _unrotated_layers(config: Mapping[str, Any], family: _Family) -> list[bool]:
    """Return for each layer whether it leaves keys as they are; empty: no layer does."""
    given = config.get(_UNROTATED_LAYERS)
    if isinstance(given, list) and given:
        return [not rotates for rotates in given]
    types = config.get(_LAYER_TYPES)
    if family.unrotated and isinstance(types, list) and config.get("sliding_window"):
        return [kind == family.unrotated for kind in types]
    return []


def _read_one(
    config: Mapping[str, Any], family: _Family, pairing: Pairing, max_length: int | None
) -> Rope:
    """Return the rotation by settings that are those of all layers, or of one type of layer."""
    _refuse(config, "config.json ")
    kind = config.get("position_embedding_type")
    if kind not in (None, "rope", "rotary"):
        raise InvalidInput(
            "config.json position_embedding_type", f"{kind!r} is no rotary embedding", _FIX
        )
    settings = _settings(config, family)
    head_dim = _head_dim(config)
    rotary_dim = _rotary_dim(settings, head_dim)
    theta = settings.number("rope_theta")
    if theta <= 1:
        raise settings.wrong("rope_theta", "is not above 1", "correct the model folder")
    try:
        with np.errstate(all="ignore"):
            plain = frequencies.PlainRope(theta, rotary_dim)
            radians = _frequencies(settings, plain, max_length)
    except OverflowError:
        radians = np.full(rotary_dim // 2, np.inf)
    if not np.isfinite(radians).all():
        raise InvalidInput(
            f"config.json {settings.field}",
            "the settings give frequencies that are not finite",
            "correct the model folder",
        )
    return Rope(head_dim, rotary_dim, pairing, tuple(radians.tolist()))


@dataclass(frozen=True, slots=True)
class _Settings:
    """The rope settings of a config. field: Name of the dict that has them."""

    field: str
    values: Mapping[str, Any]

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive number. Raises InvalidInput if it is missing or not positive."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.wrong(name, "is missing", "add it as the model's publisher gives it")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and 0 < value < _LIMIT):
            raise self.wrong(
                name, f"{value!r} is not a positive number", "correct the model folder"
            )
        return float(value)

    def numbers(self, name: str, count: int) -> list[float]:
        """Return a list of positive numbers. Raises InvalidInput if it is none, or not so long."""
        given = self.values.get(name)
        if not isinstance(given, list) or len(given) != count:
            raise self.wrong(name, f"is no list of {count} numbers", "correct the model folder")
        return [_Settings(f"{self.field}.{name}", {"n": one}).number("n") for one in given]

    def wrong(self, name: str, problem: str, fix: str) -> InvalidInput:
        """Return the error about one setting."""
        return InvalidInput(f"config.json {self.field}.{name}", problem, fix)


def _family(config: Mapping[str, Any], pairing: Pairing | None) -> _Family:
    model_type = config.get("model_type")
    family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is not None:
        return family
    if pairing is not None:
        return _Family(pairing)
    raise InvalidInput(
        "config.json model_type",
        f"the rotation of models of type {model_type!r} is unknown",
        f"use one of {', '.join(sorted(_FAMILIES))}, or {_FIX}",
    )


def _refuse(values: Mapping[str, Any], path: str) -> None:
    for name, reason in _REFUSED_FIELDS.items():
        if values.get(name):
            raise InvalidInput(f"{path}{name}", reason, _FIX)


def _settings(config: Mapping[str, Any], family: _Family) -> _Settings:
    """Collect all rope settings. rope_scaling precedes its newer name, as in transformers.

    theta and the rotated share of a key may also be outside of that dict, under other names.
    """
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = _object(config, field)
    _refuse(given, f"config.json {field}.")
    values = {**given, "rope_theta": family.theta, "partial_rotary_factor": family.partial}
    for source in (config, given):
        for name, spellings in (("rope_theta", _THETA), ("partial_rotary_factor", _PARTIAL)):
            found = [source[spelling] for spelling in spellings if source.get(spelling) is not None]
            values[name] = found[0] if found else values[name]
    original = "original_max_position_embeddings"
    values["rope_dim"] = given.get("rope_dim") or config.get("rotary_dim")
    lengths = (config.get(original), given.get(original), config.get("max_position_embeddings"))
    values[original] = next(filter(None, lengths), None)
    return _Settings(field, values)


def _object(config: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """Return an object of a config; empty if absent. All layers must have the same settings."""
    given = config.get(field) or {}
    if not isinstance(given, Mapping):
        raise InvalidInput(f"config.json {field}", "is no object", "correct the model folder")
    for name, value in given.items():
        if isinstance(value, Mapping):
            raise InvalidInput(
                f"config.json {field}.{name}", "layers differ in their rotation", _FIX
            )
    return given


def _head_dim(config: Mapping[str, Any]) -> int:
    try:
        given = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        head_dim = int(given)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise InvalidInput(
            "config.json head_dim",
            f"cannot be read: {error!r}",
            "name a Hugging Face decoder model",
        ) from error
    if not 0 < head_dim <= _LARGEST_HEAD:
        raise InvalidInput(
            "config.json head_dim", f"{head_dim} is no size of a head", "correct the model folder"
        )
    return head_dim


def _rotary_dim(settings: _Settings, head_dim: int) -> int:
    if settings.values.get("rope_dim"):
        name, rotary_dim = "rope_dim", int(settings.number("rope_dim"))
    else:
        name = "partial_rotary_factor"
        rotary_dim = int(head_dim * settings.number(name))
    if rotary_dim % 2 or head_dim % 2 or not 0 < rotary_dim <= head_dim:
        problem = f"rotates {rotary_dim} of {head_dim} numbers of a key"
        raise settings.wrong(name, problem, "correct the model folder")
    return rotary_dim


def _frequencies(
    settings: _Settings, rope: frequencies.PlainRope, max_length: int | None
) -> frequencies.Frequencies:
    kind = _kind(settings)
    if kind in _LONGROPE:
        return _long_frequencies(settings, rope, max_length)
    match kind:
        case "default":
            return frequencies.plain(rope)
        case "linear":
            return frequencies.linear(rope, settings.number("factor"))
        case "llama3":
            return frequencies.llama3(
                rope,
                settings.number("factor"),
                settings.number("low_freq_factor"),
                settings.number("high_freq_factor"),
                settings.number("original_max_position_embeddings"),
            )
        case "ntk":
            mixed = settings.values.get("mixed_b")
            mixed_b = None if mixed is None else settings.number("mixed_b")
            return frequencies.ntk(rope, settings.number("factor"), mixed_b)
        case "yarn":
            return frequencies.yarn(
                rope,
                settings.number("factor"),
                settings.number("original_max_position_embeddings"),
                settings.number("beta_fast", 32),
                settings.number("beta_slow", 1),
                settings.values.get("truncate", True) is not False,
            )
    raise settings.wrong(
        _kind_name(settings), f"{kind!r}: {_REFUSED_TYPES.get(kind, 'unknown')}", _FIX
    )


def _long_frequencies(
    settings: _Settings, rope: frequencies.PlainRope, max_length: int | None
) -> frequencies.Frequencies:
    """Return the frequencies of the table that vLLM takes for all sequences of an engine."""
    if max_length is None:
        raise settings.wrong(
            _kind_name(settings), "the most tokens of a sequence decide between two tables", _FIX
        )
    is_long = max_length > settings.number("original_max_position_embeddings")
    name = "long_factor" if is_long else "short_factor"
    return frequencies.divided(rope, settings.numbers(name, rope.rotary_dim // 2))


def _kind_name(settings: _Settings) -> str:
    return "rope_type" if "rope_type" in settings.values else "type"


def _kind(settings: _Settings) -> str:
    names = {str(settings.values[n]) for n in ("rope_type", "type") if settings.values.get(n)}
    if len(names) > 1:
        both = "does not agree with type, its older name"
        raise settings.wrong("rope_type", both, "correct the model folder")
    return names.pop() if names else "default"


_CACHED = 256
"""Cached tables: all layers of a chunk need the same one, and chunks arrive layer by layer."""


@lru_cache(_CACHED)
def cos_sin(rope: Rope, delta: int) -> Floats:
    """Return the cosines and sines of a difference of delta tokens. Callers must not write to them.

    The angles are float64, where delta times a float32 frequency is exact. At 100,000 tokens the
    error of a float32 angle would be as large as the rounding of bfloat16.

    Returns:
        [2, rotary_dim / 2] float32: cosines, then sines.
    """
    angles = np.array(rope.frequencies) * delta
    return np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)
