"""A document that takes over the parser that reads it reaches nothing else."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import shutil
import socket
import zipfile
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest

from ragcache_core.documents.formats import DocumentFormat
from ragcache_core.errors import InvalidInput
from ragcache_gateway.extraction.extractor import ExtractionLimit, TextExtractor
from ragcache_retriever.documents.collection import Chunking
from ragcache_retriever.documents.splitter import DocumentSplitter
from ragcache_wire.sandbox import sandbox_support
from tests.kit.gateway import World, world
from tests.kit.retriever import tokenizer_of
from tests.kit.sources import docx

SUPPORT = sandbox_support()
pytestmark = pytest.mark.skipif(
    not (SUPPORT.landlock and SUPPORT.seccomp), reason="needs Landlock and libseccomp"
)

OWN_ANSWER = "its own answer"
READER = """
import json, types
from taken_over import attempts

class StreamInfo:
    def __init__(self, **_): ...

class DocxConverter:
    def convert(self, content, info):
        return types.SimpleNamespace(markdown=json.dumps(attempts()))

converters = types.SimpleNamespace(DocxConverter=DocxConverter)
"""
SPLITTER = """
import json, sys
from taken_over import attempts

AddedToken = Encoding = None

class Tokenizer:
    @staticmethod
    def from_str(content):
        print("TRIED " + json.dumps(attempts()), file=sys.stderr, flush=True)
        sys.exit(1)
"""


FLOOD = """
import sys
AddedToken = Encoding = None

def flood():
    try:
        for _ in range(1000):
            sys.stderr.write("2026-01-01 CRITICAL all is lost\\x1b[2J\\r\\n" * 1000)
            sys.stderr.flush()
    except OSError:
        pass

class StreamInfo:
    def __init__(self, **_): ...

class DocxConverter:
    def convert(self, content, info):
        flood()
        raise ValueError("read")

class Tokenizer:
    @staticmethod
    def from_str(content):
        flood()
        sys.exit(1)

