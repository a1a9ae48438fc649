"""Rules for an engine that RagCache does not run: it has a URL and none of the other fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pydantic.alias_generators import to_camel

from ragcache_operator.spec.ragcache import EngineSpec
from ragcache_operator.spec.validation import (
    NO_CEL_FOR_QUANTITIES,
    CelRule,
    Rule,
    Violation,
)

_PROBLEM: Final = "is set together with url, and RagCache does not run this engine"
_FIX: Final = "leave it out, or leave out url"

_CONDITIONS: Final = {
    "replicas": "self.replicas == 1",
    "args": "!has(self.args) || size(self.args) == 0",
    "unsafe_args": "!has(self.unsafeArgs) || size(self.unsafeArgs) == 0",
    "scheduling": "!has(self.scheduling)",
    "autoscaling": "!has(self.autoscaling)",
}
"""In CEL: the field has its default. The API server adds defaults before it evaluates a rule."""
_QUANTITIES: Final = ("kv_memory", "host_tier", "resources")


def _unset(field: str) -> Callable[[EngineSpec], Violation | None]:
    default = EngineSpec.model_fields[field].default

    def check(engine: EngineSpec) -> Violation | None:
        if engine.url is None or getattr(engine, field) == default:
            return None
        return Violation(_PROBLEM, _FIX)

    return check


def _rule(field: str, cel: CelRule | str) -> Rule:
    alias = to_camel(field)
    return Rule(f"no {alias} with a url", EngineSpec, alias, _unset(field), cel)


EXTERNAL_ENGINE_RULES: tuple[Rule, ...] = (
    *(
        _rule(field, CelRule(f"!has(self.url) || {condition}", f"{_PROBLEM}; {_FIX}"))
        for field, condition in _CONDITIONS.items()
    ),
    *(_rule(field, NO_CEL_FOR_QUANTITIES) for field in _QUANTITIES),
)
