"""Splits a document into chunks, by the serving model's tokens.

The splitter reads a document as *units*: headings, code blocks and sentences. A list item or a
table row counts as a sentence. It splits a unit that is longer than a chunk at lines or words. A
chunk is a sequence of units, and its text is the slice of the document that they span. The splitter
inserts nothing, neither a heading nor a number. So a chunk's tokens never depend on its position.

The splitter fills a chunk and then moves its end back to the strongest border that leaves it at
least half full: before a heading, else between paragraphs, else between sentences. It avoids chunks
that end with a heading. Inside a section, the next chunk begins with the last whole sentences of
the chunk before, as far as the overlap allows.

Its time grows linearly with the document, for any text. Regular expressions bound their repeats or
give nothing back. The ends of chunks are found by a few token counts, from estimates.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ragcache_retriever.documents.collection import Chunking
from ragcache_retriever.documents.pages import PAGE_BREAK, PageBreaks

CHUNKER_VERSION = 3
"""Increase it when documents would be split otherwise. Stored documents are then rebuilt."""

CountTokens = Callable[[str], int]

_MAX_HEADING_CHARS = 200
# A title further down is no title of the document, and the caller waits for it.
_MAX_TITLE_SEARCH_CHARS = 1 << 16
# No tokenizer's tokens are longer on average. A longer text is too long without counting.
_MAX_CHARS_PER_TOKEN = 64
# List items, table cells and gaps recur; longer texts hardly do.
_MAX_CACHED_CHARS = 16
_MAX_CACHED_COUNTS = 1 << 14
# Most that units apart are taken to have more tokens, or fewer, than joined.
_MAX_ESTIMATE_RATIO = 4
# A part of a long sentence may have a 32nd fewer tokens than fit, which saves most counts.
_PART_TOLERANCE = 32
_MAX_WORD_CHARS = 64
_MAX_TRIED_WORD_ENDS = 8

_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_HEADING = re.compile(r" {0,3}(#{1,6})(?:[ \t]|$)")
# "++" and ",}+" give nothing back, so a line of backticks is read once for each alternative.
_FENCE = re.compile(r"[ \t]*+(`{3,}+(?!.*`)|~{3,}+)")
_LIST_NUMBER = re.compile(r"\d{1,9}")
# Repeats are bounded, so that a megabyte of dots is fast. Full-width marks end a sentence too.
_SENTENCE_END = re.compile(
    r"""[.!?…]{1,8}["'”’)\]*_]{0,8}(?=\s)"""  # noqa: RUF001
    r"""|[。！？]{1,8}[」』”’）]{0,8}"""  # noqa: RUF001
    r"""|\n(?=[ \t]*(?:[-*+]|\d{1,9}[.)])[ \t]|[ \t]*\|)"""
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a document.

    ``heading_path`` holds the titles of the sections it begins in, outermost first. ``page`` and
    ``page_end`` are its first and last page, from 1; 0 in a document without pages.
    """

    text: str
    heading_path: tuple[str, ...]
    page: int = 0
    page_end: int = 0


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


class _Block(NamedTuple):
    """Lines that belong together. A heading has a title and a level."""

    start: int
    end: int
    kind: _Kind
    title: str = ""
    level: int = 0


class _Unit(NamedTuple):
    """text[start:end] without white space at its ends.

    ``tokens_before`` and ``tokens_after`` are the sums of tokens from the document's start until
    the unit's start and end, each unit and each long gap counted by itself.
    """

    start: int
    end: int
    kind: _Kind
    border: _Border
    heading_path: tuple[str, ...]
    tokens_before: int
    tokens_after: int


class _Part(NamedTuple):
    """A span of a block that fits a chunk. border None: that of the block itself."""

    start: int
    end: int
    kind: _Kind
    border: _Border | None
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
    breaks = PageBreaks(text)
    # To a reader of a chunk, a new page is a new line.
    splitter = _Splitter(text.replace(PAGE_BREAK, "\n"), breaks, chunking, count_tokens)
    return list(splitter.chunks(_UnitWindow(splitter.units(markdown))))


def first_heading(text: str) -> str | None:
    """Return the title of the first Markdown heading near the start of a document."""
    end = text.find("\n", _MAX_TITLE_SEARCH_CHARS)
    blocks = _blocks(_normalised(text if end < 0 else text[:end]), markdown=True)
    return next((block.title for block in blocks if block.kind is _Kind.HEADING), None)


def _normalised(text: str) -> str:
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


class _UnitWindow:
    """The units of a document by their index, read on demand and forgotten after use.

    A document of many short lines has a unit for each of them, which would take a hundred times
    its memory.
    """

    def __init__(self, units: Iterator[_Unit]) -> None:
        self._units = units
        self._kept: list[_Unit] = []
        self._num_dropped = 0

    def has(self, index: int) -> bool:
        """Whether the document has a unit of this index."""
        while self._num_dropped + len(self._kept) <= index:
            unit = next(self._units, None)
            if unit is None:
                return False
            self._kept.append(unit)
        return True

    def __getitem__(self, index: int) -> _Unit:
        """Return a unit that ``has`` has found."""
        return self._kept[index - self._num_dropped]

    def drop_before(self, index: int) -> None:
        """Forget the units before an index."""
        del self._kept[: index - self._num_dropped]
        self._num_dropped = index


class _Splitter:
    def __init__(
        self, text: str, breaks: PageBreaks, chunking: Chunking, count_tokens: CountTokens
    ) -> None:
        self._breaks = breaks
        self._text = text
        self._size = chunking.size_tokens
        self._overlap = chunking.overlap_tokens
        self._count_tokens = count_tokens
        # The search for an end counts some spans twice.
        self._count_long = functools.lru_cache(maxsize=16)(self._count_uncached)
        self._short_counts: dict[str, int] = {}
        # Sum of the tokens of units over the tokens of the chunk that they make.
        self._estimate_ratio = 1.0

    def _count(self, start: int, end: int) -> int:
        if end - start > _MAX_CACHED_CHARS:
            return self._count_long(start, end)
        text = self._text[start:end]
        tokens = self._short_counts.get(text)
        if tokens is None:
            if len(self._short_counts) == _MAX_CACHED_COUNTS:
                self._short_counts.clear()
            tokens = self._short_counts[text] = self._count_tokens(text)
        return tokens

    def _count_uncached(self, start: int, end: int) -> int:
        return self._count_tokens(self._text[start:end])

    def _count_up_to(self, limit: int, start: int, end: int) -> int | None:
        """Return the tokens of text[start:end], or None if they are more than a limit."""
        if end - start > _MAX_CHARS_PER_TOKEN * limit:
            return None
        tokens = self._count(start, end)
        return tokens if tokens <= limit else None

    def _fits(self, start: int, end: int) -> bool:
        return self._count_up_to(self._size, start, end) is not None

    # From text to units

    def units(self, markdown: bool) -> Iterator[_Unit]:
        headings: list[tuple[int, str]] = []
        border = _Border.SECTION
        end = total_tokens = 0
        for block in _blocks(self._text, markdown):
            whole = None
            if block.kind is not _Kind.SENTENCE:
                whole = self._count_up_to(self._size, block.start, block.end)
            if block.kind is _Kind.HEADING and whole is not None:
                while headings and headings[-1][0] >= block.level:
                    headings.pop()
                headings.append((block.level, block.title))
                border = _Border.SECTION
            path = tuple(title for _, title in headings)
            for part in self._parts(block, whole):
                before = total_tokens + self._gap_tokens(end, part.start)
                end, total_tokens = part.end, before + part.tokens
                inner = border if part.border is None else part.border
                yield _Unit(part.start, end, part.kind, inner, path, before, total_tokens)
            border = _Border.PARAGRAPH

    def _gap_tokens(self, start: int, end: int) -> int:
        """Return the tokens of the white space between two units. A space belongs to a word."""
        if start == end or (end - start == 1 and self._text[start] == " "):
            return 0
        tokens = self._count_up_to(self._size, start, end)
        return self._size if tokens is None else tokens

    def _parts(self, block: _Block, tokens: int | None) -> Iterator[_Part]:
        """Yield the parts of a block, which has a number of tokens if it fits a chunk as a whole.

        Sentences are never joined here, so that chunks can end between them.
        """
        if tokens is not None:
            yield _Part(block.start, block.end, block.kind, None, tokens)
            return
        spans = _line_spans if block.kind is _Kind.CODE else _sentence_spans
        kind = _Kind.CODE if block.kind is _Kind.CODE else _Kind.SENTENCE
        inner: _Border | None = None
        for start, end in spans(self._text, block.start, block.end):
            tokens = self._count_up_to(self._size, start, end)
            if tokens is not None:
                yield _Part(start, end, kind, inner, tokens)
            else:
                for part_start, part_end in self._word_spans(start, end):
                    tokens = self._count(part_start, part_end)
                    yield _Part(part_start, part_end, _Kind.PART, inner, tokens)
                    inner = _Border.WORD
            inner = _Border.SENTENCE

    def _word_spans(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield long spans that fit, split between words if there are any.

        Args:
            end: An end without white space before it.
        """
        while (stripped := _stripped_span(self._text, start, end)) is not None:
            start = stripped[0]
            stop = self._long_end(start, end)
            if stop < end:
                stop = self._word_end(start, stop, end)
            yield start, stop
            start = stop

    def _long_end(self, start: int, end: int) -> int:
        """Return an end such that text[start:end] fits and is nearly as long as possible.

        It interpolates and bisects in turn, so few counts suffice for even text and not many for
        uneven text.
        """
        least_tokens = self._size - self._size // _PART_TOLERANCE
        wanted_tokens = (least_tokens + self._size) // 2
        last = min(end, start + _MAX_CHARS_PER_TOKEN * self._size)
        fitting, too_long = start, last + 1
        guess = min(last, start + self._size)
        interpolates = True
        while True:
            tokens = self._count(start, guess)
            if tokens > self._size:
                too_long = guess
            else:
                fitting = guess
            if too_long - fitting <= 1 or least_tokens <= tokens <= self._size:
                return max(fitting, start + 1)
            if interpolates:
                guess = start + (guess - start) * wanted_tokens // max(tokens, 1)
            elif too_long > last:
                guess = start + 2 * (guess - start)
            else:
                guess = (fitting + too_long) // 2
            guess = max(fitting + 1, min(guess, too_long - 1))
            interpolates = not interpolates

    def _word_end(self, start: int, stop: int, end: int) -> int:
        """Return the end of the word around ``stop`` if that fits, or of an earlier word.

        An earlier word ends in the second half of the span. Without one, the last end that fits.
        """
        next_end = stop
        while next_end < min(end, stop + _MAX_WORD_CHARS) and not self._ends_word(next_end):
            next_end += 1
        if (next_end == end or self._ends_word(next_end)) and self._fits(start, next_end):
            return next_end
        tried = 0
        for position in range(stop, start + (stop - start) // 2, -1):
            if not self._ends_word(position):
                continue
            # Counts do not always grow with the text, so each candidate is counted.
            if self._fits(start, position):
                return position
            tried += 1
            if tried == _MAX_TRIED_WORD_ENDS:
                break
        stripped = _stripped_span(self._text, start, stop)
        return stripped[1] if stripped is not None and self._fits(*stripped) else stop

    def _ends_word(self, position: int) -> bool:
        return self._text[position].isspace() and not self._text[position - 1].isspace()

    # From units to chunks

    def chunks(self, units: _UnitWindow) -> Iterator[Chunk]:
        start = first = 0  # units[start:first] are the overlap with the chunk before
        while units.has(first):
            end = self._move_end_back(units, start, first, self._furthest_end(units, start, first))
            leading = first
            while units[leading].kind is _Kind.HEADING and leading + 1 < end:
                leading += 1
            span = units[start].start, units[end - 1].end
            pages = self._breaks.pages(*span)
            yield Chunk(self._text[slice(*span)], units[leading].heading_path, *pages)
            start = self._overlap_start(units, start, end) if units.has(end) else end
            first = end
            units.drop_before(start)

    def _furthest_end(self, units: _UnitWindow, start: int, first: int) -> int:
        """Return the furthest end such that units[start:end] fit."""

        def fits(end: int) -> bool:
            return units.has(end - 1) and self._fits(units[start].start, units[end - 1].end)

        end = self._estimated_end(units, start, first)
        begin, stop = units[start].start, units[end - 1].end
        if stop - begin <= _MAX_CHARS_PER_TOKEN * self._size:
            estimate = units[end - 1].tokens_after - units[start].tokens_before
            ratio = estimate / max(self._count(begin, stop), 1)
            self._estimate_ratio = max(1 / _MAX_ESTIMATE_RATIO, min(ratio, _MAX_ESTIMATE_RATIO))
            end = self._estimated_end(units, start, first)
        return _last_that_holds(fits, first + 1, end)

    def _estimated_end(self, units: _UnitWindow, start: int, first: int) -> int:
        """Return the furthest end such that units[start:end] fit by their estimated tokens."""
        end = first + 1
        most_tokens = units[start].tokens_before + self._size * self._estimate_ratio
        while units.has(end) and units[end].tokens_after <= most_tokens:
            end += 1
        return end

    def _move_end_back(self, units: _UnitWindow, start: int, first: int, end: int) -> int:
        if not units.has(end):
            return end
        ends = [k for k in range(first + 1, end + 1) if units[k - 1].kind is not _Kind.HEADING]
        if not ends:
            return end
        half_tokens = units[start].tokens_before + self._size / 2
        half_full = [k for k in ends if units[k - 1].tokens_after >= half_tokens]
        return max(half_full, key=lambda k: (units[k].border, k), default=ends[-1])

    def _overlap_start(self, units: _UnitWindow, start: int, first: int) -> int:
        """Return the first unit of the next chunk, whose own units begin at ``first``.

        ``start`` is the first unit of the chunk before.
        """
        if units[first].border is _Border.SECTION:
            return first
        earliest = first
        while earliest - 1 > start and units[earliest - 1].kind is _Kind.SENTENCE:
            earliest -= 1
        guess = first
        least_tokens = units[first - 1].tokens_after - self._overlap * self._estimate_ratio
        while guess > earliest and units[guess - 1].tokens_before >= least_tokens:
            guess -= 1
        last_end, next_end = units[first - 1].end, units[first].end

        def fits(count: int) -> bool:
            if first - count < earliest:
                return False
            begin = units[first - count].start
            return (
                self._count_up_to(self._overlap, begin, last_end) is not None
                and self._count_up_to(self._size, begin, next_end) is not None
            )

        return first - _last_that_holds(fits, 0, first - guess)


def _last_that_holds(holds: Callable[[int], bool], low: int, guess: int) -> int:
    """Return the last number of which a condition holds, with few calls if the guess is close.

    Args:
        holds: The condition. It is not asked of ``low``, of which it holds. It is taken to be
            false of all numbers after one of which it is false.
        guess: At least ``low``.
    """
    step = 1
    if guess > low and not holds(guess):
        high, low_guess = guess, max(low, guess - step)
        while low_guess > low and not holds(low_guess):
            step *= 2
            high, low_guess = low_guess, max(low, low_guess - step)
        low = low_guess
    else:
        low = guess
        while holds(low + step):
            low += step
            step *= 2
        high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


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
    """Yield the sentences, list items and table rows of text[start:end], which ends without space.

    ``begin`` is never white space, so that no gap is read once for each mark after it.
    """
    begin = _after_space(text, start, end)
    for match in _SENTENCE_END.finditer(text, begin, end):
        if match.end() > begin and _ends_sentence(text, begin, match, end):
            stripped = _stripped_span(text, begin, match.end())
            if stripped is not None:
                yield stripped
            begin = _after_space(text, match.end(), end)
    if begin < end:
        yield begin, end


def _ends_sentence(text: str, begin: int, match: re.Match[str], end: int) -> bool:
    if match.group() == "\n":
        return True
    if _LIST_NUMBER.fullmatch(text, begin, match.start()):
        return False  # the "1." before an item
    following = _after_space(text, match.end(), end)
    return following == end or not text[following].islower()


def _after_space(text: str, start: int, end: int) -> int:
    """Return the first position from ``start`` on that is no white space, at most ``end``."""
    while start < end and text[start].isspace():
        start += 1
    return start


def _stripped_span(text: str, start: int, end: int) -> tuple[int, int] | None:
    """Return the span without white space at its ends, or None if nothing is left."""
    start = _after_space(text, start, end)
    while end > start and text[end - 1].isspace():
        end -= 1
    return (start, end) if start < end else None