converters = types = sys.modules[__name__]
"""


class Hostile:
    """A folder with packages that the workers load in place of their own, and what they are after.

    Args:
        folder: An empty one.
        port: Of a server on loopback.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self.packages = folder / "packages"
        self.packages.mkdir()
        self.secrets = folder / "secrets"
        self.secrets.mkdir()
        key = self.secrets / "signing-key"
        key.write_bytes(b"k" * 32)
        self.written = folder / "written"
        shutil.copy(Path(__file__).with_name("taken_over.py"), self.packages)
        targets = {"key": str(key), "port": port, "written": str(self.written)}
        (self.packages / "targets.json").write_text(json.dumps(targets))

    def add(self, name: str, text: str) -> None:
        """Add a package."""
        (self.packages / f"{name}.py").write_text(text)

    def check(self, found: dict[str, Any]) -> None:
        """Check that no attempt succeeded."""
        assert found.pop("secrets") == ""
        assert found.pop("descriptors").count(",") == 0, "it has the memory for the answer at most"
        assert found
        assert {name for name, outcome in found.items() if outcome != "PermissionError"} == set()
        assert not self.written.exists()


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hostile]:
    monkeypatch.setenv("SECRET_KEY", "x")
    with socket.create_server(("127.0.0.1", 0)) as server:
        made = Hostile(tmp_path, server.getsockname()[1])
        # An empty part stands for the working folder.
        paths = [str(made.packages), "", os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
        monkeypatch.chdir(made.secrets)  # as a service whose working folder has its keys
        yield made


async def test_a_parser_that_is_taken_over_reaches_nothing(hostile: Hostile) -> None:
    hostile.add("markitdown", READER)
    extractor = TextExtractor()
    try:
        read = await extractor.extract(docx(["x"]), DocumentFormat.DOCX, "file")
        found = json.loads(read.text)
        hostile.check(found)
    finally:
        await extractor.close()


async def fail_to_split(model: Path) -> None:
    """Let a splitter that is taken over split a document."""
    splitter = DocumentSplitter(tokenizer_of(model))
    try:
        with pytest.raises(Exception, match="process that splits"):
            await splitter.split("d", "x", markdown=False, chunking=Chunking(64, 16))
    finally:
        await splitter.close()


async def test_a_splitter_that_is_taken_over_reaches_nothing(
    hostile: Hostile, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hostile.add("tokenizers", SPLITTER)
    await fail_to_split(tiny_model)
    [*_, logged] = [line for line in caplog.messages if "TRIED" in line]
    lines = ast.literal_eval(logged.partition("errors=")[2]).splitlines()
    hostile.check(json.loads(lines[0].removeprefix("TRIED ")))


def check_log(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    """Check that of what a process has written, the log has one short line that says so."""
    written = capfd.readouterr()
    assert "all is lost" not in written.out + written.err
    lines = {line for line in caplog.messages if "all is lost" in line}
    assert lines
    for line in lines:
        assert "wrote errors='2026-01-01 CRITICAL" in line
        assert line.isascii()
        assert line.isprintable()
        assert len(line) < 3000
        assert re.search(r"and [0-9]{5,} bytes more$", line)


async def test_a_parser_that_is_taken_over_writes_no_lines_to_the_log(
    hostile: Hostile, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    hostile.add("markitdown", FLOOD)
    extractor = TextExtractor(ExtractionLimit(output_bytes=1 << 20))
    try:
        with pytest.raises(InvalidInput):
            await extractor.extract(docx(["x"]), DocumentFormat.DOCX, "file")
    finally:
        await extractor.close()
    check_log(caplog, capfd)


async def test_a_splitter_that_is_taken_over_writes_no_lines_to_the_log(
    hostile: Hostile,
    tiny_model: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    hostile.add("tokenizers", FLOOD)
    await fail_to_split(tiny_model)
    check_log(caplog, capfd)


def archive(**parts: bytes) -> bytes:
    """Return a Word file with other parts than its writer's."""
    made = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(docx(["x"]))) as source,
        zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, parts.get(Path(name).stem, source.read(name)))
    return made.getvalue()


def external_entity(path: Path) -> bytes:
    return (
        f'<!DOCTYPE w [<!ENTITY e SYSTEM "file://{path}">]>'
        '<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main">'
        "<w:body><w:p><w:r><w:t>&e;</w:t></w:r></w:p></w:body></w:document>"
    ).encode()


def billion_laughs() -> bytes:
    entities = "".join(f'<!ENTITY e{i + 1} "{f"&e{i};" * 10}">' for i in range(10))
    return f'<!DOCTYPE w [<!ENTITY e0 "ha">{entities}]><w>&e10;</w>'.encode()


@pytest.fixture
async def gateway(tiny_model: Path) -> AsyncGenerator[World, None]:
    async with world(tiny_model) as running:
        yield running


async def upload(gateway: World, name: str, content: bytes) -> dict[str, Any]:
    reply = await gateway.client.post("/v1/documents", files={"file": (name, content)}, timeout=300)
    assert reply.status_code < 500, reply.text
    return {"status": reply.status_code, **reply.json()}


async def test_bombs_and_entities_are_refused_and_the_gateway_goes_on(
    gateway: World, tmp_path: Path
) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the-content-of-a-key")
    bombs = {
        "entity.docx": archive(document=external_entity(secret)),
        "laughs.docx": archive(document=billion_laughs()),
        "core.docx": archive(core=billion_laughs()),
        "zip.docx": archive(document=b"<w>" + b" " * (1 << 30) + b"</w>"),
        "nested.html": b"<div>" * 1_500_000,
        "entity.html": b'<?xml version="1.0"?><!DOCTYPE p [<!ENTITY e SYSTEM "file://%s">]><p>&e;</p>'
        % str(secret).encode(),
    }
    for name, content in bombs.items():
        answer = await upload(gateway, name, content)
        assert "the-content-of-a-key" not in json.dumps(answer), name
    stored = json.dumps([str(one) for one in gateway.retriever.documents.values()])
    assert "the-content-of-a-key" not in stored
    answer = await upload(gateway, "good.html", b"<p>Billing runs in eu-north.</p>")
    assert answer["status"] == 200
