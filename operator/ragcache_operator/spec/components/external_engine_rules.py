"""Rules for an engine that RagCache does not run: it has a URL and none of the other fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ragcache_operator.spec.ragcache import EngineSpec
from ragcache_operator.spec.validation import (
    NO_CEL_FOR_QUANTITIES,
    Rule,
    Violation,
    cel_rule,
)

_PROBLEM: Final = "is set together with url, and RagCache does not run this engine"
_FIX: Final = "leave it out, or leave out url"

_CONDITIONS: Final = {
    "replicas": "self.replicas == 1",
    "args": "!has(self.args) || size(self.args) == 0",
    "unsafeArgs": "!has(self.unsafeArgs) || size(self.unsafeArgs) == 0",
    "scheduling": "!has(self.scheduling)",
    "autoscaling": "!has(self.autoscaling)",
}
"""In CEL: the field has its default. The API server adds defaults before it evaluates a rule."""
_QUANTITIES: Final = {"kvMemory": "kv_memory", "hostTier": "host_tier", "resources": "resources"}
"""Attribute by field."""


def _unset(attribute: str) -> Callable[[EngineSpec], Violation | None]:
    default = EngineSpec.model_fields[attribute].default

    def check(engine: EngineSpec) -> Violation | None:
        if engine.url is None or getattr(engine, attribute) == default:
            return None
        return Violation(_PROBLEM, _FIX)

    return check


def _name(field: str) -> str:
    return f"no {field} with a url"


EXTERNAL_ENGINE_RULES: tuple[Rule, ...] = (
    *(
        cel_rule(
            *(_name(field), EngineSpec, field),
            f"!has(self.url) || {condition}",
            *(_PROBLEM, _FIX),
        )
        for field, condition in _CONDITIONS.items()
    ),
    *(
        Rule(_name(field), EngineSpec, field, _unset(attribute), NO_CEL_FOR_QUANTITIES)
        for field, attribute in _QUANTITIES.items()
    ),
)
