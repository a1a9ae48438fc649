"""The text of PDF files: what is read, what is left out, and what is said of it."""

from __future__ import annotations

import pytest

from ragcache_gateway.extraction.extracted import UnreadableDocument
from ragcache_gateway.extraction.pdf import read_pdf
from tests.kit.pdf_file import DRAWING, SCAN, PdfField, PdfPage, lines, pdf_file, shown

PROSE = (
    "The pump stands on a frame of steel and",
    "takes water from the basin below it. Its",
    "motor turns at two speeds, of which the",
    "lower one is for the night. A sensor on",
    "the shaft reports every fault to the desk",
    "in the hall.",
)
REST = (
    "A fault is shown by a red lamp. The",
    "operator has to stop the motor and to",
    "call the duty phone before the cover is",
    "opened, because the shaft may turn on",
    "for a minute. The desk keeps a record of",
    "all calls.",
)


def text_of(*pages: PdfPage | str) -> str:
    return read_pdf(made(*pages)).text


def made(*pages: PdfPage | str) -> bytes:
    return pdf_file([PdfPage(lines(page)) if isinstance(page, str) else page for page in pages])


def test_a_form_feed_stands_between_two_pages_and_empty_ones_count() -> None:
    assert text_of("One.", PdfPage(""), "Three.") == "One.\n\f\n\fThree."


def test_a_sentence_goes_on_after_the_form_feed() -> None:
    assert text_of("The valve closes when", "the water is hot.") == (
        "The valve closes when\fthe water is hot."
    )


def test_a_word_that_a_page_breaks_stays_whole() -> None:
    assert text_of("the power fail-", "ure was short") == "the power failure\fwas short"


def test_a_scanned_page_is_reported_by_its_number() -> None:
    read = read_pdf(made("One.", PdfPage(SCAN), "Three.", PdfPage(SCAN), PdfPage(SCAN)))
    (warning,) = read.warnings
    assert "pages 2, 4-5 (images)" in warning
    assert "ocrmypdf" in warning


def test_a_drawing_without_text_is_reported() -> None:
    (warning,) = read_pdf(made("One.", PdfPage(DRAWING))).warnings
    assert "page 2" in warning


def test_an_image_under_a_stamp_is_reported() -> None:
    (warning,) = read_pdf(made("One.", PdfPage(f"{SCAN}\n{shown('Received 2024')}"))).warnings
    assert "the image that covers page 2 was not read" in warning


def test_an_empty_page_and_a_logo_are_no_loss() -> None:
    logo = f"q 40 0 0 40 10 10 cm /I Do Q\n{lines('Text.')}"
    assert read_pdf(made("One.", PdfPage(""), PdfPage(logo))).warnings == ()


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        (
            PdfPage(shown("Never reach into it", font="P")),
            "has fonts without a mapping to characters",
        ),
        (PdfPage("BT /G 11 Tf 72 700 Td <002400250026002700280029> Tj ET"), "(page 1)"),
    ],
)
def test_characters_without_a_meaning_are_no_text(page: PdfPage, problem: str) -> None:
    with pytest.raises(UnreadableDocument, match="mapping to characters") as raised:
        read_pdf(made(page))
    assert problem in raised.value.problem
    read = read_pdf(made("Readable.", page))
    assert read.text == "Readable.\n\f"
    assert "page 2" in read.warnings[0]


def test_glyph_numbers_that_are_those_of_unicode_are_text() -> None:
    words = "The water pump is on the left side of the hall"
    codes = words.encode("utf-16-be").hex()
    assert text_of(PdfPage(f"BT /G 11 Tf 72 700 Td <{codes}> Tj ET")) == words


def test_signs_of_symbol_fonts_before_items_become_bullets() -> None:
    page = f"{shown('A', 72, font='P')}\n{shown('Close the valve', 90)}"
    read = read_pdf(pdf_file([PdfPage(page)], private="F096"))  # A becomes F0B7
    assert read.text == "• Close the valve"
    assert read.warnings == ()


def test_lost_characters_are_counted() -> None:
    page = f"{shown('z', 72, font='P')}\n{shown('Close the valve', 90)}"
    read = read_pdf(made(PdfPage(page)))
    assert read.text == "Close the valve"
    assert "1 characters without a meaning were left out on page 1" in read.warnings[0]


def widget(kind: str, value: str, area: tuple[float, float, float, float], name: str) -> PdfField:
    return PdfField(area, f"/Subtype /Widget /FT /{kind} /T ({name}) {value}")


def test_values_of_fields_stand_beside_their_labels() -> None:
    page = PdfPage(
        lines("Name:                        Date:", "Remarks", "Serial: ........... ok", pitch=40),
        [
            widget("Tx", "/V (J. Roe)", (105, 695, 130, 712), "name"),
            widget("Tx", "/V (2024-05-06)", (200, 695, 260, 712), "date"),
            widget("Tx", "/V (Seal worn)", (72, 635, 300, 652), "remarks"),
            widget("Tx", "/V (HP7)", (106, 615, 140, 632), "serial"),
            widget("Tx", "/V (hidden) /F 2", (105, 500, 130, 512), "other"),
            widget("Tx", "/V (secret) /Ff 8192", (105, 400, 130, 412), "password"),
        ],
    )
    assert text_of(page) == ("Name: J. Roe Date: 2024-05-06\nRemarks\nSeal worn\nSerial: HP7 ok")


