"""Reads a JSON file as lines of text, each with the path of its value.

A line can be understood without the others, wherever a chunk ends: ``server.tls.port: 8443``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from ragcache_gateway.extraction.encodings import decoded
from ragcache_gateway.extraction.extracted import (
    ExtractedText,
    UnreadableDocument,
    cleaned,
    short_line,
)

_MAX_LIST_CHARS: Final = 200
"""A longer list has a line for each value."""
_TITLE_NAMES: Final = ("title", "name")
_LINE_OF_OBJECT = re.compile(r"[^\n]*\}\s*\n\s*\{")


class _Pairs(list[tuple[str, Any]]):
    """The members of an object, with repeated names."""


def read_json(content: bytes) -> ExtractedText:
    """Read a JSON value. Raises UnreadableDocument."""
    text, warnings = decoded(content)
    try:
        # Numbers stay as they are written, such as the version 1.10.
        value = json.loads(
            text, object_pairs_hook=_Pairs, parse_int=str, parse_float=str, parse_constant=str
        )
        lines = "\n".join(_lines("", value))
    except RecursionError as error:
        raise UnreadableDocument("is nested too deeply", "divide it") from error
    except ValueError as error:
        fix = "name it .jsonl if each line is a document"
        if _LINE_OF_OBJECT.match(text) is None:
            fix = "correct it, or send it as text"
        raise UnreadableDocument(f"is not valid JSON ({error})", fix) from error
    return ExtractedText(
        re.sub(r"\n{3,}", "\n\n", cleaned(lines)), False, title=_title(value), warnings=warnings
    )


def _title(value: Any) -> str:
    fields = dict(value) if isinstance(value, _Pairs) else {}
    texts = (fields.get(name) for name in _TITLE_NAMES)
    return next((short_line(text) for text in texts if isinstance(text, str)), "")


def _lines(path: str, value: Any) -> Iterator[str]:
    """Yield the lines of a value, with empty lines around objects in a list."""
    match value:
        case _Pairs() if value:
            for name, member in value:
                yield from _lines(f"{path}.{name}" if path else name, member)
        case list() if value and not isinstance(value, _Pairs):
            yield from _items(path, value)
        case _:
            text = _text(value)
            separator = "\n" if "\n" in text else " "
            yield f"{path}:{separator}{text}" if path else text


def _items(path: str, values: list[Any]) -> Iterator[str]:
    if not any(isinstance(one, list) for one in values):
        texts = list(map(_text, values))
        joined = ", ".join(texts)
        if "\n" not in joined and len(joined) <= _MAX_LIST_CHARS:
            yield f"{path}: {joined}" if path else joined
            return
    for i, one in enumerate(values):
        # The fields of a table of records are clear without the number of the record.
        inner = f"{path}[{i}]" if path or not isinstance(one, _Pairs) else ""
        yield ""
        yield from _lines(inner, one)
    yield ""


def _text(value: Any) -> str:
    match value:
        case str():
            return value
        case _Pairs():
            return "{}"
        case _:
            return json.dumps(value)
