"""Ingest, collections and backups from the command line, against a real gateway."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import psutil
from typer.testing import CliRunner, Result

from ragcache_cli.local.state_file import PlatformRecord, write_record
from ragcache_cli.main import app
from ragcache_wire.v1 import retriever_pb2 as pb
from tests.kit.gateway import World
from tests.kit.pdf_file import SCAN, PdfPage, lines, pdf_file
from tests.kit.sources import HTML, pdf


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def ragcache(*words: object, answer: str | None = None) -> Result:
    """Run a command in a thread, because the gateway is in this one."""
    arguments = [str(word) for word in words]
    return await asyncio.to_thread(CliRunner().invoke, app, arguments, input=answer)


async def test_files_of_all_kinds_are_ingested(platform: World, tmp_path: Path) -> None:
    (tmp_path / "guides").mkdir()
    (tmp_path / "guides" / "billing.html").write_bytes(HTML)
    (tmp_path / "report.pdf").write_bytes(pdf(["Page one."], title="Report"))
    (tmp_path / "secret.pdf").write_bytes(pdf(["x"], encrypted=True))
    lines: list[dict[str, Any]] = [
        {"id": "a", "text": "A.", "metadata": {"team": "core"}},
        {"id": "b"},
        {"id": 'q"ä', "text": "Q."},
    ]
    (tmp_path / "more.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / 'odd "ä".txt').write_text("Odd.")
    result = await ragcache("ingest", tmp_path)
    assert result.exit_code == 1, result.output
    assert result.stdout == "5 written, 0 unchanged, 2 failed, 0 skipped in collection 'default'\n"
    assert f"failed {tmp_path}/secret.pdf: file: is an encrypted PDF" in result.stderr
    assert f"failed {tmp_path}/more.jsonl:2: text: is missing; add it" in result.stderr
    stored = platform.retriever.documents
    assert sorted(stored) == ["a", "guides/billing.html", 'odd "ä".txt', 'q"ä', "report.pdf"]
    assert stored["report.pdf"].title == "Report"
    assert json.loads(stored["a"].metadata) == {"team": "core"}
    again = await ragcache("ingest", tmp_path)
    assert again.stdout == "0 written, 5 unchanged, 2 failed, 0 skipped in collection 'default'\n"


async def test_what_was_not_read_is_printed(platform: World, tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(pdf_file([PdfPage(lines("Page one.")), PdfPage(SCAN)]))
    result = await ragcache("ingest", tmp_path / "a.pdf")
    assert result.exit_code == 0, result.output
    assert "warning a.pdf: not read, since without text: page 2 (images)" in result.stderr
    as_json = await ragcache("ingest", tmp_path / "a.pdf", "--output", "json")
    document, counts = map(json.loads, as_json.stdout.splitlines())
    assert len(document["warnings"]) == counts["warnings"] == 1


async def test_an_encoding_is_for_files_of_text(platform: World, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("Größe".encode("cp850"))
    (tmp_path / "b.pdf").write_bytes(pdf(["Page one."]))
    (tmp_path / "c.jsonl").write_bytes(b"\xef\xbb\xbf" + b'{"id": "c", "text": "C."}')
    result = await ragcache("ingest", tmp_path, "--encoding", "cp850")
    assert result.exit_code == 0, result.output
    assert platform.retriever.documents["a.txt"].text == "Größe"
    assert sorted(platform.retriever.documents) == ["a.txt", "b.pdf", "c"]


async def test_collections_are_managed(platform: World) -> None:
    put = await ragcache(
        *("collection", "put", "docs", "--chunk-size", 64, "--index", "ivf"),
        *("--max-documents", 10, "--max-text-bytes", 5 << 20, "--lexical-weight", 0.7),
    )
    assert put.exit_code == 0, put.output
    stored = platform.retriever.collections["docs"]
    assert (stored.chunking.size_tokens, stored.index) == (64, pb.INDEX_KIND_IVF)
    stored.remake.CopyFrom(pb.Remake(documents_done=1, documents=4, reason="chunking"))
    stored.documents = 4
    shown = (await ragcache("collection", "get", "docs")).stdout
    assert "4 of 10" in shown
    assert "5 MiB" in shown
    assert "lexical weight 0.7\n" in shown
    assert "1 of 4 (chunking)" in shown
    listed = (await ragcache("collection", "list")).stdout.splitlines()
    assert listed[0].split() == ["NAME", "DOCUMENTS", "CHUNKS", "TEXT", "INDEX", "REMAKE"]
    assert [line.split()[0] for line in listed[1:]] == ["default", "docs"]
    as_json = await ragcache("collection", "get", "docs", "-o", "json")
    found: dict[str, Any] = json.loads(as_json.stdout)
    assert (found["max_documents"], found["remake"]["documents"]) == (10, 4)


async def test_a_patch_changes_only_the_settings_that_are_given(platform: World) -> None:
    await ragcache("collection", "put", "docs", "--chunk-size", 64, "--max-documents", 10)
    patched = await ragcache("collection", "patch", "docs", "--window", 3)
    assert patched.exit_code == 0, patched.output
    stored = platform.retriever.collections["docs"]
    found = (stored.chunking.size_tokens, stored.max_documents, stored.window)
    assert found == (64, 10, 3)
    nothing = await ragcache("collection", "patch", "docs")
    assert nothing.exit_code == 2
    assert "SETTINGS: none is given" in nothing.stderr
    weighed = await ragcache("collection", "patch", "docs", "--lexical-weight", 0, "--no-labels")
    assert weighed.exit_code == 0, weighed.output
    assert "labels         no\n" in weighed.stdout
    stored = platform.retriever.collections["docs"]
    assert (stored.HasField("lexical_weight"), stored.lexical_weight) == (True, 0)
    assert (stored.HasField("labels"), stored.labels) == (True, False)
    too_large = await ragcache("collection", "patch", "docs", "--lexical-weight", 1.5)
    assert too_large.exit_code == 2
    assert "--lexical-weight" in too_large.stderr


async def test_the_status_of_this_machine_shows_remakes(platform: World, tmp_path: Path) -> None:
    record = PlatformRecord(
        name="docs",
        pid=os.getpid(),
        started=psutil.Process().create_time(),
        phase="ready",
        gateway_url=platform.base_url,
        model="tinyrag",
        parts=(),
    )
    write_record(tmp_path, record)
    assert (await ragcache("collection", "put", "docs")).exit_code == 0
    words = ("status", "--data", tmp_path)
    assert "remake" not in (await ragcache(*words)).stdout
    assert json.loads((await ragcache(*words, "-o", "json")).stdout)["remakes"] == []
    remake = pb.Remake(documents_done=1, documents=4, reason="chunking")
    platform.retriever.collections["docs"].remake.CopyFrom(remake)
    assert "remake of docs: 1 of 4 documents (chunking)\n" in (await ragcache(*words)).stdout
    found = json.loads((await ragcache(*words, "-o", "json")).stdout)
    assert found["remakes"] == [
        {"collection": "docs", "documents_done": 1, "documents": 4, "reason": "chunking"}
    ]


async def test_a_collection_is_deleted_after_a_question(platform: World) -> None:
    refused = await ragcache("collection", "delete", "default", answer="n\n")
    assert refused.exit_code == 1
    assert "default" in platform.retriever.collections
    deleted = await ragcache("collection", "delete", "default", "--yes")
    assert deleted.stdout == "deleted collection 'default' with 0 documents\n"
    missing = await ragcache("collection", "get", "default")
    assert missing.exit_code == 2
    assert "collection 'default' does not exist" in missing.stderr


async def test_a_backup_is_written_and_restored(platform: World, tmp_path: Path) -> None:
    platform.retriever.copy = [b"x" * (1 << 20), b"end"]
    file = tmp_path / "documents.ragcache"
    written = await ragcache("backup", file)
    assert written.exit_code == 0, written.output
    assert written.stdout == f"wrote {file} ({file.stat().st_size:,} bytes)\n"
    assert names_in(tmp_path) == [file.name]
    assert file.stat().st_mode & 0o077 == 0, "others of the machine may not read the texts"
    twice = await ragcache("backup", file)
    assert twice.exit_code == 2
    assert f"FILE: {file} exists" in twice.stderr
    refused = await ragcache("restore", file, answer="n\n")
    assert refused.exit_code == 1
    assert platform.retriever.restored == []
    restored = await ragcache("restore", file, "--yes")
    assert restored.stdout == "restored 7 documents\n"
    assert b"".join(platform.retriever.restored) == b"".join(platform.retriever.copy)


async def test_a_backup_with_a_key_is_restored_with_this_key_only(
    platform: World, tmp_path: Path
) -> None:
    platform.retriever.copy = [b"text of a document" * 100_000, b"end"]
    encrypted, plain = tmp_path / "encrypted", tmp_path / "plain"
    key, other = tmp_path / "key", tmp_path / "other"
    key.write_text("1" * 64)
    other.write_text("2" * 64)
    assert (await ragcache("backup", encrypted, "--key", key)).exit_code == 0
    assert (await ragcache("backup", plain)).exit_code == 0
    assert b"text" not in encrypted.read_bytes()
    changed = tmp_path / "changed"
    changed.write_bytes(encrypted.read_bytes()[:-1])
    for options, problem in (
        ((encrypted,), "--key: is missing"),
        ((encrypted, "--key", other), "FILE: was encrypted with another key"),
        ((changed, "--key", key), "changed, or cut off"),
        ((plain, "--key", key), "FILE: was made without a key"),
    ):
        refused = await ragcache("restore", *options, "--yes")
        assert refused.exit_code == 2
        assert problem in refused.stderr
    assert platform.retriever.restored == []
    restored = await ragcache("restore", encrypted, "--key", key, "--yes")
    assert restored.stdout == "restored 7 documents\n"
    assert b"".join(platform.retriever.restored) == b"".join(platform.retriever.copy)


async def test_a_damaged_backup_is_not_sent(platform: World, tmp_path: Path) -> None:
    file = tmp_path / "documents.ragcache"
    await ragcache("backup", file)
    file.write_bytes(file.read_bytes()[:-1])
    result = await ragcache("restore", file, "--yes")
    assert result.exit_code == 2
    assert "FILE: is cut off or damaged" in result.stderr
    assert platform.retriever.restored == []


async def test_a_backup_that_fails_leaves_no_file(platform: World, tmp_path: Path) -> None:
    await platform.servers["retriever"].stop()
    result = await ragcache("backup", tmp_path / "documents.ragcache")
    assert result.exit_code == 1
    assert "the retriever is unavailable" in result.stderr
    assert names_in(tmp_path) == []


async def test_a_backup_and_its_restore_are_reported_as_json(
    platform: World, tmp_path: Path
) -> None:
    file = tmp_path / "json.ragcache"
    written = await ragcache("backup", file, "--output", "json")
    assert json.loads(written.stdout) == {"file": str(file), "bytes": file.stat().st_size}
    restored = await ragcache("restore", file, "--yes", "--output", "json")
    assert json.loads(restored.stdout) == {"documents": 7}
