"""Compares a desired object with the live one, without side effects.

The server fills in defaults, and other controllers own some fields, so a live object never equals
the applied one. It only must contain every desired field. Server-side apply would restore those, so
a comparison first saves a write when nothing has drifted.

Some fields change their meaning when another controller adds to them. A selector with one more
label selects nothing, and a network policy with one more rule opens a connection. Such a field must
equal the desired one. Server-side apply does not remove the addition, but a merge patch does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_LIST_KEYS = ("name", "mountPath", "containerPort", "port", "ip", "key")
"""Keys that identify the items of a list. The first key that all items have applies."""

_EXACT = {"Service": ("selector",), "NetworkPolicy": ()}
"""By kind, the path below ``spec`` where additions are forbidden. () is the whole spec."""


def difference(desired: Any, live: Any, path: str = "") -> str | None:
    """Return the path of the first desired field that the live value lacks, or None.

    Additional keys and list items of the live value belong to other controllers and do not count.
    """
    if isinstance(desired, Mapping):
        if not desired and live is None:
            return None
        if not isinstance(live, Mapping):
            return path
        for key, value in desired.items():
            found = difference(value, live.get(key), f"{path}.{key}" if path else key)
            if found is not None:
                return found
        return None
    if isinstance(desired, Sequence) and not isinstance(desired, str):
        return _list_difference(desired, live, path)
    return None if _same(desired, live) else path


def forbidden_addition(desired: Mapping[str, Any], live: Mapping[str, Any]) -> str | None:
    """Return the path of a forbidden addition, or None if there is none."""
    exact_path = _EXACT.get(desired["kind"])
    if exact_path is None:
        return None
    path = ".".join(("spec", *exact_path))
    return (
        path
        if _without_empty(_at(desired, exact_path)) != _without_empty(_at(live, exact_path))
        else None
    )


def removal_patch(desired: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merge patch that removes forbidden additions from the live object."""
    exact_path = _EXACT[desired["kind"]]
    wanted, found = _at(desired, exact_path), _at(live, exact_path)
    patch: Any = {**dict.fromkeys(found.keys() - wanted.keys()), **wanted}
    for name in reversed(("spec", *exact_path)):
        patch = {name: patch}
    restored: dict[str, Any] = patch
    return restored


def _at(obj: Mapping[str, Any], exact_path: Sequence[str]) -> Mapping[str, Any]:
    found: Any = obj["spec"]
    for name in exact_path:
        found = found.get(name) or {}
    mapping: Mapping[str, Any] = found
    return mapping


def _without_empty(value: Any) -> Any:
    """Return a value without empty mapping entries, which a server may leave out."""
    if isinstance(value, Mapping):
        kept = {key: _without_empty(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item not in (None, [])}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without_empty(item) for item in value]
    return value


def _list_difference(desired: Sequence[Any], live: Any, path: str) -> str | None:
    if not desired and live is None:
        return None
    if not isinstance(live, Sequence) or isinstance(live, str):
        return path
    key = _key_of(desired)
    if key is None:
        if len(desired) != len(live):
            return path
        pairs = [
            (str(i), want, have) for i, (want, have) in enumerate(zip(desired, live, strict=True))
        ]
    else:
        by_key = {item.get(key): item for item in live if isinstance(item, Mapping)}
        pairs = [(str(want[key]), want, by_key.get(want[key])) for want in desired]
    for label, want, have in pairs:
        found = difference(want, have, f"{path}[{label}]")
        if found is not None:
            return found
    return None


def _key_of(items: Sequence[Any]) -> str | None:
    if not items or not all(isinstance(item, Mapping) for item in items):
        return None
    for key in _LIST_KEYS:
        values = [item.get(key) for item in items]
        if None not in values and len(set(values)) == len(values):
            return key
    return None


def _same(desired: Any, live: Any) -> bool:
    # Builders write quantities in the server's canonical form (500m, not 0.5), so text suffices.
    return bool(desired == live and isinstance(desired, bool) == isinstance(live, bool))
