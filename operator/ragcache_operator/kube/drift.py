"""What an object should say against what it says: pure, and blind to what others added.

A server fills in defaults and other controllers own fields of their own, so an object never equals
what was applied. What must hold is that everything asked for is there. Server-side apply would
restore just that, so comparing first saves a write whenever nothing is wrong.

Some fields mean something else as soon as anything is added to them: a selector that asks for one
label more selects nothing, a rule more opens a network. These must say what is asked for and no
more, which an apply does not restore; a merge patch of them does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_LIST_KEYS = ("name", "mountPath", "containerPort", "port", "ip", "key")
"""What items of a list are told apart by, the first that all of them have."""

_EXACT = {"Service": ("selector",), "NetworkPolicy": ()}
"""By kind, where below ``spec`` nothing may be added; () is all of it."""


def difference(desired: Any, live: Any, path: str = "") -> str | None:
    """Path of the first field in which live does not say what is desired; None if it says all.

    Items that live has beyond the desired ones are somebody else's and no difference, as are keys.
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


def addition(desired: Mapping[str, Any], live: Mapping[str, Any]) -> str | None:
    """Path of what others added where nothing may be added; None if there is nothing."""
    where = _EXACT.get(desired["kind"])
    if where is None:
        return None
    path = ".".join(("spec", *where))
    return path if _plain(_at(desired, where)) != _plain(_at(live, where)) else None


def restoration(desired: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    """Merge patch after which live has no addition."""
    where = _EXACT[desired["kind"]]
    wanted, found = _at(desired, where), _at(live, where)
    patch: Any = {**dict.fromkeys(found.keys() - wanted.keys()), **wanted}
    for name in reversed(("spec", *where)):
        patch = {name: patch}
    restored: dict[str, Any] = patch
    return restored


def _at(obj: Mapping[str, Any], where: Sequence[str]) -> Mapping[str, Any]:
    found: Any = obj["spec"]
    for name in where:
        found = found.get(name) or {}
    mapping: Mapping[str, Any] = found
    return mapping


def _plain(value: Any) -> Any:
    """A value without the empty ones in its mappings, which a server may leave out."""
    if isinstance(value, Mapping):
        kept = {key: _plain(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item not in (None, [])}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
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
    # Builders write quantities the way the server keeps them (500m, not 0.5), so text will do.
    return bool(desired == live and isinstance(desired, bool) == isinstance(live, bool))
