"""Finds the blocks of a Markdown document: headings, text, code, tables and comments.

The rules are those of CommonMark and of GitHub's tables, with two bounds: a title has at most 200
characters, and code in lists and quotes is recognized by its fence alone. Nothing is rendered, and
each block is a span of the document.

The time grows linearly with the document, for any text. Each line is read a bounded number of
times, and regular expressions give nothing back.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from ragcache_core.documents.markdown_titles import title_of

MAX_FRONT_MATTER_CHARS: Final = 1 << 16
_MAX_HEADING_CHARS: Final = 1000
_CODE_COLUMNS: Final = 4
"""Code without a fence is indented by so many columns more than the text around it."""

_MAX_COLUMNS: Final = 256
_BLANK: Final = re.compile(r"\s++")
_SPECIAL_STARTS: Final = frozenset(" \t`~#<>[-*+0123456789")
"""Lines that begin with other characters are text or rows of a table."""

_FENCE: Final = re.compile(
    r"[ \t]*+((?:>[ \t]*+|(?:[-*+]|\d{1,9}[.)])[ \t]++){0,8}+)(`{3,}+(?![^\n]*`)|~{3,}+)"
)
_HEADING: Final = re.compile(r" {0,3}(#{1,6})(?=[ \t]|$)")
_HTML_HEADING: Final = re.compile(
    r"[ \t]*+(?:<(?:a|center|div|header|p|section)\b[^<>\n]{0,200}+>[ \t]*+){0,3}+"
    r"<h([1-6])(?=[\s>])",
    re.IGNORECASE,
)
_HEADING_END: Final = re.compile("</h", re.IGNORECASE)
_UNDERLINE: Final = re.compile(r" {0,3}(={2,}+|-{2,}+)[ \t]*$")
_VERBATIM: Final = re.compile(r" {0,3}<(pre|script|style|textarea)(?=[\s>])", re.IGNORECASE)
_COMMENT: Final = re.compile(r"[ \t]*+(?:>[ \t]*+){0,8}+(<!--)")
_LINK_COMMENT: Final = re.compile(r""" {0,3}\[(?://|comment|_|#)?\]:[ \t]*(?:#|<>)[ \t]+["'(].*$""")
_DELIMITER_ROW: Final = re.compile(
    r"[ \t>]*+\|?[ \t]*+:?-++:?[ \t]*+(?:\|[ \t]*+:?-++:?[ \t]*+)*+\|?[ \t]*$"
)
_ITEM: Final = re.compile(r"[ \t]*+(?:[-*+]|\d{1,9}[.)])(?:[ \t]++|$)")
# Notes, tabs, footnotes and definitions of common dialects: their text is indented by four.
_INDENTED_TEXT: Final = re.compile(
    r"[ \t]*+(?:!!!|\?\?\?\+?|===|:::?|\[\^[^\]\s]{1,64}\]:|:)(?:[ \t]|$)"
)
_FRONT_MATTER: Final = re.compile(
    r"(---|\+\+\+)[ \t]*+\n(?:[ \t]*+(?:#[^\n]*+)?\n)*+"
    r"(?=[\"']?[\w.$-]{1,64}[\"']?[ \t]*[:=]|\[[\w.]{1,64}\])"
)
_FRONT_MATTER_END: Final = {
    "---": re.compile(r"^(?:---|\.\.\.)[ \t]*$", re.MULTILINE),
    "+++": re.compile(r"^\+\+\+[ \t]*$", re.MULTILINE),
}


class BlockKind(enum.Enum):
    """What a block is."""

    HEADING = enum.auto()
    TEXT = enum.auto()
    CODE = enum.auto()
    TABLE = enum.auto()
    COMMENT = enum.auto()


class Block(NamedTuple):
    """Lines that belong together, from their first character to the last one that is no space.

    A heading has a title and a level from 1 to 6. ``head_end`` is the end of the line that
    opens a code fence, or of the rows that name the columns of a table. 0: there are none. Code
    begins with its indentation.
    """

    start: int
    end: int
    kind: BlockKind
    title: str = ""
    level: int = 0
    head_end: int = 0


class FrontMatter(NamedTuple):
    """The data between two marks at the start of a document: text[start:end]."""

    mark: str
    start: int
    end: int
    whole_end: int


def front_matter(text: str) -> FrontMatter | None:
    """Return what looks like front matter: YAML between ``---`` lines or TOML between ``+++``."""
    opening = _FRONT_MATTER.match(text)
    if opening is None:
        return None
    mark = opening.group(1)
    closing = _FRONT_MATTER_END[mark].search(text, opening.end(), MAX_FRONT_MATTER_CHARS)
    if closing is None:
        return None
    return FrontMatter(mark, len(mark), closing.start(), closing.end())


def markdown_blocks(text: str) -> Iterator[Block]:
    """Yield the blocks of a document, in order. Together they hold all its text but white space.

    Args:
        text: Its lines end with a line feed. What looks like front matter is code here. The gateway
            removes what it can read.
    """
    return _Scanner(text).blocks()


def text_blocks(text: str) -> Iterator[Block]:
    """Yield the paragraphs of a plain text, between blank lines."""
    position = 0
    start: int | None = None
    while position < len(text):
        end = _line_end(text, position)
        if not text[position:end].isspace():
            start = position if start is None else start
        elif start is not None:
            yield _block(text, start, position, BlockKind.TEXT)
            start = None
        position = end
    if start is not None:
        yield _block(text, start, position, BlockKind.TEXT)


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text = text
        self._start: int | None = None  # of the open paragraph
        self._end = 0
        self._may_be_title = False
        self._text_column = 0  # where the text of the current list item begins
        self._absent: set[str] = set()  # ends that do not come any more

    def blocks(self) -> Iterator[Block]:
        text = self._text
        position = 0
        if (front := front_matter(text)) is not None:
            yield _block(text, 0, front.whole_end, BlockKind.CODE)
            position = front.whole_end
        line_end = 0
        while position < len(text):
            # Not once for each block of a line, which may be as long as the document.
            if position >= line_end:
                line_end = _line_end(text, position)
            end = line_end
            if _BLANK.fullmatch(text, position, end):
                yield from self._finished()
            elif (block := self._setext_heading(position, end)) is not None:
                self._start = None
                yield block
            elif (block := self._block_at(position, end)) is not None:
                yield from self._finished()
                yield block
                # What follows on the line of a comment is a line of its own.
                end = block.end
            else:
                self._add_line(position, end)
            position = end
        yield from self._finished()

    def _finished(self) -> Iterator[Block]:
        """Yield the open paragraph, if there is one, and close it."""
        if self._start is not None:
            yield _block(self._text, self._start, self._end, BlockKind.TEXT)
            self._start = None

    def _add_line(self, position: int, end: int) -> None:
        item = _ITEM.match(self._text, position, end)
        column = _column(self._text, position, end)
        if item is not None:
            width = len(self._text[position : item.end()].expandtabs(_CODE_COLUMNS).rstrip("\n"))
            self._text_column = min(width, column + 2 * _CODE_COLUMNS)
        elif _INDENTED_TEXT.match(self._text, position, end):
            self._text_column = column + _CODE_COLUMNS
        elif self._start is None and column < self._text_column:
            self._text_column = column if column > 1 else 0
        is_plain = item is None and not self._text.startswith((">", "|"), position)
        if self._start is None:
            self._start = position
            self._may_be_title = is_plain and column < _CODE_COLUMNS
        self._may_be_title = self._may_be_title and is_plain
        self._end = end

    def _block_at(self, position: int, end: int) -> Block | None:
        """Return the block that begins with a line and is no text, or None."""
        text = self._text
        if text[position] not in _SPECIAL_STARTS:
            return self._table(position, end)
        if (fence := _FENCE.match(text, position, end)) is not None:
            return self._fenced(position, end, fence)
        column = _column(text, position, end)
        if self._start is None and column >= self._text_column + _CODE_COLUMNS:
            return self._indented(position, end)
        if (block := self._comment(position, end) or self._heading(position, end)) is not None:
            return block
        if (verbatim := _VERBATIM.match(text, position, end)) is not None:
            close = self._find(f"</{verbatim.group(1)}", position)
            if close is not None:
                return _block(text, position, _line_end(text, close), BlockKind.CODE)
        return self._table(position, end)

    def _fenced(self, position: int, line_end: int, fence: re.Match[str]) -> Block:
        text = self._text
        is_quoted = ">" in fence.group(1)
        mark = fence.group(2)
        # A mark that is indented like code is part of the code.
        most_columns = _CODE_COLUMNS + len(
            text[position : fence.start(2)].expandtabs(_CODE_COLUMNS)
        )
        end = line_end
        while end < len(text):
            start, end = end, _line_end(text, end)
            line = text[start:end].strip()
            if is_quoted:
                if not line.startswith(">"):
                    end = start
                    break
                line = line.lstrip("> \t")
            if len(line) < len(mark) or line.strip(mark[0]):
                continue
            if is_quoted or _column(text, start, end) < most_columns:
                break
        head_end = _stripped_end(text, position, line_end)
        return _block(text, position, end, BlockKind.CODE)._replace(head_end=head_end)

    def _indented(self, position: int, end: int) -> Block:
        text = self._text
        least_column = self._text_column + _CODE_COLUMNS
        last_end = end
        while end < len(text):
            start, end = end, _line_end(text, end)
            if text[start:end].isspace():
                continue
            if _column(text, start, end) < least_column:
                break
            last_end = end
        return _block(text, position, last_end, BlockKind.CODE)

    def _comment(self, position: int, end: int) -> Block | None:
        comment = _COMMENT.match(self._text, position, end)
        if comment is not None:
            # "<!-->" is a whole comment.
            close = self._find("-->", comment.start(1) + 2)
            if close is not None:
                return _block(self._text, position, close + len("-->"), BlockKind.COMMENT)
        elif self._start is None and _LINK_COMMENT.match(self._text, position, end):
            return _block(self._text, position, end, BlockKind.COMMENT)
        return None

    def _heading(self, position: int, end: int) -> Block | None:
        text = self._text
        if (mark := _HEADING.match(text, position, end)) is not None:
            if end - position > _MAX_HEADING_CHARS:
                return None
            title = text[mark.end() : end].strip()
            closed = title.rstrip("#")
            if not closed or closed[-1].isspace():  # "## Title ##", but not "## C#"
                title = closed
            return self._titled(mark.start(1), end, title, len(mark.group(1))) if title else None
        if (tag := _HTML_HEADING.match(text, position, end)) is None:
            return None
        level = tag.group(1)
        end_tag = _HEADING_END.search(text, tag.end(), tag.end() + _MAX_HEADING_CHARS)
        close = -1 if end_tag is None else end_tag.start()
        begin = text.find(">", tag.end(), close) + 1 if close >= 0 else 0
        close_end = close + len("</h1>")
        if not begin or text[close + 3 : close_end] != f"{level}>":
            return None
        return self._titled(position, close_end, text[begin:close], int(level))

    def _setext_heading(self, position: int, end: int) -> Block | None:
        """Return the heading that an underline makes of the open paragraph, or None."""
        if self._start is None or not self._may_be_title:
            return None
        underline = _UNDERLINE.match(self._text, position, end)
        if underline is None or self._end - self._start > _MAX_HEADING_CHARS:
            return None
        level = 1 if underline.group(1)[0] == "=" else 2
        return self._titled(self._start, end, self._text[self._start : self._end], level)

    def _titled(self, start: int, end: int, raw: str, level: int) -> Block | None:
        title = title_of(raw)
        if title is None:
            return None
        self._text_column = 0
        block = _block(self._text, start, end, BlockKind.HEADING)
        return block._replace(title=title, level=level)

    def _table(self, position: int, end: int) -> Block | None:
        text = self._text
        delimiter_end = _line_end(text, end)
        if (
            "|" not in text[position:end]
            or "|" not in text[end:delimiter_end]
            or _DELIMITER_ROW.match(text, end, delimiter_end) is None
        ):
            return None
        head_end = last_end = delimiter_end
        names_columns = bool(text[position:end].strip("|> \t\n"))
        while last_end < len(text):
            row_end = _line_end(text, last_end)
            if "|" not in text[last_end:row_end] or _HEADING.match(text, last_end, row_end):
                break
            if not names_columns:  # office files name the columns in the first row
                head_end, names_columns = row_end, True
            last_end = row_end
        block = _block(text, position, last_end, BlockKind.TABLE)
        return block._replace(head_end=_stripped_end(text, position, head_end))

    def _find(self, end_mark: str, position: int) -> int | None:
        """Return where an end mark comes next. If there is none, it is not searched again."""
        if end_mark in self._absent:
            return None
        found = self._text.find(end_mark, position)
        if found < 0:
            self._absent.add(end_mark)
            return None
        return found


def _block(text: str, start: int, end: int, kind: BlockKind) -> Block:
    """Return a block of lines that are not all blank."""
    if kind is not BlockKind.CODE:
        while text[start].isspace():
            start += 1
    return Block(start, _stripped_end(text, start, end), kind)


def _line_end(text: str, position: int) -> int:
    """Return where the line of a position ends, after its line feed."""
    end = text.find("\n", position)
    return len(text) if end < 0 else end + 1


def _stripped_end(text: str, start: int, end: int) -> int:
    """Return the end of text[start:end] without white space after it."""
    while end > start and text[end - 1].isspace():
        end -= 1
    return end


def _column(text: str, position: int, end: int) -> int:
    """Return the column of the first character of a line that is no space or tab."""
    column = 0
    while position < end and column < _MAX_COLUMNS:
        if text[position] == " ":
            column += 1
        elif text[position] == "\t":
            column += _CODE_COLUMNS - column % _CODE_COLUMNS
        else:
            break
        position += 1
    return column
