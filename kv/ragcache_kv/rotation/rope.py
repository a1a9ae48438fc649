"""Which rotation a model gives its keys, read from config.json as vLLM 0.32 reads it.

What cannot be undone by a rotation of the stored key is refused with a reason, and so is every
model not known here: besides its settings it matters which numbers of a key it pairs, that all its
layers rotate, and that nothing comes after the rotation (a norm, say). All that is in a model's
code and not in its config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from ragcache_core.errors import InvalidInput
from ragcache_kv.rotation import frequencies


class Pairing(StrEnum):
    """Which numbers of a key turn together."""

    HALVES = "halves"  # j and j + rotary_dim / 2; vLLM's is_neox_style
    NEIGHBOURS = "neighbours"  # 2j and 2j + 1


@dataclass(frozen=True, slots=True)
class Rope:
    """How a model rotates its keys.

    rotary_dim: how many of a key's first numbers turn. frequencies: radians a token for each pair,
    [rotary_dim / 2].
    """

    head_dim: int
    rotary_dim: int
    pairing: Pairing
    frequencies: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Family:
    """What the code of a kind of model says. theta: its default, if all agree on one."""

    pairing: Pairing = Pairing.HALVES
    theta: float | None = None
    partial: float = 1.0


_FAMILIES = {
    "cohere": _Family(Pairing.NEIGHBOURS),
    "gemma": _Family(),
    "gemma2": _Family(),
    "glm4": _Family(Pairing.NEIGHBOURS, partial=0.5),
    "granite": _Family(),
    "llama": _Family(theta=10_000.0),
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
    "longrope": "it has two tables of frequencies, and the length of the sequence says which",
    "su": "it has two tables of frequencies, and the length of the sequence says which",
    "mrope": "a position is three numbers, not one",
    "proportional": "it pairs numbers across parts of a key that do not turn",
}
_REFUSED_FIELDS = {
    "alibi": "the model has no rotary embedding",
    "dual_chunk_attention_config": "keys are rotated anew for each chunk of attention",
    "kv_lora_rank": "latent attention keeps no keys by head",
    "mrope_section": "a position is three numbers, not one",
    "no_rope_layers": "some layers do not rotate",
    "rope_local_base_freq": "layers differ in their rotation",
    "use_fope": "a key's numbers are mixed, not rotated in pairs",
    "use_mrope": "a position is three numbers, not one",
    "xdrope_section": "a position is more than one number",
}
_FIX = "serve this model without reuse at other positions"
_LIMIT = 1e18  # so that products of two settings are finite in float32
_LARGEST_HEAD = 1 << 16
_THETA = ("rope_theta", "rotary_emb_base")
_PARTIAL = ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction")


def read_rope(config: Mapping[str, Any], pairing: Pairing | None = None) -> Rope:
    """The rotation of a model. config: its config.json, as ``ModelFolder`` has it.

    pairing: from the engine's own rotary module (``is_neox_style``), for whoever has looked at it;
    it stands for the knowledge that is kept here of kinds of models.
    Raises InvalidInput, which names the field, if keys of this model cannot be rotated or the
    config is wrong.
    """
    family = _family(config, pairing)
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
        raise settings.wrong("rope_theta", "is not above 1", "repair the model folder")
    try:
        with np.errstate(all="ignore"):
            turning = _frequencies(settings, theta, rotary_dim)
    except OverflowError:
        turning = np.full(rotary_dim // 2, np.inf)
    if not np.isfinite(turning).all():
        raise InvalidInput(
            f"config.json {settings.field}", "its numbers make none", "repair the model folder"
        )
    return Rope(head_dim, rotary_dim, pairing or family.pairing, tuple(turning.tolist()))


@dataclass(frozen=True, slots=True)
class _Settings:
    """Rope settings of a config, gathered from where they may lie. field: the dict's own name."""

    field: str
    values: Mapping[str, Any]

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number. Raises InvalidInput; also if it is absent and has no default."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.wrong(name, "is missing", "add it as the model's maker gives it")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and 0 < value < _LIMIT):
            raise self.wrong(name, f"{value!r} is no positive number", "repair the model folder")
        return float(value)

    def wrong(self, name: str, problem: str, fix: str) -> InvalidInput:
        """What to raise about one of them."""
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
        f"how models of type {model_type!r} rotate their keys is not known here",
        f"use one of {', '.join(sorted(_FAMILIES))}, or {_FIX}",
    )


