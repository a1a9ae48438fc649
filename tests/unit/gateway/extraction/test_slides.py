"""Presentations as Markdown, slide by slide."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from ragcache_gateway.extraction.slides import read_slides

pptx = pytest.importorskip("pptx")

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010800000000"
    "3a7e9b550000000a49444154789c6360000000020001e221bc330000000049454e44ae426082"
)


def read(made: Any) -> tuple[str, list[str]]:
    file = io.BytesIO()
    made.save(file)
    return read_slides(file.getvalue())


def slide(made: Any, layout: int, title: str = "") -> Any:
    added = made.slides.add_slide(made.slide_layouts[layout])
    if title:
        added.shapes.title.text = title
    return added


def test_a_slide_has_its_title_text_table_and_notes() -> None:
    made = pptx.Presentation()
    first = slide(made, 1, "Pumps")
    first.placeholders[1].text = "Close the valve\nStop the motor"
    first.notes_slide.notes_text_frame.text = "Ask for questions."
    table = slide(made, 5, "Prices").shapes.add_table(2, 2, 0, 2_000_000, 100, 100).table
    for i, text in enumerate(("Part", "Price", "A|B", "3")):
        table.cell(i // 2, i % 2).text = text
    text, warnings = read(made)
    assert text == (
        "## Pumps\n\n- Close the valve\n- Stop the motor\n\nNotes: Ask for questions.\n\f\n"
        "## Prices\n\n| Part | Price |\n| --- | --- |\n| A\\|B | 3 |"
    )
    assert warnings == []


def test_shapes_are_read_from_top_to_bottom_also_in_groups() -> None:
    made = pptx.Presentation()
    only = slide(made, 6)
    low = only.shapes.add_textbox(0, 3_000_000, 100, 100)
    low.text_frame.text = "Second"
    group = only.shapes.add_group_shape()
    inner = group.shapes.add_textbox(0, 1_000_000, 100, 100)
    inner.text_frame.text = "First"
    assert read(made)[0] == "First\n\nSecond"


def test_numbers_of_a_chart_are_a_table() -> None:
    from pptx.chart.data import CategoryChartData
    from pptx.enum.chart import XL_CHART_TYPE

    made = pptx.Presentation()
    data = CategoryChartData()
    data.categories = ["East", "West"]
    data.add_series("Sales", (1.5, 2))
    kind = XL_CHART_TYPE.COLUMN_CLUSTERED
    slide(made, 6).shapes.add_chart(kind, 0, 0, 1_000_000, 1_000_000, data)
    assert "| East | 1.5 |\n| West | 2 |" in read(made)[0]


def test_hidden_slides_and_slides_of_images_are_named(tmp_path: Path) -> None:
    picture = tmp_path / "scan.png"
    picture.write_bytes(PNG)
    made = pptx.Presentation()
    slide(made, 5, "Shown")
    slide(made, 5, "Margins").element.set("show", "0")
    slide(made, 6).shapes.add_picture(str(picture), 0, 0)
    text, warnings = read(made)
    assert text == "## Shown\n\f\n\n\f\n"
    assert "hidden slide 2" in warnings[0]
    assert "only images: slide 3" in warnings[1]


def test_numbers_of_a_chart_keep_their_digits() -> None:
    pptx = pytest.importorskip("pptx")
    from pptx.chart.data import CategoryChartData
    from pptx.enum.chart import XL_CHART_TYPE

    from ragcache_gateway.extraction.slides import read_slides

    made = pptx.Presentation()
    data = CategoryChartData()
    data.categories = ["2023"]
    data.add_series("Revenue", (1234567,))
    shapes = made.slides.add_slide(made.slide_layouts[6]).shapes
    shapes.add_chart(XL_CHART_TYPE.COLUMN_CLUSTERED, 0, 0, 9, 9, data)
    file = io.BytesIO()
    made.save(file)
    assert "| 2023 | 1234567 |" in read_slides(file.getvalue())[0]
