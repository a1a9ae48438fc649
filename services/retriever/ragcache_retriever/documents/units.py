"""Reads a document as units: headings, sentences, table rows and lines of code, in order.

A list item counts as a sentence. A block of code that fits a chunk is one unit. A unit that is
longer than a chunk is split at lines, else at words.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from ragcache_core.documents.markdown_blocks import Block, BlockKind, markdown_blocks, text_blocks
from ragcache_retriever.documents.token_counter import MAX_CHARS_PER_TOKEN, Head, TokenCounter

_MAX_HEAD_SHARE: Final = 4
"""A head takes at most a quarter of a chunk."""

# A part of a long sentence may have a 32nd fewer tokens than fit, which saves most counts.
_PART_TOLERANCE = 32
_MAX_WORD_CHARS = 64
_MAX_TRIED_WORD_ENDS = 8
_MAX_INDENTATION_CHARS = 128

_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_LIST_NUMBER = re.compile(r"\d{1,9}")
_LIST_ITEM = re.compile(r"(?:[-*+]|\d{1,9}[.)])[ \t]")
# Lines that end what other lines began: no code begins with them.
_CLOSING_LINE = re.compile(r"[)\]}`~]|</|(?:else|elif|except|finally|catch|end|esac|fi|done)\b")
# Repeats are bounded, so that a megabyte of dots is fast. Full-width marks end a sentence too.
_SENTENCE_END = re.compile(
    r"""[.!?…]{1,8}["'”’)\]*_]{0,8}(?=\s)"""  # noqa: RUF001
    r"""|[。！？]{1,8}[」』”’）]{0,8}"""  # noqa: RUF001
    r"""|\n(?=[ \t]*(?:[-*+]|\d{1,9}[.)])[ \t]|[ \t]*\|)"""
)


class Border(enum.IntEnum):
    """How suitable the border before a unit is for a split."""

    WORD = 0
    LINE = 1
    SENTENCE = 2
    PARAGRAPH = 3
    SECTION = 4


class UnitKind(enum.Enum):
    """What a unit is."""

    HEADING = enum.auto()
    HEAD = enum.auto()  # names the columns of a table, or opens a fence of code
    SENTENCE = enum.auto()
    CODE = enum.auto()
    PART = enum.auto()  # part of a sentence or line that is longer than a chunk


class Unit(NamedTuple):
    """text[start:end] without white space after it, and before it no more than its indentation.

    ``tokens_before`` and ``tokens_after`` are the sums of tokens from the document's start until
    the unit's start and end, each unit and each long gap counted by itself. ``head`` is repeated
    before a chunk that begins with the unit. ``depth`` is larger for lines of code at which a chunk
    should rather not begin.
    """

    start: int
    end: int
    kind: UnitKind
    border: Border
    heading_path: tuple[str, ...]
    tokens_before: int
    tokens_after: int
    head: Head | None = None
    depth: int = 0


class _Part(NamedTuple):
    """A span of a block that fits a chunk. border None: that of the block itself."""

    start: int
    end: int
    kind: UnitKind
    border: Border | None
    tokens: int
    head: Head | None = None
    depth: int = 0


def code_blocks(text: str) -> Iterator[Block]:
    """Yield a text that is code as one block."""
    if (span := _stripped_span(text, 0, len(text))) is not None:
        yield Block(_line_start(text, span[0]), span[1], BlockKind.CODE)


def read_units(
    counter: TokenCounter, size_tokens: int, *, markdown: bool, code: bool
) -> Iterator[Unit]:
    """Yield the units of a document, none of them with more tokens than a chunk has.

    Args:
        markdown: Whether to recognize headings, tables and code.
        code: Whether all of it is code, unless it is Markdown.
    """
    plain = code_blocks if code else text_blocks
    blocks = (markdown_blocks if markdown else plain)(counter.text)
    return _UnitReader(counter, size_tokens).units(blocks)


