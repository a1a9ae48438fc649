"""The limits of a gateway: fixed ones, or a file that may change while it runs.

A cluster mounts the file from a ConfigMap, which the operator writes from ``spec.gateway.limits``.
So a change of a limit needs no restart, and ends no answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ragcache_core.errors import InvalidInput
from ragcache_wire.watched.watched_file import WatchedFile

MAX_LIMIT = 1_000_000


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """What one gateway accepts at once, and how long it waits."""

    questions: int
    document_requests: int
    first_token_timeout_s: float
    next_token_timeout_s: float
    connections: int


class Limits(Protocol):
    """The current limits."""

    def current(self) -> GatewayLimits:
        """Return the limits of now."""
        ...


class FixedLimits:
    """Limits that never change."""

    def __init__(self, limits: GatewayLimits) -> None:
        self._limits = limits

    def current(self) -> GatewayLimits:
        """Return the limits."""
        return self._limits


class FileLimits(WatchedFile[GatewayLimits]):
    """Limits as a file has them.

    Args:
        path: Path of a JSON object with fields of ``spec.gateway.limits``.
        default: For fields that the file leaves out, and until the file can be read.
    """

    def __init__(
        self, path: Path, default: GatewayLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        def parse(content: bytes) -> GatewayLimits:
            return _from_json(content, default)

        super().__init__(path, parse, default, name="limits", describe=str, clock=clock)


def limits_json(limits: GatewayLimits) -> str:
    """Return the content of the file for limits."""
    return json.dumps({name: getattr(limits, field) for name, field in _FIELDS.items()}, indent=1)


_FIELDS = {
    "questions": "questions",
    "documentRequests": "document_requests",
    "firstTokenTimeoutSeconds": "first_token_timeout_s",
    "nextTokenTimeoutSeconds": "next_token_timeout_s",
    "connections": "connections",
}


def _from_json(content: bytes, default: GatewayLimits) -> GatewayLimits:
    fix = f"write an object with {', '.join(_FIELDS)}"
    try:
        given = json.loads(content)
    except ValueError as error:
        raise InvalidInput("limits", f"cannot be read: {error}", fix) from error
    if not isinstance(given, dict):
        raise InvalidInput("limits", "is no object", fix)
    values = {}
    for name, field in _FIELDS.items():
        value = given.get(name, getattr(default, field))
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 1 <= value <= MAX_LIMIT:
            raise InvalidInput(f"limits.{name}", f"is {value!r}", f"use 1 to {MAX_LIMIT}")
        values[field] = float(value) if field.endswith("_s") else int(value)
    return GatewayLimits(**values)  # type: ignore[arg-type]  # by its own fields
