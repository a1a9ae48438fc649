"""Writes the elements of a page as Markdown.

It writes text and structure: headings, lists, tables, quotations and code. Links and emphasis are
their text. Code begins at the margin also within a list, so that each line keeps its indentation.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from itertools import islice
from typing import Final, NamedTuple

from lxml.etree import iterwalk
from lxml.html import HtmlElement

from ragcache_gateway.extraction.html.code import code_of, is_code
from ragcache_gateway.extraction.html.tables import Cell, table_markdown
from ragcache_gateway.extraction.html.tree import (
    HEADINGS,
    clear,
    insert_label,
    joined,
    names_of,
    short_text,
)

_BLOCKS: Final = frozenset(
    {
        *(
            "address",
            "article",
            "aside",
            "blockquote",
            "body",
            "caption",
            "center",
            "dd",
            "details",
        ),
        *("div", "dl", "dt", "fieldset", "figcaption", "figure", "footer", "form", "header", "hr"),
        *("html", "legend", "li", "main", "menu", "nav", "ol", "p", "section", "summary", "table"),
        *("tbody", "td", "tfoot", "th", "thead", "tr", "ul"),
    }
)
_TERMS: Final = frozenset({"dt", "summary"})
_INLINE_CODE: Final = frozenset({"code", "tt", "samp", "kbd"})
_DELETED: Final = frozenset({"del", "s", "strike"})
_POWER: Final = re.compile(r"[+\u2212-]?\d{1,3}[+\u2212-]?|[a-z]")
_REFERENCES: Final = {
    "sup": re.compile(r" (?:reference|footnote ref|footnote reference) "),
    "a": re.compile(r" (?:footnote ref|footnote reference) "),
    "span": re.compile(r" katex html "),
}
"""Marks of footnotes, and copies of formulas for the eye."""

_PICTURE_OF_TEXT: Final = re.compile(r" (?:emoji|latex|tex|smiley|emoticon) ")
_NO_HEADING: Final = re.compile(
    r" (?:anchor|anchorjs link|header ?link|header anchor|permalink|hash link|edit|editsection"
    r"|sr only|visually ?hidden|screen reader text) "
)
_LINK_TEXTS: Final = frozenset(
    {"", "#", "link", "permalink", "anchor", "edit", "edit source", "edit section", "top", "source"}
)
_LINK_LABEL: Final = re.compile(r"(?:perma(?:nent )?link|(?:direct )?link to|anchor|edit)\b", re.I)
_AFTER_HEADING: Final = " \t\n¶§🔗\u200b\u200c\u200d\ufeff"
_NO_LINK: Final = re.compile(r"\[[\s|]{0,8}\]\Z")
"""What is left of the brackets around a link to an editor."""
# Text that Markdown would take for structure.
_STRUCTURE: Final = re.compile(r"#{1,6}(?:\s|$)|`{3}|~{3}|(?:-+|=+)\s*$|<!--|<h[1-6]\b", re.I)
_MAX_LINKS: Final = 3
_FEWEST_COLUMNS: Final = 2
_MAX_LABEL_CHARS: Final = 80
_MAX_LEADS: Final = 6
_MAX_LAYOUT_CHARS: Final = 1000
_ENDS_PHRASE: Final = (".", ";", ",", ":", "!", "?")


class _BlockKind(enum.Enum):
    PARAGRAPH = enum.auto()
    TERM = enum.auto()
    ITEM = enum.auto()
    HEADING = enum.auto()
    CODE = enum.auto()
    TABLE = enum.auto()


class _TextBlock(NamedTuple):
    """Lines of text.

    Args:
        marker: Before the first line.
        lead: Before each further line.
    """

    kind: _BlockKind
    text: str
    marker: str = ""
    lead: str = ""

    def __str__(self) -> str:
        return self.marker + self.text.replace("\n", f"\n{self.lead}")


def markdown(element: HtmlElement) -> str:
    """Return the text of an element as Markdown."""
    parts: list[str] = []
    before = None
    for block in _blocks(element):
        if before is not None:
            parts.append("\n" if _is_close(before, block.kind) else "\n\n")
        parts.append(str(block))
        before = block.kind
    return "".join(parts)


def heading_text(element: HtmlElement) -> str:
    """Return the text of a heading without links to itself or to an editor."""
    return next((one.text for one in _blocks(element) if one.kind is _BlockKind.HEADING), "")


def _is_close(before: _BlockKind, kind: _BlockKind) -> bool:
    """Whether no empty line separates two blocks. A term and its text stay in one chunk."""
    if before is _BlockKind.TERM:
        return kind in (_BlockKind.TERM, _BlockKind.ITEM, _BlockKind.PARAGRAPH)
    return before is kind is _BlockKind.ITEM


def _blocks(element: HtmlElement, *, is_cell: bool = False) -> list[_TextBlock]:
    writer = _BlockWriter(is_cell=is_cell)
    walk = iterwalk(element, ("start", "end"))
    for event, one in walk:
        if event == "start":
            if writer.start(one):
                walk.skip_subtree()
        else:
            writer.end(one)
            if one is not element:
                writer.write(one.tail)
    writer.flush()
    return writer.blocks


class _BlockWriter:
    """Collects the blocks of an element while something walks over it.

    Args:
        is_cell: Whether the element is the cell of a table.
    """

    def __init__(self, *, is_cell: bool) -> None:
        self.blocks: list[_TextBlock] = []
        self._is_cell = is_cell
        self._line: list[str] = []
        self._leads: list[str] = []
        self._marker: str | None = None
        self._counts: list[int | None] = []
        self._heading: HtmlElement | None = None

    def write(self, text: str | None) -> None:
        """Append text to the paragraph. Its line breaks are spaces."""
        if text:
            self._line.append(text.replace("\n", " "))

    def flush(self, kind: _BlockKind = _BlockKind.PARAGRAPH) -> None:
        """End the paragraph."""
        lines = (" ".join(line.split()) for line in "".join(self._line).split("\n"))
        text = "\n".join(filter(None, lines))
        self._line.clear()
        if text:
            self._add(kind, text)

    def start(self, element: HtmlElement) -> bool:
        """Begin an element. Return whether all of it is written."""
        tag = element.tag
        if self._heading is not None:
            if _is_no_heading(element):
                return True
            if tag in _BLOCKS or tag == "br":
                self.write(" ")
        elif tag in HEADINGS or element.get("role") == "heading":
            self.flush()
            self._heading = element
        elif is_code(element):
            self.flush()
            self._add_code(code_of(element))
            return True
        elif tag == "table" and (rows := _rows(element)):
            self.flush()
            self._add_table(element, rows)
            return True
        elif tag in _BLOCKS:
            self.flush()
            self._open(element)
        elif (text := _inline(element, self._line, is_cell=self._is_cell)) is not None:
            self._line.append(text)
            return True
        self.write(element.text)
        return False

    def end(self, element: HtmlElement) -> None:
        """End an element that has begun."""
        tag = element.tag
        if self._heading is not None:
            if element is self._heading:
                self._end_heading(element)
        elif tag in _BLOCKS:
            is_term = tag in _TERMS or "admonition-title" in element.get("class", "")
            self.flush(_BlockKind.TERM if is_term else _BlockKind.PARAGRAPH)
            if tag in ("ul", "ol"):
                self._counts.pop()
            elif tag in ("li", "dd", "blockquote"):
                self._leads.pop()
                self._marker = None

    def _open(self, element: HtmlElement) -> None:
        match element.tag:
            case "ul":
                self._counts.append(None)
            case "ol":
                start = element.get("start", "1")
                self._counts.append(int(start) if re.fullmatch(r"\d{1,6}", start) else 1)
            case "li":
                number = self._counts[-1] if self._counts else None
                if number is not None:
                    self._counts[-1] = number + 1
                self._marker = "- " if number is None else f"{number}. "
                self._leads.append(" " * len(self._marker))
            case "dd":
                self._marker = ": "
                self._leads.append("")
            case "blockquote":
                self._leads.append("> ")
                self._marker = None

    def _lead(self, leads: Iterable[str]) -> str:
        return "".join(islice(leads, _MAX_LEADS))

    def _add(self, kind: _BlockKind, text: str) -> None:
        lead = self._lead(self._leads)
        marker, self._marker = self._marker, None
        if kind in (_BlockKind.PARAGRAPH, _BlockKind.TERM):
            text = "\n".join(_escaped(line) for line in text.split("\n"))
        if marker is not None:
            kind = _BlockKind.ITEM
        before = lead if marker is None else self._lead(self._leads[:-1]) + marker
        self.blocks.append(_TextBlock(kind, text, before, lead))

    def _add_code(self, code: str) -> None:
        if not code:
            return
        if self._is_cell:
            self._add(_BlockKind.PARAGRAPH, _inline_code(code))
            return
        if self._marker is not None and self._marker[0].isdigit():
            self._add(_BlockKind.ITEM, "")
        self._marker = None
        longest = max(map(len, re.findall("`+", code)), default=0)
        fence = "`" * max(3, longest + 1)
        self.blocks.append(_TextBlock(_BlockKind.CODE, f"{fence}\n{code}\n{fence}"))

    def _add_table(self, table: HtmlElement, rows: list[list[Cell]]) -> None:
        caption = table.find("caption")
        if caption is not None:
            self.write(" ".join(caption.itertext()))
            self.flush(_BlockKind.TERM)
        self._marker = None
        if text := table_markdown(rows):
            self.blocks.append(_TextBlock(_BlockKind.TABLE, text))

    def _end_heading(self, heading: HtmlElement) -> None:
        self._heading = None
        # A heading may consist of a link to itself.
        text = _without_marks(joined(self._line) or short_text(heading))
        self._line.clear()
        level = HEADINGS.get(heading.tag) or heading.get("aria-level", "2")
        self._marker = None
        # A section in a list is no item of it.
        self._leads = [""] * len(self._leads)
        if text:
            marker = "#" * min(int(level), 6) + " " if str(level).isdecimal() else "## "
            self.blocks.append(_TextBlock(_BlockKind.HEADING, text, marker))


def _inline(element: HtmlElement, line: list[str], *, is_cell: bool) -> str | None:
    """Return what an element in a sentence is in Markdown, or None for that of its content."""
    tag = element.tag
    text: str | None = None
    if tag == "br":
        text = "\n"
    elif tag == "img":
        is_text = is_cell or _PICTURE_OF_TEXT.search(names_of(element))
        text = element.get("alt", "").replace("\n", " ") if is_text else ""
    elif tag in _INLINE_CODE:
        text = _inline_code(joined(element.itertext()))
    elif tag in _DELETED:
        text = f"~~{deleted}~~" if (deleted := joined(element.itertext())) else ""
    elif tag == "math":
        text = _formula(element)
    elif tag in _REFERENCES and _is_reference(element):
        text = ""
    elif tag == "sup":
        power = short_text(element)
        if _POWER.fullmatch(power) and _ends_word(line):
            text = f"^{power}" if element.find("a") is None else f"[{power}]"
    elif tag == "label":
        line.append(" ")
    return text


def _is_reference(element: HtmlElement) -> bool:
    names = names_of(element)
    is_named = bool(names) and _REFERENCES[element.tag].search(names) is not None
    return is_named or element.get("role") == "doc-noteref"


def _inline_code(text: str) -> str:
    if not text:
        return ""
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}"


def _formula(math: HtmlElement) -> str:
    tex = next((one for one in math.iter("annotation") if "tex" in one.get("encoding", "")), None)
    text = joined(tex.itertext()) if tex is not None else math.get("alttext")
    return f"${text}$" if text else joined(math.itertext())


def _ends_word(line: list[str]) -> bool:
    return bool(line) and (line[-1][-1:].isalnum() or line[-1].endswith(")"))


def _is_no_heading(element: HtmlElement) -> bool:
    """Whether an element in a heading is a link to the heading itself, an editor, or a picture."""
    if element.get("aria-hidden") == "true" or _NO_HEADING.search(names_of(element)):
        return True
    if element.tag != "a":
        return False
    if _LINK_LABEL.match(element.get("title") or element.get("aria-label") or ""):
        return True
    text = _without_marks(short_text(element)).lower()
    return text in _LINK_TEXTS or "action=edit" in element.get("href", "")


def _without_marks(text: str) -> str:
    """Return a text without what follows a heading: pilcrows and empty brackets."""
    text = text.rstrip(_AFTER_HEADING)
    for _ in range(_MAX_LINKS):
        if not (found := _NO_LINK.search(text, max(0, len(text) - 10))):
            break
        text = text[: found.start()].rstrip(_AFTER_HEADING)
    return text


def _escaped(line: str) -> str:
    return f"\\{line}" if _STRUCTURE.match(line) else line


def _lines(table: HtmlElement) -> list[list[HtmlElement]]:
    """Return the cells of each row, without those of tables inside."""
    lines = []
    for part in table.iterchildren("tr", "thead", "tbody", "tfoot"):
        for row in (part,) if part.tag == "tr" else part.iterchildren("tr"):
            if cells := list(row.iterchildren("td", "th")):
                lines.append(cells)
    return lines


def _rows(table: HtmlElement) -> list[list[Cell]]:
    """Return the cells of a table of data, or nothing for a table that only arranges a page."""
    if table.get("role") in ("presentation", "none"):
        return []
    if _has_blocks(table):
        _label_cells(table)
        return []
    rows = [[_cell(one) for one in line] for line in _lines(table)]
    if any(cell.is_header for row in rows for cell in row):
        return rows
    is_long = any(len(cell.text) > _MAX_LAYOUT_CHARS for row in rows for cell in row)
    is_grid = len(rows) > 1 and max(map(len, rows)) > 1
    return rows if is_grid and not is_long else []


def _label_cells(table: HtmlElement) -> None:
    """Put the name of its column before each cell of a table that becomes paragraphs."""
    first, *others = _lines(table) or [[]]
    if len(first) < _FEWEST_COLUMNS or not others or any(cell.tag != "th" for cell in first):
        return
    names = [short_text(cell)[:_MAX_LABEL_CHARS] for cell in first]
    for cell in first:
        clear(cell)
    for line in others:
        for name, cell in zip(names, line, strict=False):
            if name:
                insert_label(cell, name)


def _has_blocks(table: HtmlElement) -> bool:
    """Whether a cell has what fits no line of a table."""
    for one in table.iter("table", "pre", "xmp", *HEADINGS):
        if one is table:
            continue
        if not is_code(one):
            is_name = any(around.tag == "th" for around in islice(one.iterancestors(), 3))
            if one.tag == "table" or not is_name:
                return True
        elif "\n" in code_of(one):
            return True
    return False


def _cell(cell: HtmlElement) -> Cell:
    """Return a cell, whose paragraphs and lists become one line."""
    parts: list[str] = []
    before = None
    for block in _blocks(cell, is_cell=True):
        marker = block.marker.strip()
        text = f"{marker} {block.text}" if marker[:1].isdigit() else block.text
        if parts and not parts[-1].endswith(_ENDS_PHRASE):
            if before is _BlockKind.TERM:
                parts[-1] += ":"
            elif block.kind in (_BlockKind.ITEM, _BlockKind.TERM):
                parts[-1] += ";"
        parts.append(joined(text))
        before = block.kind
    is_header = cell.tag == "th" or cell.getparent().getparent().tag == "thead"
    spans = (_span(cell.get("colspan")), _span(cell.get("rowspan")))
    return Cell(" ".join(parts), is_header, *spans)


def _span(value: str | None) -> int:
    return int(value) if value and re.fullmatch(r"\d{1,4}", value) else 1
