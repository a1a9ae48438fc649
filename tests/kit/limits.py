"""Limits that no busy machine reaches, for tests that are not about them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

LIMIT_S = 120.0


def lengthen_limits(monkeypatch: pytest.MonkeyPatch, *owners: type) -> None:
    """Let the methods of classes wait LIMIT_S, unless a caller gives them another ``timeout_s``."""
    for method in [method for owner in owners for method in vars(owner).values()]:
        defaults: tuple[Any, ...] = getattr(method, "__defaults__", None) or ()
        if defaults:
            names = list(inspect.signature(method).parameters)[-len(defaults) :]
            longer = [
                LIMIT_S if name == "timeout_s" else default
                for name, default in zip(names, defaults, strict=True)
            ]
            monkeypatch.setattr(method, "__defaults__", tuple(longer))
