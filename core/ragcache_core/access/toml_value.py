"""TOML of values that JSON has, on one line."""

from __future__ import annotations

import json
from typing import Any


def toml_value(value: Any) -> str:
    """Return a value as TOML: objects as inline tables.

    TOML has no null, so fields that are null are left out.

    Raises:
        TypeError: JSON has no such value.
    """
    match value:
        case dict():
            given = [(name, one) for name, one in value.items() if one is not None]
            fields = ", ".join(f"{_text(name)} = {toml_value(one)}" for name, one in given)
            return f"{{ {fields} }}" if fields else "{}"
        case list() | tuple():
            return f"[{', '.join(map(toml_value, value))}]"
        case str():
            return _text(value)
        case bool() | int() | float():
            return json.dumps(value)
        case _:
            raise TypeError(f"no TOML for {type(value).__name__}")


def _text(value: str) -> str:
    # The same escapes as in JSON, and TOML needs one for DEL, too.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
