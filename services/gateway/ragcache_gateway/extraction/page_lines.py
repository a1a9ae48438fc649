"""Decides the order of the lines of a page, and which lines are no text of the document.

Positions are in points; the origin is the lower left corner of the page.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

_MIN_COLUMN_ROWS: Final = 4
_MIN_GUTTER: Final = 8.0
_GUTTER_STEP: Final = 2.0
_MAX_CROSSING_SHARE: Final = 0.25
"""Share of the runs of text that may cross the gap between columns, such as titles."""

_MIN_PROSE_CHARS: Final = 20
_MIN_FULL_SHARE: Final = 0.5
"""Share of a column's lines that reach the last quarter of its width. Cells of tables do not."""

_MIN_CONTINUED_SHARE: Final = 0.3
"""Share of a column's lines that begin within a sentence."""

_EDGE_SHARE: Final = 0.1
"""Share of the page's height where headers and footers are, on each side."""

_MIN_REPEATS: Final = 3
_POSITION_STEP: Final = 4.0
_NUMBER = re.compile(r"\d+")
_PAGE: Final = r"(?:page|p\.|seite|página|pagina|стр\.)"
_PAGE_NUMBER = re.compile(
    rf"\W*{_PAGE}?\s*\d+(?:\s*(?:of|/|von|de|di|sur|из)\s*\d+)?\W*", re.IGNORECASE
)
_NAMED_PAGE = re.compile(rf"\b{_PAGE}\s*\d", re.IGNORECASE)

LAST_HYPHEN: Final = re.compile(r"(?<=\w)[-\u2010\u00ad]\Z")
_BLANK = re.compile(r"[_.…\s]{3,}")


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle on a page."""

    left: float
    bottom: float
    right: float
    top: float

    @property
    def middle(self) -> float:
        """Height of its centre."""
        return (self.bottom + self.top) / 2


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text, or the part of it in one column.

    Args:
        is_broken: A hyphen at its end was taken off; the next line continues its last word.
        lefts: Left edge of each character; empty if nothing needs them.
        rights: Right edge of each character, likewise.
    """

    text: str
    box: Box
    is_broken: bool = False
    lefts: tuple[float, ...] = ()
    rights: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class FieldValue:
    """The value of a form's field, and the name of the field."""

    name: str
    text: str
    box: Box


def may_mix_columns(lines: Sequence[Line], runs: Sequence[Box]) -> bool:
    """Whether several lines may have text of two columns, or alternate between them.

    Args:
        lines: In the order of the file.
        runs: Boxes of pieces of text that lie in one column.
    """
    gutter = _gutter(runs)
    if gutter is None:
        return False
    sides = [_side(line, gutter) for line in lines]
    crossing = sum(not side for side in sides)
    return max(crossing, _num_switches(lines, sides)) >= _MIN_COLUMN_ROWS


def _num_switches(lines: Sequence[Line], sides: Sequence[int]) -> int:
    """Return how often the left part of a row precedes the right one."""
    return sum(
        first < 0 < second and _is_on_one_row(lines[i], lines[i + 1])
        for i, (first, second) in enumerate(itertools.pairwise(sides))
    )


def in_columns(lines: Sequence[Line], runs: Sequence[Box]) -> list[Line]:
    """Return lines in reading order, left column first.

    The order stays as it is unless it alternates between two columns of prose, row by row.

    Args:
        lines: In the order of the file, with the positions of their characters.
        runs: Boxes of pieces of text that lie in one column.
    """
    gutter = _gutter(runs)
    if gutter is None:
        return list(lines)
    parts = [part for line in lines for part in _divided(line, gutter)]
    sides = [_side(part, gutter) for part in parts]
    left = [part for part, side in zip(parts, sides, strict=True) if side < 0]
    right = [part for part, side in zip(parts, sides, strict=True) if side > 0]
    rows = min(len(left), len(right))
    is_mixed = _num_switches(parts, sides) >= max(_MIN_COLUMN_ROWS, rows / 2)
    if not (is_mixed and _is_prose(left) and _is_prose(right)):
        return list(lines)
    ordered: list[Line] = []
    waiting: tuple[list[Line], list[Line]] = ([], [])
    for part, side in zip(parts, sides, strict=True):
        if side:
            waiting[side > 0].append(part)
            continue
        ordered += _both(waiting, runs, gutter)
        ordered.append(part)
        waiting = ([], [])
    return ordered + _both(waiting, runs, gutter)


def _both(
    columns: tuple[list[Line], list[Line]], runs: Sequence[Box], gutter: tuple[float, float]
) -> list[Line]:
    """Return two columns. Each may have columns itself."""
    left = [run for run in runs if run.right <= gutter[1]]
    right = [run for run in runs if run.left >= gutter[0]]
    return in_columns(columns[0], left) + in_columns(columns[1], right)


