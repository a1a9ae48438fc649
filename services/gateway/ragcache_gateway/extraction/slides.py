"""Reads the slides of a presentation as Markdown. Each slide begins after a form feed."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import Any, Final

from ragcache_gateway.extraction.extracted import cleaned, description, numbered

_SMART_ART: Final = "{http://schemas.openxmlformats.org/drawingml/2006/diagram}relIds"


def read_slides(content: bytes) -> tuple[str, list[str]]:
    """Return the visible slides with their notes, and what was not read."""
    from pptx import Presentation  # noqa: PLC0415  in an optional extra

    texts: list[str] = []
    hidden, without_text, drawn = [], [], []
    for number, slide in enumerate(Presentation(io.BytesIO(content)).slides, 1):
        if slide.element.get("show") in ("0", "false"):
            hidden.append(number)
            texts.append("")
            continue
        shapes = list(_in_order(slide.shapes))
        if any(next(one.element.iter(_SMART_ART), None) is not None for one in shapes):
            drawn.append(number)
        parts = [(_shape_text(one, slide), _is_picture(one)) for one in shapes]
        if any(is_picture for _, is_picture in parts) and not any(
            text for text, is_picture in parts if not is_picture
        ):
            without_text.append(number)
        texts.append("\n\n".join(filter(None, (*(text for text, _ in parts), _notes(slide)))))
    warnings = []
    if hidden:
        warnings.append(f"hidden {numbered('slide', hidden)} left out; unhide what is to be read")
    if without_text:
        where = numbered("slide", without_text)
        warnings.append(f"not read, since there are only images: {where}; add their text as notes")
    if drawn:
        where = numbered("slide", drawn)
        warnings.append(f"SmartArt was not read: {where}; convert it to shapes")
    return "\n\f\n".join(texts) if any(texts) else "", warnings


def _in_order(shapes: Iterable[Any]) -> Iterator[Any]:
    """Yield shapes from top to bottom, the title first, with those in groups."""

    def position(shape: Any) -> tuple[bool, int, int]:
        is_title = shape.is_placeholder and shape.placeholder_format.type in (1, 3)
        return not is_title, shape.top or 0, shape.left or 0

    for shape in sorted(shapes, key=position):
        if hasattr(shape, "shapes"):
            yield from _in_order(shape.shapes)
        else:
            yield shape


def _shape_text(shape: Any, slide: Any) -> str:
    if getattr(shape, "has_table", False):
        return _table_text(shape.table)
    if getattr(shape, "has_chart", False):
        return _chart_text(shape.chart)
    if not shape.has_text_frame:
        return _description(shape)
    paragraphs = [
        (one.level, " ".join(cleaned(one.text.replace("\v", " ")).split()))
        for one in shape.text_frame.paragraphs
    ]
    paragraphs = [(level, text) for level, text in paragraphs if text]
    title = slide.shapes.title
    if title is not None and shape.shape_id == title.shape_id:
        return "## " + " ".join(text for _, text in paragraphs) if paragraphs else ""
    if len(paragraphs) == 1:
        return paragraphs[0][1]
    return "\n".join(f"{'  ' * level}- {text}" for level, text in paragraphs)


def _table_text(table: Any) -> str:
    rows = [
        [" ".join(cleaned(cell.text).split()).replace("|", "\\|") for cell in row.cells]
        for row in table.rows
    ]
    rule = ["---"] * len(rows[0])
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:]))


def _chart_text(chart: Any) -> str:
    """Return the numbers that a chart shows, as a table."""
    try:
        plots = list(chart.plots)
        names = [str(one) for one in plots[0].categories]
        series = [(one.name, list(one.values)) for plot in plots for one in plot.series]
    except (IndexError, KeyError, ValueError, AttributeError):
        return ""
    title = chart.chart_title.text_frame.text if chart.has_title else ""
    rows = [["", *(str(name) for name, _ in series)], ["---"] * (len(series) + 1)]
    for i, name in enumerate(names):
        values = (values[i] if i < len(values) else None for _, values in series)
        rows.append([name, *("" if value is None else f"{value:.15g}" for value in values)])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return "\n\n".join(filter(None, (title, table)))


def _is_picture(shape: Any) -> bool:
    return bool(shape.element.tag.endswith("}pic"))


def _description(shape: Any) -> str:
    """Return what the author says of a picture for readers who do not see it."""
    for element in shape.element.iter():
        if element.tag.endswith("}cNvPr"):
            return description(element.get("descr"))
    return ""


def _notes(slide: Any) -> str:
    if not slide.has_notes_slide or slide.notes_slide.notes_text_frame is None:
        return ""
    text = cleaned(slide.notes_slide.notes_text_frame.text.replace("\v", "\n"))
    return f"Notes: {text}" if text else ""
