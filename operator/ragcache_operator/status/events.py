"""Kubernetes Events that a reconciler emits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ObjectEvent:
    """An Event about the object that is being reconciled."""

    kind: Literal["Normal", "Warning"]
    reason: str
    message: str


PostEvent = Callable[[ObjectEvent], None]
"""Posts an Event about one object."""
