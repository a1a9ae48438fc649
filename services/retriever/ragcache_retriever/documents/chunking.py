"""Cuts a document into chunks, by the serving model's tokens.

A document is read as *units*: headings, code blocks, sentences (list items and table rows count as
such). A unit that is longer than a chunk is cut further, at lines or words. A chunk is a run of
units, and its text the very slice of the document they span: nothing is put in, no heading, no
number, so that its tokens never depend on where it stands.

Chunks are filled up, then cut back to the strongest border that leaves them at least half full:
before a heading, else between paragraphs, else between sentences. A chunk never ends with a heading
if that can be helped. What follows a cut inside a section begins with the last whole sentences of
the chunk before, as far as the overlap allows.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ragcache_retriever.documents.collection import Chunking

CHUNKER_VERSION = 1
"""Counts up when the same document would be cut otherwise: stored documents are then cut anew."""

CountTokens = Callable[[str], int]

_MAX_HEADING_CHARS = 200
# No tokenizer's tokens are longer on average; a longer text need not be counted to be too long.
_MAX_CHARS_PER_TOKEN = 64

_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_HEADING = re.compile(r" {0,3}(#{1,6})(?:[ \t]|$)")
_FENCE = re.compile(r"[ \t]*(`{3,}(?!.*`)|~{3,})")
_LIST_NUMBER = re.compile(r"\s*\d{1,9}")
# Bounded repeats: a megabyte of dots must not take a day. Full-width marks end a sentence too.
_SENTENCE_END = re.compile(
    r"""[.!?…]{1,8}["'”’)\]*_]{0,8}(?=\s)"""  # noqa: RUF001
    r"""|[。！？]{1,8}[」』”’）]{0,8}"""  # noqa: RUF001
    r"""|\n(?=[ \t]*(?:[-*+]|\d{1,9}[.)])[ \t]|[ \t]*\|)"""
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a document. heading_path: titles of the sections it begins in, outermost first."""

    text: str
    heading_path: tuple[str, ...]


class _Border(enum.IntEnum):
    """How well a document may be cut before a unit."""

    WORD = 0
    SENTENCE = 1
    PARAGRAPH = 2
    SECTION = 3


class _Kind(enum.Enum):
    HEADING = enum.auto()
    SENTENCE = enum.auto()
    CODE = enum.auto()
    PART = enum.auto()  # of a sentence or line that is longer than a chunk


@dataclass(frozen=True, slots=True)
class _Block:
    """Lines that belong together. title, level: of a heading."""

    start: int
    end: int
    kind: _Kind
    title: str = ""
    level: int = 0


@dataclass(frozen=True, slots=True)
class _Unit:
    """text[start:end] holds no white space at its ends. tokens: its own, without what is around."""

    start: int
    end: int
    kind: _Kind
    border: _Border
    heading_path: tuple[str, ...]
    tokens: int


def cut(text: str, *, markdown: bool, chunking: Chunking, count_tokens: CountTokens) -> list[Chunk]:
    """Chunks of a document, in order; together they hold all its text but white space.

    markdown: whether to see headings and code fences. count_tokens: number of tokens of a text
    encoded by itself; no chunk has more than chunking.size_tokens.
    """
    text = _normalised(text)
    cutter = _Cutter(text, chunking, count_tokens)
    units = list(cutter.units(markdown))
    return list(cutter.chunks(units))


def first_heading(text: str) -> str | None:
    """Title of the first Markdown heading."""
    blocks = _blocks(_normalised(text), markdown=True)
    return next((block.title for block in blocks if block.kind is _Kind.HEADING), None)


def _normalised(text: str) -> str:
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


class _Cutter:
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
        """Spans of a block that fit a chunk; a border of None is that of the block itself."""
        if block.kind is not _Kind.SENTENCE and self._fits(block.start, block.end):
            yield block.start, block.end, block.kind, None
            return
        spans = _lines if block.kind is _Kind.CODE else _sentences
        inner: _Border | None = None
        for start, end in spans(self._text, block.start, block.end):
            if self._fits(start, end):
                kind = _Kind.CODE if block.kind is _Kind.CODE else _Kind.SENTENCE
                yield start, end, kind, inner
            else:
                for part_start, part_end in self._words(start, end):
                    yield part_start, part_end, _Kind.PART, inner
                    inner = _Border.WORD
            inner = _Border.SENTENCE

    def _words(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Spans that fit, as long as can be, cut between words where there are any."""
        while (bare := _bare(self._text, start, end)) is not None:
            start = bare[0]
            stop = self._longest(start, bare[1])
            if stop < bare[1]:
                stop = self._before_word(start, stop)
            yield start, stop
            start = stop

    def _longest(self, start: int, end: int) -> int:
        """An end such that text[start:end] fits and one more character does not."""
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

    def _before_word(self, start: int, stop: int) -> int:
        """The last end of a word in the second half of text[start:stop], else as near as fits."""
        for position in range(stop, start + (stop - start) // 2, -1):
            ends_word = self._text[position].isspace() and not self._text[position - 1].isspace()
            # Counts do not always grow with the text, so what fits is asked, not assumed.
            if ends_word and self._fits(start, position):
                return position
        bare = _bare(self._text, start, stop)
        return bare[1] if bare is not None and self._fits(*bare) else stop

    # From units to chunks

    def chunks(self, units: list[_Unit]) -> Iterator[Chunk]:
        start = first = 0  # units[start:first] repeat the chunk before
        while first < len(units):
            end = self._cut_back(units, start, first, self._fill(units, start, first))
            led = first
            while units[led].kind is _Kind.HEADING and led + 1 < end:
                led += 1
            text = self._text[units[start].start : units[end - 1].end]
            yield Chunk(text, units[led].heading_path)
            if end < len(units):
                start, first = self._overlap_start(units, start, end), end
            else:
                first = end

    def _fill(self, units: list[_Unit], start: int, first: int) -> int:
        """The furthest end such that units[start:end] fit."""

        def fits(end: int) -> bool:
            return self._fits(units[start].start, units[end - 1].end)

        end = first + 1
        tokens = sum(unit.tokens for unit in units[start:end])
        while end < len(units) and tokens + units[end].tokens <= self._size:
            tokens += units[end].tokens
            end += 1
        # Tokens of a whole differ a little from those of its parts.
        while end > first + 1 and not fits(end):
            end -= 1
        while end < len(units) and fits(end + 1):
            end += 1
        return end

    def _cut_back(self, units: list[_Unit], start: int, first: int, end: int) -> int:
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
        """First unit of the chunk whose own units begin at first; the one before began at start."""
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
    """Headings, code blocks and paragraphs, without the blank lines between them."""
    fence = ""
    kind = _Kind.SENTENCE
    start: int | None = None
    end = 0

    def finished() -> Iterator[_Block]:
        bare = None if start is None else _bare(text, start, end)
        if bare is not None:
            yield _Block(*bare, kind)

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
    bare = line.strip()
    return len(bare) >= len(fence) and not bare.strip(fence[0])


def _lines(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    for match in _LINE.finditer(text, start, end):
        bare = _bare(text, match.start(), match.end())
        if bare is not None:
            yield bare


def _sentences(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    begin = start
    for match in _SENTENCE_END.finditer(text, start, end):
        if _ends_sentence(text, begin, match, end):
            bare = _bare(text, begin, match.end())
            if bare is not None:
                yield bare
            begin = match.end()
    bare = _bare(text, begin, end)
    if bare is not None:
        yield bare


def _ends_sentence(text: str, begin: int, match: re.Match[str], end: int) -> bool:
    if match.group() == "\n":
        return True
    if _LIST_NUMBER.fullmatch(text, begin, match.start()):
        return False  # the "1." before an item
    following = match.end()
    while following < end and text[following].isspace():
        following += 1
    return following == end or not text[following].islower()


def _bare(text: str, start: int, end: int) -> tuple[int, int] | None:
    """The span without white space at its ends; None if nothing is left."""
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    return (start, end) if start < end else None
