"""Rules on which fields of an object are given, in JSON Schema. Null means that a field is not."""

from __future__ import annotations

from typing import Any


def exactly_one(*names: str) -> dict[str, Any]:
    """Return the schema of objects that give one of these fields."""
    return {"oneOf": [_given(name) for name in names]}


def at_least_one(*names: str) -> dict[str, Any]:
    """Return the schema of objects that give some of these fields."""
    return {"anyOf": [_given(name) for name in names]}


def _given(name: str) -> dict[str, Any]:
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
