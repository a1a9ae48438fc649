"""Word files as Markdown."""

from __future__ import annotations

import io
import zipfile

import pytest

from ragcache_core.documents.formats import DocumentFormat
from ragcache_gateway.extraction.extracted import UnreadableDocument
from ragcache_gateway.extraction.office import read_office
from tests.kit.sources import docx

pytest.importorskip("markitdown")

IMAGE = (
    '<w:p><w:r><w:drawing xmlns:wp="http://schemas.openxmlformats.org/drawingml/2006/'
    'wordprocessingDrawing" xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main"'
    ' xmlns:r="http://schemas.openxmlformats.org/officeDocument/2006/relationships">'
    '<wp:inline><wp:docPr id="1" name="p" descr="{}"/><a:graphic><a:graphicData uri="x">'
    '<pic:pic xmlns:pic="http://schemas.openxmlformats.org/drawingml/2006/picture">'
    '<pic:blipFill><a:blip r:embed="rId7"/></pic:blipFill></pic:pic></a:graphicData>'
    "</a:graphic></wp:inline></w:drawing></w:r></w:p>"
)
RELATIONS = (
    '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
    '<Relationship Id="rId7" Type="http://schemas.openxmlformats.org/officeDocument/2006/'
    'relationships/image" Target="media/i.png"/></Relationships>'
)


def word(*paragraphs: str, more: str = "") -> bytes:
    """Make a Word file with XML after the paragraphs, which may use an image."""
    made = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(docx(paragraphs))) as plain,
        zipfile.ZipFile(made, "w") as packed,
    ):
        for name in plain.namelist():
            content = plain.read(name).replace(b"</w:body>", more.encode() + b"</w:body>")
            kind = b'<Default Extension="png" ContentType="image/png"/></Types>'
            packed.writestr(name, content.replace(b"</Types>", kind))
        packed.writestr("word/_rels/document.xml.rels", RELATIONS)
        packed.writestr("word/media/i.png", b"\x89PNG")
    return made.getvalue()


def row(*cells: str) -> str:
    inside = "".join(f"<w:tc><w:p><w:r><w:t>{one}</w:t></w:r></w:p></w:tc>" for one in cells)
    return f"<w:tr>{inside}</w:tr>"


def test_the_first_row_of_a_table_is_its_header() -> None:
    table = f"<w:tbl>{row('Part', 'Price')}{row('AX-1', '3')}</w:tbl>"
    read = read_office(word("Prices", more=table), DocumentFormat.DOCX)
    assert read.text == "Prices\n\n| Part | Price |\n| --- | --- |\n| AX-1 | 3 |"
    assert read.warnings == ()


def test_images_beside_little_text_are_reported_and_no_data_is_text() -> None:
    more = IMAGE.format("The pump in hall C") + IMAGE.format("scan1.png")
    read = read_office(word("Hall C", more=more), DocumentFormat.DOCX)
    assert read.text == "Hall C\n\nThe pump in hall C"
    assert read.warnings == ("2 images beside little text were not read",)


def test_a_file_of_images_is_refused_with_the_reason() -> None:
    with pytest.raises(UnreadableDocument, match=r"has no text \(1 image beside"):
        read_office(word(more=IMAGE.format("")), DocumentFormat.DOCX)