def _refuse(values: Mapping[str, Any], place: str) -> None:
    for name, reason in _REFUSED_FIELDS.items():
        value = values.get(name)
        every_layer = name == "no_rope_layers" and isinstance(value, list) and all(value)
        if value and not every_layer:
            raise InvalidInput(f"{place}{name}", reason, _FIX)


def _settings(config: Mapping[str, Any], family: _Family) -> _Settings:
    """All rope settings in one dict; rope_scaling goes before its newer name, as in transformers.

    theta and the share of a key that turns may lie beside that dict, under names of their own.
    """
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = _object(config, field)
    _refuse(given, f"config.json {field}.")
    values = {**given, "rope_theta": family.theta, "partial_rotary_factor": family.partial}
    for place in (config, given):
        for name, spellings in (("rope_theta", _THETA), ("partial_rotary_factor", _PARTIAL)):
            found = [place[spelling] for spelling in spellings if place.get(spelling) is not None]
            values[name] = found[0] if found else values[name]
    original = "original_max_position_embeddings"
    lengths = (config.get(original), given.get(original), config.get("max_position_embeddings"))
    values[original] = next(filter(None, lengths), None)
    return _Settings(field, values)


def _object(config: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """One of a config's objects, empty if absent; the settings of all layers alike."""
    given = config.get(field) or {}
    if not isinstance(given, Mapping):
        raise InvalidInput(f"config.json {field}", "is no object", "repair the model folder")
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
            f"cannot be told: {error!r}",
            "name a Hugging Face decoder model",
        ) from error
    if not 0 < head_dim <= _LARGEST_HEAD:
        raise InvalidInput(
            "config.json head_dim", f"{head_dim} is no size of a head", "repair the model folder"
        )
    return head_dim


def _rotary_dim(settings: _Settings, head_dim: int) -> int:
    if settings.values.get("rope_dim"):
        name, rotary_dim = "rope_dim", int(settings.number("rope_dim"))
    else:
        name = "partial_rotary_factor"
        rotary_dim = int(head_dim * settings.number(name))
    if rotary_dim % 2 or head_dim % 2 or not 0 < rotary_dim <= head_dim:
        problem = f"makes {rotary_dim} of {head_dim} numbers of a key turn"
        raise settings.wrong(name, problem, "repair the model folder")
    return rotary_dim


def _frequencies(settings: _Settings, theta: float, rotary_dim: int) -> frequencies.Frequencies:
    kind = _kind(settings)
    match kind:
        case "default":
            return frequencies.plain(theta, rotary_dim)
        case "linear":
            return frequencies.linear(theta, rotary_dim, settings.number("factor"))
        case "llama3":
            return frequencies.llama3(
                theta,
                rotary_dim,
                settings.number("factor"),
                settings.number("low_freq_factor"),
                settings.number("high_freq_factor"),
                settings.number("original_max_position_embeddings"),
            )
        case "ntk":
            mixed = settings.values.get("mixed_b")
            mixed_b = None if mixed is None else settings.number("mixed_b")
            return frequencies.ntk(theta, rotary_dim, settings.number("factor"), mixed_b)
        case "yarn":
            return frequencies.yarn(
                theta,
                rotary_dim,
                settings.number("factor"),
                settings.number("original_max_position_embeddings"),
                settings.number("beta_fast", 32),
                settings.number("beta_slow", 1),
                settings.values.get("truncate", True) is not False,
            )
    raise settings.wrong(
        _kind_name(settings), f"{kind!r}: {_REFUSED_TYPES.get(kind, 'not known here')}", _FIX
    )


def _kind_name(settings: _Settings) -> str:
    return "rope_type" if "rope_type" in settings.values else "type"


def _kind(settings: _Settings) -> str:
    names = {str(settings.values[n]) for n in ("rope_type", "type") if settings.values.get(n)}
    if len(names) > 1:
        both = "does not agree with type, its older name"
        raise settings.wrong("rope_type", both, "repair the model folder")
    return names.pop() if names else "default"
