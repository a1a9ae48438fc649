"""Checks the fields of a client's request that the gateway passes to an engine as they are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ragcache_core.errors import InvalidInput
from ragcache_gateway.engines.completion import CONTROL_FIELDS

MAX_DEPTH = 64
"""Deepest nesting of values in a request. JSON schemas of tools need less."""

_SEND_TEXT = "send text; other content is not supported"


def screen_fields(
    body: Mapping[str, Any], refused: Mapping[str, tuple[tuple[object, ...], str]]
) -> dict[str, Any]:
    """Return the body without nulls and without the fields that only the gateway may set.

    Args:
        refused: Fields that no engine acts on although clients expect it, each with the values that
            have no effect and with what to do instead.

    Raises:
        InvalidInput: A field is refused, or a value cannot be passed on.
    """
    kept = {}
    for name, value in body.items():
        if value is None or name in CONTROL_FIELDS:
            continue
        if name in refused:
            neutral, fix = refused[name]
            if value not in neutral:
                raise InvalidInput(name, "is not supported", fix)
            continue
        kept[name] = value
    for path, value in _values(kept):
        _check_value(path, value)
    return kept


def _check_value(path: str, value: object) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidInput(path, "is not a finite number", "send a number")
    if isinstance(value, str):
        # The prompt builder marks the position of the chunks with NUL.
        if "\0" in value:
            raise InvalidInput(path, "holds a NUL character", _SEND_TEXT)
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise InvalidInput(
                    path, "holds half of a surrogate pair", "send whole characters"
                ) from None


def _values(body: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield every value with its path, and every name as a value. Raises InvalidInput."""
    stack: list[tuple[str, int, object]] = [(name, 1, value) for name, value in body.items()]
    while stack:
        path, depth, value = stack.pop()
        if depth > MAX_DEPTH:
            raise InvalidInput(path, f"is nested over {MAX_DEPTH} levels deep", "send less")
        if isinstance(value, dict):
            for name, inner in value.items():
                yield path, name
                stack.append((f"{path}.{name}", depth + 1, inner))
        elif isinstance(value, list):
            stack += [(f"{path}[{i}]", depth + 1, inner) for i, inner in enumerate(value)]
        else:
            yield path, value
