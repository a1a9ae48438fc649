"""Finds blocks of code in a page, and their lines without line numbers."""

from __future__ import annotations

import re
from itertools import islice, pairwise
from typing import Final

from lxml.etree import iterwalk
from lxml.html import HtmlElement

from ragcache_gateway.extraction.html.tree import clear, short_text

_NUMBERS: Final = re.compile(
    r"(?:^|\s)(?:linenos?|linenodiv|line-?numbers?|line-numbers-(?:rows|wrapper)|gutter|lnt?"
    r"|hljs-ln-numbers|blob-num|rouge-gutter|crayon-nums)(?:\s|$)"
)
_LINE: Final = re.compile(r"(?:^|\s)(?:blob-code|js-file-line|hljs-ln-code)(?:\s|$)")
_EDITOR: Final = re.compile(
    r"(?:^|\s)(?:syntaxhighlighter|crayon-pre|view-lines|cm-content)(?:\s|$)"
)
_PRE_STYLE: Final = re.compile(r"white-space\s?:\s?(?:pre|break-spaces)")
_CODE: Final = frozenset({"pre", "xmp", "listing", "plaintext"})
_LINES: Final = frozenset({"div", "li", "p", "tr", "ol", "ul", "table", "tbody", "section"})
_LIST_OF_LINES: Final = frozenset({"table", "tbody", "tr", "ol", "ul"})
_MAX_LEVELS_UP: Final = 8
_MAX_DIGITS: Final = 10


def mark_code(root: HtmlElement) -> None:
    """Remove line numbers, and make every block of code a ``pre``."""
    for element in list(root.iter("td", "th", "div", "span", "pre", "code", "br")):
        tag = element.tag
        names = element.get("class", "")
        if tag == "br":
            _rename_around(element, "code")
        elif tag == "code":
            if _PRE_STYLE.search(element.get("style", "")):
                element.tag = "pre"
        elif _has_line_numbers(element, names):
            clear(element)
        elif names and tag == "td" and _LINE.search(names):
            _rename_around(element, "table")
        elif names and tag == "div" and _EDITOR.search(names):
            element.tag = "pre"


def is_code(element: HtmlElement) -> bool:
    """Whether an element is a block of code."""
    return element.tag in _CODE


def code_of(block: HtmlElement) -> str:
    """Return the lines of a block of code, with their indentation."""
    lines = _LineWriter()
    for event, element in iterwalk(block, ("start", "end")):
        is_line = element is not block and element.tag in _LINES
        is_list = element.tag in _LIST_OF_LINES
        if event == "start":
            if element.tag == "br":
                lines.write("\n")
            if is_line:
                lines.begin()
            elif element.tag == "code" and element.getparent() is block:
                lines.end_before(element.getprevious())
            lines.write(element.text, of_list=is_list)
        elif element is not block:
            if is_line:
                lines.end()
            lines.write(element.tail, of_list=is_line or element.tag == "td")
    return lines.text()


class _LineWriter:
    """Collects code whose lines may be elements."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._starts: list[int] = []
        self._ends_line = True

    def write(self, text: str | None, *, of_list: bool = False) -> None:
        """Append text, but not white space between the elements of a list of lines."""
        if text and not (of_list and text.isspace()):
            self._parts.append(text)
            self._ends_line = text.endswith("\n")

    def end_before(self, code: HtmlElement | None) -> None:
        """End the line of an element with code, such as that for another module system."""
        if code is not None and code.tag == "code" and not code.tail and not self._ends_line:
            self.write("\n")

    def begin(self) -> None:
        if not self._ends_line:
            self.write("\n")
        self._starts.append(len(self._parts))

    def end(self) -> None:
        is_empty = self._starts.pop() == len(self._parts)
        if is_empty or not self._ends_line:
            self.write("\n")

    def text(self) -> str:
        lines = [line.rstrip() for line in "".join(self._parts).replace("\xa0", " ").split("\n")]
        begin = next((i for i, line in enumerate(lines) if line), len(lines))
        return "\n".join(lines[begin:]).rstrip()


def _rename_around(element: HtmlElement, tag: str) -> None:
    """Make the nearest element of a tag around another one a ``pre``."""
    for around in islice(element.iterancestors(), _MAX_LEVELS_UP):
        if is_code(around):
            return
        if around.tag == tag:
            around.tag = "pre"
            return


def _begins_with_code(cell: HtmlElement) -> bool:
    return any(one.tag == "pre" for one in islice(cell.iter(), _MAX_LEVELS_UP))


def _has_line_numbers(element: HtmlElement, names: str) -> bool:
    """Whether an element has only numbers of lines, by its class, or beside a cell with code."""
    # A block of code with numbered lines has this name, too.
    has_code = element.tag == "pre" and element.find("code") is not None
    is_named = bool(names) and not has_code and _NUMBERS.search(names) is not None
    is_cell = element.tag in ("td", "th") and element.getnext() is not None
    if not is_named and not (is_cell and _begins_with_code(element)):
        return False
    words = short_text(element).split()
    if not all(word.isdecimal() and len(word) < _MAX_DIGITS for word in words):
        return False
    return is_named or all(int(later) == int(one) + 1 for one, later in pairwise(words))
