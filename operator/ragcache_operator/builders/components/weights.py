"""The size of a model's weights, as far as the operator knows it before an engine has started."""

from __future__ import annotations

import re
from typing import Final

from ragcache_operator.spec import ModelSpec
from ragcache_operator.spec.quantity import parse_quantity

_BUNDLED_BYTES: Final = {"smollm2": 269_060_552, "tinyrag": 5_369_152}
_PARAMETERS: Final = re.compile(
    r"(?<![A-Za-z0-9.])(?:([1-9][0-9]?)x)?([0-9]{1,4}(?:\.[0-9]{1,3})?)([BbMm])(?![A-Za-z0-9])"
)
"""A number of parameters in a name: 8B, 0.6B, 135M, or experts like 8x7B."""
_UNITS: Final = {"b": 10**9, "m": 10**6}


def weights_bytes(model: ModelSpec) -> int:
    """Return the size of the weights in memory, in bytes. 0 if nothing tells it.

    The operator reads no volume and asks no hub. Without ``spec.model.weights`` the size of a
    model that is not bundled is a guess from the number of parameters in its name. The engine
    corrects a wrong guess at its start (``ragcache_engine.start``).
    """
    if model.weights is not None:
        return parse_quantity(model.weights)
    source = model.parsed_source
    if source.kind == "bundled":
        stored_bytes = _BUNDLED_BYTES[source.value]
        # Both are stored as bfloat16.
        return stored_bytes * 2 if model.dtype == "float32" else stored_bytes
    return _guess_parameters(source.value) * (4 if model.dtype == "float32" else 2)


def _guess_parameters(name: str) -> int:
    return max(
        (
            int(int(experts or 1) * float(number) * _UNITS[unit.lower()])
            for experts, number, unit in _PARAMETERS.findall(name)
        ),
        default=0,
    )
