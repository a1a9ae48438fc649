"""Reads MDX as Markdown: without imports, exports and tags, whose text it keeps.

Code stays as it is. So do expressions in braces, unless they are comments or plain texts.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Set
from dataclasses import replace
from typing import Final

from ragcache_gateway.extraction.encodings import decoded
from ragcache_gateway.extraction.extracted import ExtractedText, UnreadableDocument, cleaned
from ragcache_gateway.extraction.markdown import read_markdown

_FENCE = re.compile(r"[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)*(`{3,}|~{3,})(.*)")
_IMPORT = re.compile(r"import\s+(?:[\w*{$]|[\"'])")
_IMPORT_END = re.compile(r"[\"'][^\"']*[\"']\s*(?:with\s*\{.*\})?;?\s*$")
_MAX_IMPORT_LINES: Final = 50
_MAX_EXPORT_LINES: Final = 300
_EXPORT = re.compile(r"export\s+(?:const|let|var|function|default|async|class|\{|\*)")
_TOKEN = re.compile(
    r"""(?P<kept>[^\\`<{]+|\\.?)
    |(?P<code>(?P<ticks>`+)(?!`)(?:.|\n(?!\n))*?(?<!`)(?P=ticks)(?!`)|`+)
    |(?P<link><(?:[A-Za-z][\w+.-]*://|mailto:)[^\s<>]*>|<[\w.+-]+@[\w.-]+>)
    |\{\s*/\*(?:[^*]|\*(?!/))*\*/\s*\}|<!--(?:[^-]|-(?!->))*-->
    |\{\s*(?:"(?P<double>[^"]*)"|'(?P<single>[^']*)'|`(?P<template>[^`$]*)`)\s*\}""",
    re.VERBOSE,
)
"""A piece of text, code, a link, a comment, or an expression that is a text."""
_TOKEN_TEXTS: Final = ("kept", "code", "link", "double", "single", "template")
_TAG_NAME = re.compile(r"<(/?)([A-Za-z_$][\w.:$-]*)?")
_ATTRIBUTE = re.compile(r"\s*(?:([A-Za-z_$][\w:.-]*)\s*(=\s*)?|(?=\{))")
_STRING = re.compile(r"\"[^\"]*\"|'[^']*'")
_TEXT_EXPRESSION = re.compile(r"\{\s*(?:\"([^\"]*)\"|'([^']*)'|`([^`$]*)`)\s*\}")
_HEADING_ID = re.compile(r"^(#{1,6} .*?)[ \t]*\{#[\w:.-]+\}[ \t]*$", re.MULTILINE)
_CLOSER = re.compile(r"</([A-Za-z_$][\w.:$-]*)")
_TAG_END = re.compile(r"\s*(/?)>")

_TEXT_ATTRIBUTES: Final = frozenset(
    {"title", "label", "heading", "header", "summary", "subtitle", "description", "caption", "alt"}
)
_INLINE: Final = frozenset(
    {
        "a",
        "abbr",
        "b",
        "bdi",
        "bdo",
        "cite",
        "code",
        "del",
        "dfn",
        "em",
        "font",
        "i",
        "ins",
        "kbd",
        "mark",
        "q",
        "s",
        "samp",
        "small",
        "span",
        "strong",
        "sub",
        "sup",
        "tt",
        "u",
        "var",
        "wbr",
    }
)
_VOID: Final = frozenset(
    {"area", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
)
_CLOSING: Final = {"{": "}", "(": ")", "[": "]"}
_MAX_EXPRESSION_CHARS: Final = 10_000


def read_mdx(content: bytes) -> ExtractedText:
    """Read a page. Raises UnreadableDocument."""
    text, warnings = decoded(content)
    text = cleaned("\n\n".join(_blocks(text)))
    if not text:
        raise UnreadableDocument("has no text", "send a page with text")
    return replace(read_markdown(text.encode()), warnings=warnings)


def _blocks(text: str) -> Iterator[str]:
    """Yield front matter, code and the paragraphs between them."""
    closed = frozenset(_CLOSER.findall(text))
    lines = text.split("\n")
    first = 0
    if lines[0].strip() == "---" and "---" in lines[1:]:
        first = lines.index("---", 1) + 1
        yield "\n".join(lines[:first])
    prose: list[str] = []
    i = first
    while i < len(lines):
        opening = _FENCE.fullmatch(lines[i])
        if opening is None or "`" in opening[2]:
            prose.append(lines[i])
            i += 1
            continue
        yield from _paragraphs(prose, closed)
        prose = []
        end = _end_of_fence(lines, i, opening[1])
        yield textwrap.dedent("\n".join(lines[i:end]))
        i = end
    yield from _paragraphs(prose, closed)


def _end_of_fence(lines: list[str], first: int, mark: str) -> int:
    for i in range(first + 1, len(lines)):
        line = lines[i].strip()
        if line.startswith(mark) and not line.strip(mark[0]):
            return i + 1
    return len(lines)


def _paragraphs(lines: list[str], closed: Set[str]) -> Iterator[str]:
    text = _HEADING_ID.sub(r"\1", "\n".join(_without_code_lines(lines)))
    text = _without_tags(text, closed)
    for block in re.split(r"\n[ \t]*(?:\n[ \t]*)+", text.strip("\n")):
        # MDX has no code that is marked by its indentation.
        if block := textwrap.dedent(block).strip("\n"):
            yield block


def _without_code_lines(lines: list[str]) -> Iterator[str]:
    """Yield the lines without imports and exports, which begin after an empty line or another."""
    i, is_start = 0, True
    while i < len(lines):
        end = i
        if is_start and _IMPORT.match(lines[i]):
            end = _end_of_import(lines, i)
        elif is_start and _EXPORT.match(lines[i]):
            end = _end_of_export(lines, i)
        if end == i:
            yield lines[i]
            is_start = not lines[i].strip()
            end = i + 1
        i = end


def _end_of_import(lines: list[str], first: int) -> int:
    """Return the index after an import, or ``first`` if the line is a sentence."""
    for i in range(first, min(first + _MAX_IMPORT_LINES, len(lines))):
        if _IMPORT_END.search(lines[i]):
            return i + 1
        if not lines[i].strip():
            break
    return first


def _end_of_export(lines: list[str], first: int) -> int:
    text = "\n".join(lines[first : first + _MAX_EXPORT_LINES])
    end = _end_of_statement(text)
    return first + text.count("\n", 0, end) + 1


def _end_of_statement(text: str) -> int:
    """Return the end of the line on which all brackets are closed, or else of the first line."""
    waiting: list[str] = []
    i, last = 0, ""
    while i < len(text):
        if (end := _end_of_string(text, i)) is not None:
            i, last = end, text[i]
            continue
        if text[i] in _CLOSING:
            waiting.append(_CLOSING[text[i]])
        elif waiting and text[i] == waiting[-1]:
            waiting.pop()
        elif text[i] == "\n" and not waiting and not last.endswith(("=", "=>", ",")):
            return i
        last = last if text[i].isspace() else last[-1:] + text[i]
        i += 1
    return text.find("\n") if waiting and "\n" in text else len(text)


def _end_of_string(text: str, start: int) -> int | None:
    """Return the end of a string of JavaScript. None: none begins here."""
    mark = text[start]
    if mark not in "\"'`":
        return None
    i = start + 1
    while i < len(text) and text[i] != mark and (mark == "`" or text[i] != "\n"):
        i += 2 if text[i] == "\\" else 1
    # An apostrophe in a text between tags is no string.
    return i + 1 if i < len(text) and text[i] == mark else None


def _end_of_braces(text: str, start: int) -> int | None:
    """Return the end of an expression in braces, or None if they are not closed."""
    depth, i = 0, start
    end = text.rfind("}", start, start + _MAX_EXPRESSION_CHARS) + 1
    while i < end:
        if (after := _end_of_string(text, i)) is not None:
            i = after
            continue
        depth += (text[i] == "{") - (text[i] == "}")
        i += 1
        if depth == 0:
            return i
    return None


def _without_tags(text: str, closed: Set[str]) -> str:
    found: list[str] = []
    i = 0
    while i < len(text):
        end, shown = _piece(text, i, closed)
        found.append(shown)
        i = end
    return "".join(found)


def _piece(text: str, i: int, closed: Set[str]) -> tuple[int, str]:
    """Return the end of what begins at an index, and its text."""
    token = _TOKEN.match(text, i)
    if token is not None:
        return token.end(), "".join(token[name] or "" for name in _TOKEN_TEXTS)
    if text[i] == "<":
        return _tag(text, i, closed) or (i + 1, "<")
    end = _end_of_braces(text, i) or i + 1
    return end, text[i:end]


def _tag(text: str, start: int, closed: Set[str]) -> tuple[int, str] | None:
    """Return the end of a tag and the text of its attributes, or None if it is no tag.

    Args:
        closed: Names of all closing tags. A name in ``List<String>`` is not among them.
    """
    opened = _TAG_NAME.match(text, start)
    assert opened is not None
    name = opened[2] or ""
    i, texts = opened.end(), []
    while (ending := _TAG_END.match(text, i)) is None:
        attribute = _attribute(text, i) if name else None
        if attribute is None:
            return None
        i, value = attribute
        texts.append(value)
    if name and not opened[1] and not ending[1] and name not in closed | _VOID:
        return None
    end = ending.end()
    shown = " ".join(filter(None, texts))
    is_first = not text[text.rfind("\n", 0, start) + 1 : start].strip()
    is_alone = is_first or not text[end : (text + "\n").find("\n", end)].strip()
    if shown and is_first and name != "img":
        shown = f"**{shown}**\n"
    return end, shown + _separator(name, is_alone=is_alone, is_closing=bool(opened[1]))


def _separator(name: str, *, is_alone: bool, is_closing: bool) -> str:
    """Return what divides the texts before and after a tag.

    Args:
        is_alone: Whether the tag begins or ends its line.
    """
    if name in _INLINE:
        return ""
    if name == "li" and not is_closing:
        return "\n- "
    if name in ("td", "th"):
        return " | " if is_closing else ""
    return "\n" if name[:1].islower() or is_alone else ""


def _attribute(text: str, i: int) -> tuple[int, str] | None:
    """Return the end of an attribute and its text, or None if there is none."""
    found = _ATTRIBUTE.match(text, i)
    if found is None or (found.start() == found.end() and text[i : i + 1] != "{"):
        return None
    i, name = found.end(), found[1]
    if name is not None and found[2] is None:
        return i, ""
    string = _STRING.match(text, i) if name is not None else None
    if string is not None:
        is_text = name.lower() in _TEXT_ATTRIBUTES
        return string.end(), " ".join(string[0][1:-1].split()) if is_text else ""
    end = _end_of_braces(text, i) if text[i : i + 1] == "{" else None
    if end is None:
        return None
    written = _TEXT_EXPRESSION.fullmatch(text, i, end)
    if written is not None and name is not None and name.lower() in _TEXT_ATTRIBUTES:
        return end, next(part for part in written.groups() if part is not None)
    return end, ""
