"""Splits a document into chunks, by the serving model's tokens.

A chunk is a sequence of units (``units``), and its text is the slice of the document that they
span, with its indentation. A chunk that begins inside a table has the rows that name the columns
before its slice. One that begins inside a fence of code has the line that opens the fence. Nothing
else is inserted. So a chunk can be read without the others, and its tokens never depend on its
position.

The splitter fills a chunk and then moves its end back to the strongest border that leaves it at
least half full: between paragraphs, else between sentences. Code ends at an empty line at top
level, else at any empty line, else before the line that is indented least. A chunk does not end
with a heading. Inside a section, the next chunk begins with the last whole sentences of the chunk
before, as far as the overlap allows.

A chunk ends before a heading, so it has one section. Small sections are the exception: consecutive
ones share a chunk if each has at most a quarter of its tokens, all are whole, and they are under
one parent.

Its time grows linearly with the document, for any text. The ends of chunks are found by a few token
counts, from estimates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from ragcache_core.documents.markdown_blocks import BlockKind, markdown_blocks
from ragcache_retriever.documents.collection import Chunking
from ragcache_retriever.documents.pages import PAGE_BREAK, PageBreaks
from ragcache_retriever.documents.token_counter import (
    MAX_CHARS_PER_TOKEN,
    CountTokens,
    Head,
    TokenCounter,
)
from ragcache_retriever.documents.units import Border, Unit, UnitKind, read_units

CHUNKER_VERSION = 3
"""Increase it when documents would be split otherwise, or labels of passages would change. Stored
documents are then rebuilt."""

# A title further down is no title of the document, and the caller waits for it.
_MAX_TITLE_SEARCH_CHARS = 1 << 16
# Most that units apart are taken to have more tokens, or fewer, than joined.
_MAX_ESTIMATE_RATIO = 4
_SMALL_SECTIONS: Final = 4
"""A section is small if so many of its size fit a chunk."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a document.

    ``heading_path`` holds the titles of the sections that most of it is in, outermost first.
    ``page`` and ``page_end`` are its first and last page, from 1; 0 in a document without pages.
    """

    text: str
    heading_path: tuple[str, ...]
    page: int = 0
    page_end: int = 0


def split_document(
    text: str,
    *,
    markdown: bool,
    chunking: Chunking,
    count_tokens: CountTokens,
    code: bool = False,
) -> list[Chunk]:
    """Return the chunks of a document, in order. Together they hold all its text but white space.

    No chunk has more than ``chunking.size_tokens`` tokens.

    Args:
        markdown: Whether to recognize headings, tables and code.
        count_tokens: Returns the number of tokens of a text encoded by itself.
        code: Whether all of the text is code, unless it is Markdown.
    """
    text = _normalised(text)
    breaks = PageBreaks(text)
    # To a reader of a chunk, a new page is a new line.
    counter = TokenCounter(text.replace(PAGE_BREAK, "\n"), count_tokens)
    units = read_units(counter, chunking.size_tokens, markdown=markdown, code=code)
    return list(_Splitter(counter, breaks, chunking, _UnitWindow(units)).chunks())


def first_heading(text: str) -> str | None:
    """Return the title of the first Markdown heading near the start of a document."""
    end = text.find("\n", _MAX_TITLE_SEARCH_CHARS)
    blocks = markdown_blocks(_normalised(text if end < 0 else text[:end]))
    return next((block.title for block in blocks if block.kind is BlockKind.HEADING), None)


def _normalised(text: str) -> str:
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


class _UnitWindow:
    """The units of a document by their index, read on demand and forgotten after use.

    A document of many short lines has a unit for each of them, which would take a hundred times
    its memory.
    """

    def __init__(self, units: Iterator[Unit]) -> None:
        self._units = units
        self._kept: list[Unit] = []
        self._num_dropped = 0

    def has(self, index: int) -> bool:
        """Whether the document has a unit of this index."""
        while self._num_dropped + len(self._kept) <= index:
            unit = next(self._units, None)
            if unit is None:
                return False
            self._kept.append(unit)
        return True

    def __getitem__(self, index: int) -> Unit:
        """Return a unit that ``has`` has found."""
        return self._kept[index - self._num_dropped]

    def begins_section(self, index: int) -> bool:
        """Whether a unit is a heading that follows no other heading."""
        if self[index].kind is not UnitKind.HEADING:
            return False
        return index == self._num_dropped or self[index - 1].kind is not UnitKind.HEADING

    def drop_before(self, index: int) -> None:
        """Forget the units before an index."""
        del self._kept[: index - self._num_dropped]
        self._num_dropped = index


class _Splitter:
    def __init__(
        self, counter: TokenCounter, breaks: PageBreaks, chunking: Chunking, units: _UnitWindow
    ) -> None:
        self._counter = counter
        self._breaks = breaks
        self._size = chunking.size_tokens
        self._overlap = chunking.overlap_tokens
        self._units = units
        # Sum of the tokens of units over the tokens of the chunk that they make.
        self._estimate_ratio = 1.0

    def chunks(self) -> Iterator[Chunk]:
        units = self._units
        start = first = 0  # units[start:first] are the overlap with the chunk before
        while units.has(first):
            head = self._fitting_head(start, first + 1)
            end = self._move_end_back(start, first, self._furthest_end(start, first, head))
            begin, stop = units[start].start, units[end - 1].end
            text = self._counter.joined(begin, stop, head)
            pages = self._breaks.pages(begin, stop)
            yield Chunk(text, self._main_path(start, end), *pages)
            start = self._overlap_start(start, end) if units.has(end) else end
            first = end
            units.drop_before(start)

    def _fitting_head(self, start: int, end: int) -> Head | None:
        """Return the head to repeat before units[start:end], unless they do not fit with it."""
        head = self._units[start].head
        return head if head and self._fits(self._size, start, end, head) else None

    def _fits(self, limit: int, start: int, end: int, head: Head | None) -> bool:
        begin, stop = self._units[start].start, self._units[end - 1].end
        return self._counter.count_up_to(limit, begin, stop, head) is not None

    def _furthest_end(self, start: int, first: int, head: Head | None) -> int:
        """Return the furthest end such that units[start:end] fit, and are of one section.

        They are of several sections only if these are small.
        """
        units = self._units
        joined_end = self._small_sections_end(start, first, head)

        def fits(end: int) -> bool:
            return (
                units.has(end - 1)
                and not any(map(units.begins_section, range(joined_end, end)))
                and self._fits(self._size, start, end, head)
            )

        end = self._estimated_end(start, joined_end, head)
        begin, stop = units[start].start, units[end - 1].end
        if stop - begin <= MAX_CHARS_PER_TOKEN * self._size:
            estimate = units[end - 1].tokens_after - units[start].tokens_before
            tokens = self._counter.count(begin, stop, head) - (head.tokens if head else 0)
            ratio = estimate / max(tokens, 1)
            self._estimate_ratio = max(1 / _MAX_ESTIMATE_RATIO, min(ratio, _MAX_ESTIMATE_RATIO))
            end = self._estimated_end(start, joined_end, head)
        return _last_that_holds(fits, first + 1, end)

    def _estimated_end(self, start: int, joined_end: int, head: Head | None) -> int:
        """Return the furthest end such that units[start:end] fit by their estimated tokens.

        Args:
            joined_end: All units before belong to the chunk, unless they do not fit.
        """
        units = self._units
        end = joined_end
        most_tokens = self._most_tokens(start, head)
        while (
            units.has(end)
            and units[end].tokens_after <= most_tokens
            and not units.begins_section(end)
        ):
            end += 1
        return end

    def _most_tokens(self, start: int, head: Head | None) -> float:
        """Return the most ``tokens_after`` of a unit that fits, by its estimate."""
        size = self._size - (head.tokens if head else 0)
        return self._units[start].tokens_before + size * self._estimate_ratio

    def _small_sections_end(self, start: int, first: int, head: Head | None) -> int:
        """Return the end of the small sections under one parent that begin at ``first`` and fit.

        It is after the first unit in any case.
        """
        units = self._units
        end = first
        if first == 0 or units.begins_section(first):
            parent = units[first].heading_path[:-1]
            most_tokens = self._most_tokens(start, head)
            while units.has(end) and units[end].heading_path[: len(parent)] == parent:
                section_end = self._small_section_end(end)
                if section_end is None or units[section_end - 1].tokens_after > most_tokens:
                    break
                end = section_end
        return max(end, first + 1)

    def _small_section_end(self, first: int) -> int | None:
        """Return the end of the section that begins with a unit, or None if it is not small."""
        units = self._units
        small_tokens = self._size * self._estimate_ratio / _SMALL_SECTIONS
        most_tokens = units[first].tokens_before + small_tokens
        end = first
        while units.has(end) and (end == first or not units.begins_section(end)):
            if units[end].tokens_after > most_tokens:
                return None
            end += 1
        return end

    def _move_end_back(self, start: int, first: int, end: int) -> int:
        units = self._units
        if not units.has(end):
            return end
        sections = [k for k in range(first + 1, end + 1) if units.begins_section(k)]
        if sections:
            return sections[-1]
        openings = (UnitKind.HEADING, UnitKind.HEAD)
        ends = [k for k in range(first + 1, end + 1) if units[k - 1].kind not in openings]
        if not ends:
            return end
        half_tokens = units[start].tokens_before + self._size / 2
        half_full = [k for k in ends if units[k - 1].tokens_after >= half_tokens]
        return max(half_full, key=lambda k: (units[k].border, -units[k].depth, k), default=ends[-1])

    def _main_path(self, start: int, end: int) -> tuple[str, ...]:
        """Return the headings of the innermost section that has most of a chunk's text."""
        units = [self._units[k] for k in range(start, end)]
        texts = [unit for unit in units if unit.kind is not UnitKind.HEADING] or units[-1:]
        paths = {unit.heading_path for unit in texts}
        if len(paths) == 1:
            return texts[0].heading_path
        tokens: Counter[tuple[str, ...]] = Counter()
        for unit in texts:
            for depth in range(len(unit.heading_path) + 1):
                tokens[unit.heading_path[:depth]] += unit.tokens_after - unit.tokens_before
        return max((path for path in tokens if 2 * tokens[path] > tokens[()]), key=len, default=())

    def _overlap_start(self, start: int, first: int) -> int:
        """Return the first unit of the next chunk, whose own units begin at ``first``.

        ``start`` is the first unit of the chunk before.
        """
        units = self._units
        if units[first].border is Border.SECTION:
            return first
        earliest = first
        while earliest - 1 > start and units[earliest - 1].kind is UnitKind.SENTENCE:
            earliest -= 1
        guess = first
        least_tokens = units[first - 1].tokens_after - self._overlap * self._estimate_ratio
        while guess > earliest and units[guess - 1].tokens_before >= least_tokens:
            guess -= 1

        def fits(count: int) -> bool:
            begin = first - count
            return (
                begin >= earliest
                and self._fits(self._overlap, begin, first, None)
                and self._fits(self._size, begin, first + 1, units[begin].head)
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