def test_boxes_choices_and_text_that_was_put_on_the_page_are_read() -> None:
    page = PdfPage(
        f"{shown('Passed', 90)}\n{shown('Failed', 190)}\n{shown('Kind:', y=660)}",
        [
            widget("Btn", "/V /On /AS /On /AP << /N << /On 8 0 R >> >>", (72, 698, 82, 710), "p"),
            widget(
                "Btn", "/V /Off /AS /Off /AP << /N << /On 8 0 R >> >>", (172, 698, 182, 710), "f"
            ),
            widget("Ch", "/Ff 131072 /V (Wet) /Opt [(Dry) (Wet)]", (120, 656, 190, 672), "kind"),
            PdfField((72, 600, 200, 620), "/Subtype /FreeText /Contents (Checked by Kim)"),
        ],
    )
    assert text_of(page) == "[x] Passed [ ] Failed\nKind: Wet\nChecked by Kim"


def test_columns_that_are_mixed_row_by_row_are_read_one_after_the_other() -> None:
    rows = [shown("Pumps and faults, a guide over both of the columns of the page", y=740, size=14)]
    left_column = (*PROSE[:-1], "and shows a power fail-")
    right_column = ("ure at once. The red lamp is lit. The", *REST[1:])
    for i, (left, right) in enumerate(zip(left_column, right_column, strict=True)):
        rows += [shown(left, 72, 700 - 14 * i), shown(right, 330, 700 - 14 * i)]
    text = text_of(PdfPage("\n".join(rows)))
    whole = "\n".join((*left_column, *right_column)).replace("fail-\nure", "failure")
    assert text.split("\n", 1)[1] == whole


def test_three_columns_are_read_one_after_the_other() -> None:
    columns = [[text[:30] for text in one] for one in (PROSE, REST, PROSE[::-1])]
    rows = [
        shown(text, 40 + 190 * j, 700 - 14 * i, size=9)
        for i, row in enumerate(zip(*columns, strict=True))
        for j, text in enumerate(row)
    ]
    expected = "\n".join(text.strip() for one in columns for text in one)
    assert text_of(PdfPage("\n".join(rows))) == expected


def test_rows_of_a_table_stay_rows() -> None:
    cells = [("Motor does not turn", "Check the fuse"), ("Water is too hot", "Open valve B")] * 4
    rows = [
        part
        for i, (left, right) in enumerate(cells)
        for part in (shown(left, 72, 700 - 14 * i), shown(right, 330, 700 - 14 * i))
    ]
    text = text_of(PdfPage("\n".join(rows)))
    assert text.splitlines()[0] == "Motor does not turn Check the fuse"


def test_cells_far_from_each_other_are_one_row() -> None:
    cells = ("Part", "Price", "Stock", "AX-1", "12.50", "3", "AX-2", "9.10", "17")
    page = (shown(cell, 72 + i % 3 * 180, 700 - 14 * (i // 3)) for i, cell in enumerate(cells))
    assert text_of(PdfPage("\n".join(page))) == "Part Price Stock\nAX-1 12.50 3\nAX-2 9.10 17"


def test_columns_in_the_order_of_the_file_stay() -> None:
    page = f"{lines(*PROSE)}\n{lines(*REST, x=330)}"
    assert text_of(PdfPage(page)) == "\n".join((*PROSE, *REST))


def with_edges(number: int, *texts: str, header: str = "Manual of the pump") -> PdfPage:
    top, foot = shown(header, y=770), shown(f"Page {number} of 9", 280, 30)
    return PdfPage(f"{top}\n{lines(*texts)}\n{foot}")


def test_running_headers_and_footers_are_left_out_but_for_the_first() -> None:
    pages = [with_edges(i, f"Text {i} of the page.") for i in range(1, 5)]
    text = text_of(*pages)
    assert text.split("\f") == [
        "Manual of the pump\nText 1 of the page.\n",
        "Text 2 of the page.\n",
        "Text 3 of the page.\n",
        "Text 4 of the page.",
    ]


def test_a_header_with_what_the_page_is_about_stays() -> None:
    pages = [with_edges(i, "Text.", header=f"Order {4711 + 7 * i}") for i in range(1, 5)]
    text = text_of(*pages)
    for i in range(1, 5):
        assert f"Order {4711 + 7 * i}" in text


def test_a_title_far_from_a_page_number_is_a_running_line() -> None:
    pages = [
        PdfPage(f"{shown('Pump', y=770)}\n{shown(str(i), 500, 770)}\n{lines(f'Text {i}.')}")
        for i in range(1, 5)
    ]
    assert text_of(*pages).split("\f") == ["Pump\nText 1.\n", "Text 2.\n", "Text 3.\n", "Text 4."]


@pytest.mark.parametrize("header", ["Order {}", "Text {} of the guide"])
def test_a_count_of_something_else_than_pages_stays(header: str) -> None:
    pages = [with_edges(i, "Text.", header=header.format(i)) for i in range(1, 5)]
    assert header.format(3) in text_of(*pages)


def test_two_pages_have_no_running_lines() -> None:
    text = text_of(with_edges(1, "One."), with_edges(2, "Two."))
    assert text.count("Manual of the pump") == 2