def _gutter(runs: Sequence[Box]) -> tuple[float, float] | None:
    """Return the left and right edge of the widest gap that few runs cross."""
    if len(runs) < 2 * _MIN_COLUMN_ROWS:
        return None
    left, right = min(run.left for run in runs), max(run.right for run in runs)
    width = right - left
    steps = int(width / _GUTTER_STEP)
    crossing = [0] * (steps + 1)
    for run in runs:
        first = int((run.left - left) / _GUTTER_STEP)
        for step in range(first, int((run.right - left) / _GUTTER_STEP) + 1):
            crossing[min(step, steps)] += 1
    most = _MAX_CROSSING_SHARE * len(runs) / 2
    best: tuple[float, float] | None = None
    begin: int | None = None
    for step in range(int(steps * 0.25), int(steps * 0.75) + 1):
        if crossing[step] <= most:
            begin = step if begin is None else begin
            found = left + begin * _GUTTER_STEP, left + (step + 1) * _GUTTER_STEP
            if best is None or found[1] - found[0] > best[1] - best[0]:
                best = found
        else:
            begin = None
    return best if best is not None and best[1] - best[0] >= _MIN_GUTTER else None


def _divided(line: Line, gutter: tuple[float, float]) -> Iterator[Line]:
    """Yield the parts of a line on both sides of the gap, unless text crosses it."""
    edge = gutter[1] - _GUTTER_STEP
    split = next((i for i, left in enumerate(line.lefts) if left >= edge), 0)
    head = line.text[:split].rstrip()
    if not head or line.lefts[split] - line.rights[len(head) - 1] < _MIN_GUTTER:
        yield line
        return
    first = _part(line, 0, len(head))
    if hyphen := LAST_HYPHEN.search(head):
        first = replace(first, text=head[: hyphen.start()])
    yield replace(first, is_broken=hyphen is not None)
    yield _part(line, split, len(line.text))


def _part(line: Line, start: int, end: int) -> Line:
    lefts, rights = line.lefts[start:end], line.rights[start:end]
    box = replace(line.box, left=lefts[0], right=rights[-1])
    return replace(line, text=line.text[start:end], box=box, lefts=lefts, rights=rights)


def _side(line: Line, gutter: tuple[float, float]) -> int:
    """Return -1 for the left column, 1 for the right one, 0 for a line over both."""
    if line.box.right <= gutter[1]:
        return -1
    return 1 if line.box.left >= gutter[0] else 0


def _is_on_one_row(one: Line, other: Line) -> bool:
    return other.box.bottom < one.box.middle < other.box.top


def continues_row(line: Line, before: Line) -> bool:
    """Whether a line is the next part of a row, such as the cell of a table."""
    return _is_on_one_row(before, line) and line.box.left >= before.box.right


def _is_prose(column: Sequence[Line]) -> bool:
    """Whether lines are those of running text, and not cells of a table."""
    if len(column) < _MIN_COLUMN_ROWS:
        return False
    left, right = min(one.box.left for one in column), max(one.box.right for one in column)
    full = sum(one.box.right > right - (right - left) / 4 for one in column) / len(column)
    continued = sum(one.text[:1].islower() for one in column[1:]) / (len(column) - 1)
    is_long = median(len(one.text) for one in column) >= _MIN_PROSE_CHARS
    return is_long and full >= _MIN_FULL_SHARE and continued >= _MIN_CONTINUED_SHARE


def with_fields(lines: Sequence[Line], fields: Sequence[FieldValue]) -> list[Line]:
    """Return lines with the values of fields beside their labels.

    A value goes into the line at its height, in the order of positions. Without such a line it
    follows the line above it, after the name of its field unless that line is near.
    """
    placed = list(lines)
    for field in sorted(fields, key=lambda one: (-one.box.top, one.box.left)):
        beside = [i for i, line in enumerate(placed) if line.lefts and _is_beside(line, field)]
        if beside:
            i = min(beside, key=lambda i: abs(placed[i].box.middle - field.box.middle))
            placed[i] = _with_value(placed[i], field)
        else:
            above = [i for i, one in enumerate(placed) if one.box.bottom >= field.box.middle]
            i = min(above, key=lambda i: placed[i].box.bottom, default=-1)
            has_label = i >= 0 and _is_label(placed[i].box, field.box)
            text = field.text if has_label or not field.name else f"{field.name}: {field.text}"
            placed.insert(i + 1, Line(text, field.box))
    return placed


def _is_beside(line: Line, field: FieldValue) -> bool:
    overlap = min(line.box.top, field.box.top) - max(line.box.bottom, field.box.bottom)
    return overlap >= (line.box.top - line.box.bottom) / 2