class _UnitReader:
    def __init__(self, counter: TokenCounter, size_tokens: int) -> None:
        self._counter = counter
        self._text = counter.text
        self._size = size_tokens

    def units(self, blocks: Iterable[Block]) -> Iterator[Unit]:
        headings: list[tuple[int, str]] = []
        border = Border.SECTION
        end = total_tokens = 0
        for block in blocks:
            whole = None
            if block.kind in (BlockKind.HEADING, BlockKind.CODE):
                whole = self._counter.count_up_to(self._size, block.start, block.end)
            if block.kind is BlockKind.HEADING and whole is not None:
                while headings and headings[-1][0] >= block.level:
                    headings.pop()
                headings.append((block.level, block.title))
                border = Border.SECTION
            path = tuple(title for _, title in headings)
            for part in self._parts(block, whole):
                before = total_tokens + self._gap_tokens(end, part.start)
                end, total_tokens = part.end, before + part.tokens
                inner = border if part.border is None else part.border
                span = (part.start, end, part.kind, inner, path, before, total_tokens)
                yield Unit(*span, part.head, part.depth)
            border = Border.PARAGRAPH

    def _gap_tokens(self, start: int, end: int) -> int:
        """Return the tokens of the white space between two units. A space belongs to a word."""
        if start == end or (end - start == 1 and self._text[start] == " "):
            return 0
        tokens = self._counter.count_up_to(self._size, start, end)
        return self._size if tokens is None else tokens

    def _parts(self, block: Block, tokens: int | None) -> Iterator[_Part]:
        """Yield the parts of a block, which has a number of tokens if it is to be one unit."""
        match block.kind:
            case BlockKind.HEADING if tokens is not None:
                yield _Part(block.start, block.end, UnitKind.HEADING, None, tokens)
            case BlockKind.CODE if tokens is not None:
                yield _Part(block.start, block.end, UnitKind.CODE, None, tokens)
            case BlockKind.CODE:
                yield from self._code(block)
            case BlockKind.TABLE:
                yield from self._table(block)
            case _:
                yield from self._sentences(block)

    def _sentences(self, block: Block) -> Iterator[_Part]:
        """Yield sentences. They are never joined here, so that chunks can end between them."""
        border: Border | None = None
        for start, end in _sentence_spans(self._text, block.start, block.end):
            begin = start
            if _LIST_ITEM.match(self._text, start, end):  # nested items keep their level
                begin = _line_start(self._text, start)
            tokens = self._counter.count_up_to(self._size, begin, end)
            if tokens is not None:
                yield _Part(begin, end, UnitKind.SENTENCE, border, tokens)
            else:
                for line_start, line_end in _line_spans(self._text, begin, end):
                    yield from self._long_line(line_start, line_end, UnitKind.PART, border)
                    border = Border.LINE
            border = Border.SENTENCE

    def _table(self, block: Block) -> Iterator[_Part]:
        begin = _line_start(self._text, block.start)
        head = self._head(block._replace(start=begin))
        border: Border | None = None
        if head is not None:
            yield _Part(head.start, head.end, UnitKind.HEAD, None, head.tokens)
            begin, border = head.end, Border.SENTENCE
        for start, end in _line_spans(self._text, begin, block.end):
            yield from self._long_line(start, end, UnitKind.SENTENCE, border, head)
            border = Border.SENTENCE

    def _code(self, block: Block) -> Iterator[_Part]:
        """Yield lines of code. The borders at empty lines are better ones, best at top level."""
        head = self._head(block)
        begin = block.start
        border: Border | None = None
        if head is not None:
            yield _Part(head.start, head.end, UnitKind.HEAD, None, head.tokens)
            begin, border = head.end, Border.LINE
        top_depth = None
        last_end = begin
        for start, end in _line_spans(self._text, begin, block.end):
            line = _after_space(self._text, start, end)
            depth = len(self._text[start:line].expandtabs())
            top_depth = depth if top_depth is None else min(top_depth, depth)
            if border is not None and self._text.count("\n", last_end, start) > 1:
                border = Border.PARAGRAPH if depth == top_depth else Border.SENTENCE
            if _CLOSING_LINE.match(self._text, line, end):
                depth += _MAX_INDENTATION_CHARS
            for part in self._long_line(start, end, UnitKind.CODE, border, head):
                yield part._replace(depth=depth)
            border, last_end = Border.LINE, end

    def _head(self, block: Block) -> Head | None:
        """Return the head of a block if it is short enough to be repeated."""
        if not block.head_end:
            return None
        limit = self._size // _MAX_HEAD_SHARE
        tokens = self._counter.count_up_to(limit, block.start, block.head_end)
        return None if tokens is None else Head(block.start, block.head_end, tokens)

    def _long_line(
        self,
        start: int,
        end: int,
        kind: UnitKind,
        border: Border | None,
        head: Head | None = None,
    ) -> Iterator[_Part]:
        """Yield a line as one part, or as parts of it that fit a chunk after its head."""
        size = self._size if head is None else self._size - head.tokens - 1
        tokens = self._counter.count_up_to(size, start, end)
        if tokens is not None:
            yield _Part(start, end, kind, border, tokens, head)
            return
        for part_start, part_end in self._word_spans(start, end, size):
            tokens = self._counter.count(part_start, part_end)
            yield _Part(part_start, part_end, UnitKind.PART, border, tokens, head)
            border = Border.WORD

    def _word_spans(self, start: int, end: int, size: int) -> Iterator[tuple[int, int]]:
        """Yield long spans that fit a size, split between words if there are any.

        Args:
            end: An end without white space before it.
        """
        while (stripped := _stripped_span(self._text, start, end)) is not None:
            start = stripped[0]
            stop = self._long_end(start, end, size)
            if stop < end:
                stop = self._word_end(start, stop, end, size)
            yield start, stop
            start = stop

    def _long_end(self, start: int, end: int, size: int) -> int:
        """Return an end such that text[start:end] fits and is nearly as long as possible.

        It interpolates and bisects in turn, so few counts suffice for even text and not many for
        uneven text.
        """
        least_tokens = size - size // _PART_TOLERANCE
        wanted_tokens = (least_tokens + size) // 2
        last = min(end, start + MAX_CHARS_PER_TOKEN * size)
        fitting, too_long = start, last + 1
        guess = min(last, start + size)
        interpolates = True
        while True:
            tokens = self._counter.count(start, guess)
            if tokens > size:
                too_long = guess
            else:
                fitting = guess
            if too_long - fitting <= 1 or least_tokens <= tokens <= size:
                return max(fitting, start + 1)
            if interpolates:
                guess = start + (guess - start) * wanted_tokens // max(tokens, 1)
            elif too_long > last:
                guess = start + 2 * (guess - start)
            else:
                guess = (fitting + too_long) // 2
            guess = max(fitting + 1, min(guess, too_long - 1))
            interpolates = not interpolates

    def _word_end(self, start: int, stop: int, end: int, size: int) -> int:
        """Return the end of the word around ``stop`` if that fits, or of an earlier word.

        An earlier word ends in the second half of the span. Without one, the last end that fits.
        """

        def fits(begin: int, position: int) -> bool:
            return self._counter.count_up_to(size, begin, position) is not None

        next_end = stop
        while next_end < min(end, stop + _MAX_WORD_CHARS) and not self._ends_word(next_end):
            next_end += 1
        if (next_end == end or self._ends_word(next_end)) and fits(start, next_end):
            return next_end
        tried = 0
        for position in range(stop, start + (stop - start) // 2, -1):
            if not self._ends_word(position):
                continue
            # Counts do not always grow with the text, so each candidate is counted.
            if fits(start, position):
                return position
            tried += 1
            if tried == _MAX_TRIED_WORD_ENDS:
                break
        stripped = _stripped_span(self._text, start, stop)
        return stripped[1] if stripped is not None and fits(*stripped) else stop

    def _ends_word(self, position: int) -> bool:
        return self._text[position].isspace() and not self._text[position - 1].isspace()


def _line_spans(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the lines that are not blank, each with its indentation."""
    for match in _LINE.finditer(text, start, end):
        span = _stripped_span(text, match.start(), match.end())
        if span is not None:
            yield max(start, _line_start(text, span[0])), span[1]


def _line_start(text: str, position: int) -> int:
    """Return where the indentation before a position begins, or the position if it has none."""
    start = position
    while start > 0 and text[start - 1] in " \t" and position - start <= _MAX_INDENTATION_CHARS:
        start -= 1
    return start if start == 0 or text[start - 1] == "\n" else position


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
