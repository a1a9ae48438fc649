"""Reads Markdown that has parts which no rendering shows: front matter and comments.

Front matter gives the title and metadata. It stays in the text if it is neither YAML nor TOML with
keys, or if it is long.
"""

from __future__ import annotations

import bisect
import datetime
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final

import yaml

from ragcache_core.documents.markdown_blocks import (
    BlockKind,
    FrontMatter,
    front_matter,
    markdown_blocks,
)
from ragcache_core.errors import InvalidInput
from ragcache_core.retrieval.metadata import MetadataValue, checked_metadata
from ragcache_gateway.extraction.encodings import decoded
from ragcache_gateway.extraction.extracted import (
    ExtractedText,
    UnreadableDocument,
    cleaned,
    short_line,
)

_MAX_METADATA_BYTES: Final = 8 << 10
"""Most bytes of keys and values. The retriever takes twice as many."""

_RESERVED: Final = "ragcache-"
"""Names that begin so are those of the gateway and of ``ragcache sync``."""

_SIGNS: Final = ("<!--", "]: #", "]: <")
_INLINE: Final = re.compile(r"\\.|`++|<!--", re.DOTALL)
_CODE_MARK: Final = re.compile(r"`+")
_LEADING_BLANK_LINES: Final = re.compile(r"\A(?:[ \t]*+\n)++")
_INTEGER: Final = re.compile(r"0|-?[1-9]\d{0,14}")
_FLOAT: Final = re.compile(r"-?(?:0|[1-9]\d{0,14})\.\d{1,15}")
_TRUTH_VALUES: Final = {"true": True, "false": False}
_NOTHING: Final = ("", "~", "null")


def has_hidden_parts(text: str) -> bool:
    """Whether a Markdown document may have front matter or comments, by their first marks."""
    start = text.removeprefix("\ufeff")
    return start.startswith(("---", "+++")) or any(sign in text for sign in _SIGNS)


def read_markdown(content: bytes) -> ExtractedText:
    """Read a document without its front matter and comments.

    Front matter without other text is the text.

    Raises:
        UnreadableDocument: It has only comments.
    """
    text, warnings = decoded(content)
    data: Mapping[str, MetadataValue] = {}
    hidden = ""
    if (front := front_matter(text)) is not None:
        found = _data(text, front)
        if found is not None:
            data, hidden, text = found, text[front.start : front.end], text[front.whole_end :]
    text = _LEADING_BLANK_LINES.sub("", "".join(_shown_parts(text)), count=1)
    if not text.strip():
        text = hidden.strip()
    if not text:
        raise UnreadableDocument("has only comments", "add text to it")
    title = next((value for key, value in data.items() if key.lower() == "title"), "")
    metadata = {
        cleaned(key): _cleaned_value(value) for key, value in data.items() if key.lower() != "title"
    }
    return ExtractedText(text, True, short_line(_as_text(title)), metadata, warnings)


def _as_text(value: MetadataValue) -> str:
    """Return a value as one text."""
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(_as_text, value)) if isinstance(value, list) else str(value)


def _cleaned_value(value: MetadataValue) -> MetadataValue:
    if isinstance(value, list):
        return [cleaned(one) if isinstance(one, str) else one for one in value]
    return cleaned(value) if isinstance(value, str) else value


def _shown_parts(text: str) -> Iterator[str]:
    """Yield the text between comments."""
    position = 0
    for start, end in _comments(text):
        yield text[position:start]
        position = end
    yield text[position:]


def _comments(text: str) -> Iterator[tuple[int, int]]:
    for block in markdown_blocks(text):
        if block.kind is BlockKind.COMMENT:
            yield block.start, block.end
        elif block.kind is not BlockKind.CODE and text.find("<!--", block.start, block.end) >= 0:
            yield from _inline_comments(text, block.start, block.end)


def _inline_comments(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the comments inside a paragraph, a heading or a table, but not those in code."""
    marks: dict[int, list[int]] = defaultdict(list)
    for mark in _CODE_MARK.finditer(text, start, end):
        marks[len(mark.group())].append(mark.start())
    position = start
    while (found := _INLINE.search(text, position, end)) is not None:
        position = found.end()
        length = position - found.start()
        if found.group() == "<!--":
            close = text.find("-->", found.start() + 2, end)
            if close < 0:
                return
            position = close + len("-->")
            yield found.start(), position
        elif found.group()[0] == "`":
            closing = marks[length]
            next_mark = bisect.bisect_left(closing, position)
            if next_mark < len(closing):
                position = closing[next_mark] + length


def _data(text: str, front: FrontMatter) -> dict[str, MetadataValue] | None:
    """Return keys and values of front matter, or None if it cannot be read or is long.

    Values of other types than text, numbers, truth values and lists of them are left out.
    """
    content = text[front.start : front.end]
    try:
        found = _toml(content) if front.mark == "+++" else _yaml(content)
        data = {key: one for key, one in found.items() if not key.lower().startswith(_RESERVED)}
        checked_metadata("metadata", data)
    except (yaml.YAMLError, ValueError, RecursionError, InvalidInput):
        return None
    num_bytes = sum(
        len(f"{key}{_as_text(value)}".encode(errors="replace")) for key, value in data.items()
    )
    return data if data and num_bytes <= _MAX_METADATA_BYTES else None


def _toml(content: str) -> dict[str, MetadataValue]:
    """Return the values of TOML. Raises ValueError."""
    found = ((key, _toml_value(value)) for key, value in tomllib.loads(content).items())
    return {key: value for key, value in found if value is not None}


def _toml_value(value: Any) -> MetadataValue | None:
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, list) and all(isinstance(one, str | int | float) for one in value):
        return [_as_text(one) for one in value]
    return None


def _yaml(content: str) -> dict[str, MetadataValue]:
    """Return the values of YAML. Nothing is constructed, so aliases stay small.

    Raises:
        YAMLError: It is no YAML.
    """
    root = yaml.compose(content, Loader=yaml.BaseLoader)
    data: dict[str, MetadataValue] = {}
    if not isinstance(root, yaml.MappingNode):
        return data
    for key, node in root.value:
        value = _yaml_value(node)
        if isinstance(key, yaml.ScalarNode) and value is not None:
            data[key.value] = value
    return data


def _yaml_value(node: yaml.Node) -> MetadataValue | None:
    if isinstance(node, yaml.ScalarNode):
        return node.value if node.style else _plain_value(node.value)
    if isinstance(node, yaml.SequenceNode) and all(
        isinstance(one, yaml.ScalarNode) for one in node.value
    ):
        return [one.value for one in node.value]
    return None


def _plain_value(text: str) -> MetadataValue | None:
    """Return the value of a text without quotes.

    A number is one that is written as numbers are: ``1.10`` and ``007`` are texts.
    """
    if text in _NOTHING:
        return None
    if text in _TRUTH_VALUES:
        return _TRUTH_VALUES[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and str(float(text)) == text:
        return float(text)
    return text
