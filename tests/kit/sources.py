"""Real sources of documents: a web server and Git repositories."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

AUTHOR = {
    "GIT_AUTHOR_NAME": "Test",
    "GIT_AUTHOR_EMAIL": "test@example.com",
    "GIT_COMMITTER_NAME": "Test",
    "GIT_COMMITTER_EMAIL": "test@example.com",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}


@dataclass
class Page:
    """A response of the web server."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


class Web(ThreadingHTTPServer):
    """Serves pages by path, and Git repositories below /git/.

    git_authorization: what /git/ wants to be told, if anything. seen: Authorization by path.
    """

    daemon_threads = True

    def __init__(self, repositories: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.pages: dict[str, Page] = {}
        self.seen: dict[str, str | None] = {}
        self.git_authorization: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Web
    protocol_version = "HTTP/1.0"

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.seen[self.path] = self.headers.get("Authorization")
        if self.path.startswith("/git/"):
            self._git()
            return
        page = self.server.pages.get(urlsplit(self.path).path, Page(status=404))
        self.send_response(page.status)
        for name, value in page.headers.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(page.body)

    def do_POST(self) -> None:
        self._git()

    def _git(self) -> None:
        """Run git http-backend as a CGI program."""
        asked = self.server.git_authorization
        if asked is not None and self.headers.get("Authorization") != asked:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="git"')
            self.end_headers()
            return
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        done = subprocess.run(
            ["git", "http-backend"],
            input=body,
            capture_output=True,
            # It also fails for an unknown commit.
            check=False,
            env={
                **os.environ,
                "GIT_PROJECT_ROOT": str(self.server.repositories),
                "GIT_HTTP_EXPORT_ALL": "1",
                "PATH_INFO": parts.path.removeprefix("/git"),
                "QUERY_STRING": parts.query,
                "REQUEST_METHOD": self.command,
                "CONTENT_TYPE": self.headers.get("Content-Type", ""),
                "CONTENT_LENGTH": str(len(body)),
                "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
                "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            },
        )
        head, _, answer = done.stdout.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().splitlines())
        self.send_response(int(fields.pop("Status", "200").split()[0]))
        for name, value in fields.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer)


@contextlib.contextmanager
def serving_web(repositories: Path) -> Iterator[Web]:
    """Run a web server on loopback."""
    web = Web(repositories)
    thread = threading.Thread(target=web.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield web
    finally:
        web.shutdown()
        thread.join()
        web.server_close()


class Repository:
    """A Git repository that is served under the name of its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.run("init", "--quiet", "--initial-branch=main")
        self.run("config", "uploadpack.allowAnySHA1InWant", "true")

    def commit(self, files: dict[str, bytes | None]) -> str:
        """Write or delete (None) files, commit everything and return the hash of the commit."""
        for name, data in files.items():
            path = self.folder / name
            if data is None:
                path.unlink()
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        self.run("add", "--all")
        self.run("commit", "--quiet", "--allow-empty", "--message", "Change")
        return self.run("rev-parse", "HEAD")

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments],
            cwd=self.folder,
            check=True,
            capture_output=True,
            env={**os.environ, **AUTHOR},
        )
        return done.stdout.decode().strip()


def tar_gz(files: dict[str, bytes]) -> bytes:
    """Return a compressed archive."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return whole.getvalue()


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
