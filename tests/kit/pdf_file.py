"""Small PDF files with text at positions, images, form fields and unusual fonts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HELVETICA = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"
IMAGE = (
    "<< /Type /XObject /Subtype /Image /Width 1 /Height 1 /BitsPerComponent 8"
    " /ColorSpace /DeviceGray /Length 1 >>\nstream\nA\nendstream"
)
SCAN = "q 600 0 0 800 0 0 cm /I Do Q"
"""An image over the whole page."""

DRAWING = "\n".join(f"{x} 100 m {x} 700 l S" for x in range(50, 550, 5))


@dataclass(frozen=True)
class PdfField:
    """A widget of a form and its area: left, bottom, right, top. ``more`` are entries of it."""

    area: tuple[float, float, float, float]
    more: str


@dataclass(frozen=True)
class PdfPage:
    """A page of 600 by 800 points."""

    content: str
    fields: Sequence[PdfField] = ()


def shown(text: str, x: float = 72, y: float = 700, *, size: float = 11, font: str = "F") -> str:
    """Return the operators that show a line of text."""
    escaped = text.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)")
    return f"BT /{font} {size} Tf {x} {y} Td ({escaped}) Tj ET"


def lines(*texts: str, x: float = 72, y: float = 700, pitch: float = 14) -> str:
    """Return the operators that show lines under each other."""
    return "\n".join(shown(text, x, y - i * pitch) for i, text in enumerate(texts))


def private_font(first: str = "E020") -> tuple[str, str]:
    """Return a font whose text layer has characters of the private use area, and its mapping."""
    mapping = (
        "/CIDInit /ProcSet findresource begin 12 dict begin begincmap /CMapName /X def\n"
        "1 begincodespacerange <00> <FF> endcodespacerange\n"
        f"1 beginbfrange <20> <7E> <{first}> endbfrange endcmap end end"
    )
    font = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /ToUnicode {mapping} >>"
    return font, f"<< /Length {len(mapping)} >>\nstream\n{mapping}\nendstream"


def pdf_file(pages: Sequence[PdfPage], *, private: str = "E020") -> bytes:
    """Make a PDF. Font F is Helvetica, P has private characters, G has no mapping to characters.

    Args:
        private: The character that the space of font P is mapped to.
    """
    font, mapping = private_font(private)
    glyphs = (
        "<< /Type /Font /Subtype /Type0 /BaseFont /Glyphs /Encoding /Identity-H"
        " /DescendantFonts [6 0 R] >>"
    )
    descendant = (
        "<< /Type /Font /Subtype /CIDFontType2 /BaseFont /Glyphs /CIDSystemInfo"
        " << /Registry (Adobe) /Ordering (Identity) /Supplement 0 >> /DW 500"
        " /FontDescriptor 7 0 R >>"
    )
    descriptor = (
        "<< /Type /FontDescriptor /FontName /Glyphs /Flags 4 /FontBBox [0 0 1000 1000]"
        " /ItalicAngle 0 /Ascent 800 /Descent -200 /CapHeight 700 /StemV 80 >>"
    )
    objects = ["", "", HELVETICA, font.format(mapping="8 0 R"), glyphs, descendant, descriptor]
    objects += [mapping, IMAGE]
    resources = "<< /Font << /F 3 0 R /P 4 0 R /G 5 0 R >> /XObject << /I 9 0 R >> >>"
    kids, widgets = [], []
    for page in pages:
        own = []
        for field in page.fields:
            area = " ".join(map(str, field.area))
            objects.append(
                f"<< /Type /Annot /Subtype /Widget /Rect [{area}] /F 4 {field.more} >>"
                if "/Subtype" not in field.more
                else f"<< /Type /Annot /Rect [{area}] /F 4 {field.more} >>"
            )
            own.append(f"{len(objects)} 0 R")
        widgets += own
        content = page.content.encode("cp1252").decode("latin-1")
        objects.append(f"<< /Length {len(content)} >>\nstream\n{content}\nendstream")
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 600 800] /Resources {resources}"
            f" /Contents {len(objects)} 0 R /Annots [{' '.join(own)}] >>"
        )
        kids.append(f"{len(objects)} 0 R")
    form = f"/AcroForm << /Fields [{' '.join(widgets)}] >>" if widgets else ""
    objects[0] = f"<< /Type /Catalog /Pages 2 0 R {form} >>"
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>"
    return _file(objects)


def _file(objects: Sequence[str]) -> bytes:
    made = bytearray(b"%PDF-1.7\n")
    offsets = []
    for number, content in enumerate(objects, 1):
        offsets.append(len(made))
        made += f"{number} 0 obj\n{content}\nendobj\n".encode("latin-1")
    start = len(made)
    made += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n".encode()
    for offset in offsets:
        made += f"{offset:010d} 00000 n \n".encode()
    made += f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\n".encode()
    made += f"startxref\n{start}\n%%EOF\n".encode()
    return bytes(made)
