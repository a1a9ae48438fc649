"""Splits a document into chunks, by the serving model's tokens.

The splitter reads a document as *units*: headings, code blocks and sentences. A list item or a
table row counts as a sentence. It splits a unit that is longer than a chunk at lines or words. A
chunk is a sequence of units, and its text is the slice of the document that they span. The splitter
inserts nothing, neither a heading nor a number. So a chunk's tokens never depend on its position.

The splitter fills a chunk and then moves its end back to the strongest border that leaves it at
least half full: before a heading, else between paragraphs, else between sentences. It avoids chunks
that end with a heading. Inside a section, the next chunk begins with the last whole sentences of
the chunk before, as far as the overlap allows.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ragcache_retriever.documents.collection import Chunking

CHUNKER_VERSION = 1
"""Increase it when documents would be split otherwise. Stored documents are then rebuilt."""

CountTokens = Callable[[str], int]

_MAX_HEADING_CHARS = 200
# No tokenizer's tokens are longer on average. A longer text is too long without counting.
_MAX_CHARS_PER_TOKEN = 64

_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_HEADING = re.compile(r" {0,3}(#{1,6})(?:[ \t]|$)")
_FENCE = re.compile(r"[ \t]*(`{3,}(?!.*`)|~{3,})")
_LIST_NUMBER = re.compile(r"\s*\d{1,9}")
# Repeats are bounded, so that a megabyte of dots is fast. Full-width marks end a sentence too.
_SENTENCE_END = re.compile(
    r"""[.!?…]{1,8}["'”’)\]*_]{0,8}(?=\s)"""  # noqa: RUF001
    r"""|[。！？]{1,8}[」』”’）]{0,8}"""  # noqa: RUF001
    r"""|\n(?=[ \t]*(?:[-*+]|\d{1,9}[.)])[ \t]|[ \t]*\|)"""
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a document.

    ``heading_path`` holds the titles of the sections it begins in, outermost first.
    """

    text: str
    heading_path: tuple[str, ...]


class _Border(enum.IntEnum):
    """How suitable the border before a unit is for a split."""

    WORD = 0
    SENTENCE = 1
    PARAGRAPH = 2
    SECTION = 3


class _Kind(enum.Enum):
    HEADING = enum.auto()
    SENTENCE = enum.auto()
    CODE = enum.auto()
    PART = enum.auto()  # part of a sentence or line that is longer than a chunk


@dataclass(frozen=True, slots=True)
class _Block:
    """Lines that belong together. A heading has a title and a level."""

    start: int
    end: int
    kind: _Kind
    title: str = ""
    level: int = 0


@dataclass(frozen=True, slots=True)
class _Unit:
    """text[start:end] without white space at its ends. tokens: counted on it alone."""

    start: int
    end: int
    kind: _Kind
    border: _Border
    heading_path: tuple[str, ...]
    tokens: int


def split_document(
    text: str, *, markdown: bool, chunking: Chunking, count_tokens: CountTokens
) -> list[Chunk]:
    """Return the chunks of a document, in order. Together they hold all its text but white space.

    No chunk has more than ``chunking.size_tokens`` tokens.

    Args:
        markdown: Whether to recognize headings and code fences.
        count_tokens: Returns the number of tokens of a text encoded by itself.
    """
    text = _normalised(text)
    splitter = _Splitter(text, chunking, count_tokens)
    units = list(splitter.units(markdown))
    return list(splitter.chunks(units))


def first_heading(text: str) -> str | None:
    """Return the title of the first Markdown heading."""
    blocks = _blocks(_normalised(text), markdown=True)
    return next((block.title for block in blocks if block.kind is _Kind.HEADING), None)


def _normalised(text: str) -> str:
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


class _Splitter:
    def __init__(self, text: str, chunking: Chunking, count_tokens: CountTokens) -> None:
        self._text = text
        self._size = chunking.size_tokens
        self._overlap = chunking.overlap_tokens
        self._count_tokens = count_tokens

    def _fits(self, start: int, end: int) -> bool:
        if end - start > _MAX_CHARS_PER_TOKEN * self._size:
            return False
        return self._count_tokens(self._text[start:end]) <= self._size

    # From text to units

    def units(self, markdown: bool) -> Iterator[_Unit]:
        headings: list[tuple[int, str]] = []
        border = _Border.SECTION
        for block in _blocks(self._text, markdown):
            if block.kind is _Kind.HEADING and self._fits(block.start, block.end):
                while headings and headings[-1][0] >= block.level:
                    headings.pop()
                headings.append((block.level, block.title))
                border = _Border.SECTION
            path = tuple(title for _, title in headings)
            for start, end, kind, inner in self._parts(block):
                tokens = self._count_tokens(self._text[start:end])
                yield _Unit(start, end, kind, border if inner is None else inner, path, tokens)
            border = _Border.PARAGRAPH

    def _parts(self, block: _Block) -> Iterator[tuple[int, int, _Kind, _Border | None]]:
        """Yield spans of a block that fit a chunk. Border None: that of the block itself."""
        if block.kind is not _Kind.SENTENCE and self._fits(block.start, block.end):
            yield block.start, block.end, block.kind, None
            return
        spans = _line_spans if block.kind is _Kind.CODE else _sentence_spans
        inner: _Border | None = None
        for start, end in spans(self._text, block.start, block.end):
            if self._fits(start, end):
                kind = _Kind.CODE if block.kind is _Kind.CODE else _Kind.SENTENCE
                yield start, end, kind, inner
            else:
                for part_start, part_end in self._word_spans(start, end):
                    yield part_start, part_end, _Kind.PART, inner
                    inner = _Border.WORD
            inner = _Border.SENTENCE

    def _word_spans(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the longest spans that fit, split between words if there are any."""
        while (stripped := _stripped_span(self._text, start, end)) is not None:
            start = stripped[0]
            stop = self._longest_end(start, stripped[1])
            if stop < stripped[1]:
                stop = self._word_end(start, stop)
            yield start, stop
            start = stop

    def _longest_end(self, start: int, end: int) -> int:
        """Return an end such that text[start:end] fits and one more character does not."""
        low, high = start + 1, min(end, start + self._size)
        while self._fits(start, high):
            if high == end:
                return end
            low, high = high, min(end, start + 2 * (high - start))
        while high - low > 1:
            middle = (low + high) // 2
            if self._fits(start, middle):
                low = middle
            else:
                high = middle
        return low

    def _word_end(self, start: int, stop: int) -> int:
        """Return the last end of a word in the second half of the span, or the last that fits."""
        for position in range(stop, start + (stop - start) // 2, -1):
            ends_word = self._text[position].isspace() and not self._text[position - 1].isspace()
            # Counts do not always grow with the text, so each candidate is counted.
            if ends_word and self._fits(start, position):
                return position
        stripped = _stripped_span(self._text, start, stop)
        return stripped[1] if stripped is not None and self._fits(*stripped) else stop

    # From units to chunks

    def chunks(self, units: list[_Unit]) -> Iterator[Chunk]:
        start = first = 0  # units[start:first] are the overlap with the chunk before
        while first < len(units):
            end = self._move_end_back(units, start, first, self._furthest_end(units, start, first))
            leading = first
            while units[leading].kind is _Kind.HEADING and leading + 1 < end:
                leading += 1
            text = self._text[units[start].start : units[end - 1].end]
            yield Chunk(text, units[leading].heading_path)
            if end < len(units):
                start, first = self._overlap_start(units, start, end), end
            else:
                first = end

    def _furthest_end(self, units: list[_Unit], start: int, first: int) -> int:
        """Return the furthest end such that units[start:end] fit."""

        def fits(end: int) -> bool:
            return self._fits(units[start].start, units[end - 1].end)

        end = first + 1
        tokens = sum(unit.tokens for unit in units[start:end])
        while end < len(units) and tokens + units[end].tokens <= self._size:
            tokens += units[end].tokens
            end += 1
        # The count of a text differs a little from the sum of its parts.
        while end > first + 1 and not fits(end):
            end -= 1
        while end < len(units) and fits(end + 1):
            end += 1
        return end

    def _move_end_back(self, units: list[_Unit], start: int, first: int, end: int) -> int:
        if end == len(units):
            return end
        ends = [k for k in range(first + 1, end + 1) if units[k - 1].kind is not _Kind.HEADING]
        if not ends:
            return end
        tokens = sum(unit.tokens for unit in units[start:first])
        half_full = []
        for k in range(first + 1, end + 1):
            tokens += units[k - 1].tokens
            if 2 * tokens >= self._size and units[k - 1].kind is not _Kind.HEADING:
                half_full.append(k)
        return max(half_full, key=lambda k: (units[k].border, k), default=ends[-1])

    def _overlap_start(self, units: list[_Unit], start: int, first: int) -> int:
        """Return the first unit of the next chunk, whose own units begin at ``first``.

        ``start`` is the first unit of the chunk before.
        """
        if units[first].border is _Border.SECTION:
            return first
        k = first
        while (
            k - 1 > start
            and units[k - 1].kind is _Kind.SENTENCE
            and self._tokens(units, k - 1, first) <= self._overlap
            and self._tokens(units, k - 1, first + 1) <= self._size
        ):
            k -= 1
        return k

    def _tokens(self, units: list[_Unit], start: int, end: int) -> int:
        return self._count_tokens(self._text[units[start].start : units[end - 1].end])


def _blocks(text: str, markdown: bool) -> Iterator[_Block]:
    """Yield headings, code blocks and paragraphs, without the blank lines between them."""
    fence = ""
    kind = _Kind.SENTENCE
    start: int | None = None
    end = 0

    def finished() -> Iterator[_Block]:
        stripped = None if start is None else _stripped_span(text, start, end)
        if stripped is not None:
            yield _Block(*stripped, kind)

    for match in _LINE.finditer(text):
        line = match.group()
        if fence:
            end = match.end()
            if _closes(line, fence):
                yield from finished()
                start, fence, kind = None, "", _Kind.SENTENCE
            continue
        opening = _FENCE.match(line) if markdown else None
        heading = _heading(match.start(), line) if markdown else None
        if opening or heading or line.isspace():
            yield from finished()
            start = None
        if opening:
            start, end, kind, fence = match.start(), match.end(), _Kind.CODE, opening.group(1)
        elif heading:
            yield heading
        elif not line.isspace():
            start = match.start() if start is None else start
            end = match.end()
    yield from finished()


def _heading(start: int, line: str) -> _Block | None:
    match = _HEADING.match(line)
    if match is None or len(line) > _MAX_HEADING_CHARS:
        return None
    title = line[match.end() :].strip()
    closed = title.rstrip("#")
    if not closed or closed[-1].isspace():  # "## Title ##", but not "## C#"
        title = closed.rstrip()
    if not title:
        return None
    end = start + len(line.rstrip())
    return _Block(start + match.start(1), end, _Kind.HEADING, title, len(match.group(1)))


def _closes(line: str, fence: str) -> bool:
    stripped = line.strip()
    return len(stripped) >= len(fence) and not stripped.strip(fence[0])


def _line_spans(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    for match in _LINE.finditer(text, start, end):
        stripped = _stripped_span(text, match.start(), match.end())
        if stripped is not None:
            yield stripped


def _sentence_spans(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    begin = start
    for match in _SENTENCE_END.finditer(text, start, end):
        if _ends_sentence(text, begin, match, end):
            stripped = _stripped_span(text, begin, match.end())
            if stripped is not None:
                yield stripped
            begin = match.end()
    stripped = _stripped_span(text, begin, end)
    if stripped is not None:
        yield stripped


def _ends_sentence(text: str, begin: int, match: re.Match[str], end: int) -> bool:
    if match.group() == "\n":
        return True
    if _LIST_NUMBER.fullmatch(text, begin, match.start()):
        return False  # the "1." before an item
    following = match.end()
    while following < end and text[following].isspace():
        following += 1
    return following == end or not text[following].islower()


def _stripped_span(text: str, start: int, end: int) -> tuple[int, int] | None:
    """Return the span without white space at its ends, or None if nothing is left."""
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    return (start, end) if start < end else None