def _is_label(box: Box, field: Box) -> bool:
    """Whether a line above a field is so near that it says what the field is for."""
    is_near = box.bottom - field.top < field.top - field.bottom
    return is_near and box.left < field.right and field.left < box.right


def _with_value(line: Line, field: FieldValue) -> Line:
    """Return a line with a value at its position, in place of the blanks that are drawn there."""
    at = next(
        (i for i, left in enumerate(line.lefts) if left >= field.box.left - 1), len(line.text)
    )
    blank = _BLANK.match(line.text, at)
    if blank is None:
        while 0 < at < len(line.text) and not line.text[at - 1].isspace():
            at += 1  # the label may begin before the field and end in it
    end = at if blank is None else blank.end()
    head, tail = line.text[:at].rstrip(), line.text[end:].lstrip()
    end = len(line.text) - len(tail)
    before, after = " " * bool(head), " " * bool(tail)
    middle = f"{before}{field.text}{after}"
    lefts = (*line.lefts[: len(head)], *[field.box.left] * len(middle), *line.lefts[end:])
    box = replace(line.box, right=max(line.box.right, field.box.right))
    return replace(line, text=f"{head}{middle}{tail}", lefts=lefts, box=box)


def without_running_lines(
    pages: Sequence[Sequence[Line]], heights: Sequence[float]
) -> list[list[Line]]:
    """Return pages without headers and footers. The first one with words stays.

    A running line is at the same position of most pages, or of most even or odd ones. Its text is
    the same but for numbers that count pages. It is at the edge, or next to another such line.

    Args:
        heights: Of the pages.
    """
    edges = [_edge_lines(lines, height) for lines, height in zip(pages, heights, strict=True)]
    found: dict[tuple[str, int], list[tuple[int, Line]]] = defaultdict(list)
    for page, keyed in enumerate(edges):
        for i, key in keyed.items():
            found[key].append((page, pages[page][i]))
    num_pages = sum(1 for lines in pages if lines)
    running = {key for key, one in found.items() if _is_running(one, num_pages)}
    kept: list[list[Line]] = []
    seen: set[tuple[str, int]] = set()
    for lines, keyed in zip(pages, edges, strict=True):
        dropped = set()
        for i in _outer(keyed, running):
            if keyed[i] in seen or _PAGE_NUMBER.fullmatch(lines[i].text):
                dropped.add(i)
            seen.add(keyed[i])
        kept.append([line for i, line in enumerate(lines) if i not in dropped])
    return kept


def _edge_lines(lines: Sequence[Line], height: float) -> dict[int, tuple[str, int]]:
    """Return text without digits and position of the lines at both edges, outermost first."""
    found = {}
    for i in sorted(range(len(lines)), key=lambda i: _edge_distance(lines[i].box, height)[1]):
        is_top, distance = _edge_distance(lines[i].box, height)
        if distance <= _EDGE_SHARE * height:
            position = round(distance / _POSITION_STEP)
            found[i] = _NUMBER.sub("#", lines[i].text), -position - 1 if is_top else position
    return found


def _edge_distance(box: Box, height: float) -> tuple[bool, float]:
    """Return whether the upper edge is nearer, and the distance from the nearer edge."""
    from_top = height - box.middle
    return from_top < box.middle, min(from_top, box.middle)


def _outer(keyed: Mapping[int, tuple[str, int]], running: set[tuple[str, int]]) -> Iterator[int]:
    """Yield the running lines of a page up to the first other line, from each edge."""
    is_open = {True: True, False: True}
    for i, key in keyed.items():
        is_top = key[1] < 0
        if key not in running:
            is_open[is_top] = False
        elif is_open[is_top]:
            yield i


def _is_running(found: Sequence[tuple[int, Line]], num_pages: int) -> bool:
    pages = {page for page, _ in found}
    one_side = len({page % 2 for page in pages}) == 1
    most = num_pages / 2 if not one_side else 0.4 * num_pages
    if len(pages) < _MIN_REPEATS or len(pages) <= most:
        return False
    numbers = [tuple(map(int, _NUMBER.findall(line.text))) for _, line in found]
    line = found[0][1]
    is_plain = _PAGE_NUMBER.fullmatch(line.text) is not None
    may_count = is_plain or _NAMED_PAGE.search(line.text) is not None
    return all(
        len(set(column)) == 1
        or (may_count and _counts_pages([page for page, _ in found], column, is_plain=is_plain))
        for column in zip(*numbers, strict=True)
    )


def _counts_pages(pages: Sequence[int], numbers: Sequence[int], *, is_plain: bool) -> bool:
    """Whether numbers are those of pages.

    A number that goes before those of the pages may count what the document is about.
    """
    offsets = {number - page for page, number in zip(pages, numbers, strict=True)}
    return len(offsets) == 1 and (is_plain or min(offsets) <= 1)
