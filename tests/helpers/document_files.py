"""Documents in formats other than text, made by hand so that each byte is known."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence

HTML = b"""<!doctype html><html><head><title>Billing guide</title>
<meta name="author" content="Jane Roe"></head>
<body><nav><a href="/">Home</a> <a href="/docs">All documents</a></nav>
<main><h1>Billing</h1><p>Billing runs in eu-north since the migration of last year.</p>
<h2>Regions</h2><ul><li>eu-north is first</li><li>us-east is second</li></ul>
<table><tr><th>Name</th><th>Price</th></tr><tr><td>Basic</td><td>10</td></tr></table></main>
<footer>Copyright</footer><script>alert("x")</script></body></html>"""

_CONTENT_TYPES = """<?xml version="1.0"?><Types
xmlns="http://schemas.openxmlformats.org/package/2006/content-types"><Default Extension="rels"
ContentType="application/vnd.openxmlformats-package.relationships+xml"/><Default Extension="xml"
ContentType="application/xml"/><Override PartName="/word/document.xml"
ContentType="application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"/>
</Types>"""
_RELATIONS = """<?xml version="1.0"?><Relationships
xmlns="http://schemas.openxmlformats.org/package/2006/relationships"><Relationship Id="rId1"
Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"
Target="word/document.xml"/></Relationships>"""
_CORE = """<?xml version="1.0"?><cp:coreProperties
xmlns:cp="http://schemas.openxmlformats.org/package/2006/metadata/core-properties"
xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>{title}</dc:title>
<dc:creator>{author}</dc:creator></cp:coreProperties>"""
_BODY = """<?xml version="1.0"?><w:document
xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"><w:body>
{paragraphs}</w:body></w:document>"""


def pdf(
    pages: Sequence[str], *, title: str = "", encrypted: bool = False, image: bool = False
) -> bytes:
    """Make a PDF with one line of text on each page, or with only an image on the first."""
    image_object = b"<< /Type /XObject /Subtype /Image /Width 1 /Height 1 /BitsPerComponent 8"
    image_object += b" /ColorSpace /DeviceGray /Length 1 >>\nstream\nA\nendstream"
    objects: list[bytes] = []
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects.append(b"<< /Type /Catalog /Pages 2 0 R >>")
    objects.append(f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode())
    objects.append(
        image_object if image else b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
    )
    kind = "/XObject << /I 3 0 R >>" if image else "/Font << /F 3 0 R >>"
    for i, text in enumerate(pages):
        page = f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 600 800] /Contents {5 + 2 * i} 0 R "
        objects.append(f"{page}/Resources << {kind} >> >>".encode())
        drawn = "q 600 0 0 800 0 0 cm /I Do Q" if image else f"BT /F 12 Tf 72 700 Td ({text}) Tj ET"
        objects.append(f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream".encode())
    trailer = f"/Size {len(objects) + 3} /Root 1 0 R"
    if title:
        objects.append(f"<< /Title ({title}) /Author (Jane Roe) >>".encode())
        trailer += f" /Info {len(objects)} 0 R"
    if encrypted:
        hashes = f"/O <{'41' * 32}> /U <{'42' * 32}>"
        objects.append(f"<< /Filter /Standard /V 1 /R 2 {hashes} /P -4 >>".encode())
        trailer += f" /Encrypt {len(objects)} 0 R /ID [<{'43' * 16}> <{'43' * 16}>]"
    return _pdf_file(objects, trailer)


def docx(paragraphs: Sequence[str], *, title: str = "", author: str = "") -> bytes:
    """Make a Word file."""
    body = "".join(f"<w:p><w:r><w:t>{one}</w:t></w:r></w:p>" for one in paragraphs)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("[Content_Types].xml", _CONTENT_TYPES)
        packed.writestr("_rels/.rels", _RELATIONS)
        packed.writestr("docProps/core.xml", _CORE.format(title=title, author=author))
        packed.writestr("word/document.xml", _BODY.format(paragraphs=body))
    return file.getvalue()


def _pdf_file(objects: Sequence[bytes], trailer: str) -> bytes:
    file = bytearray(b"%PDF-1.4\n")
    offsets = []
    for number, content in enumerate(objects, 1):
        offsets.append(len(file))
        file += f"{number} 0 obj\n".encode() + content + b"\nendobj\n"
    start = len(file)
    file += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n".encode()
    for offset in offsets:
        file += f"{offset:010d} 00000 n \n".encode()
    file += f"trailer\n<< {trailer} >>\nstartxref\n{start}\n%%EOF\n".encode()
    return bytes(file)
