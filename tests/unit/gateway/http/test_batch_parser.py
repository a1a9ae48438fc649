"""The documents of a batch do not depend on how its body arrives."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.documents.formats import DocumentFormat
from ragcache_core.errors import InvalidInput, TooLarge
from ragcache_gateway.documents.incoming import IncomingDocument
from ragcache_gateway.http.batch_parser import BatchItem, RefusedDocument, batch_parser

FORM = "multipart/form-data; boundary=XX"
MAX_BYTES = 200


def parse(content_type: str, body: bytes, sizes: list[int] | None = None) -> list[BatchItem]:
    parser = batch_parser(content_type, "docs", MAX_BYTES)
    items: list[BatchItem] = []
    for size in sizes or []:
        items += parser.feed(body[:size])
        body = body[size:]
    items += parser.feed(body)
    return [*items, *parser.close()]


def part(name: str, content: bytes, *, file: str = "", kind: str = "") -> bytes:
    disposition = f'form-data; name="{name}"' + (f'; filename="{file}"' if file else "")
    head = f"--XX\r\nContent-Disposition: {disposition}\r\n"
    head += f"Content-Type: {kind}\r\n" if kind else ""
    return head.encode() + b"\r\n" + content + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--XX--\r\n"


def described(items: list[BatchItem]) -> list[tuple[object, ...]]:
    return [
        (one.fields.collection, one.fields.id, one.kind.value, one.content)
        if isinstance(one, IncomingDocument)
        else (one.id, str(one.error))
        for one in items
    ]


BODY = form(
    part("title", b"First"),
    part("metadata", b'{"team": "core"}'),
    part("file", b"one", file="a.txt"),
    part("file", b"<p>two</p>", file="b.html"),
    part("file", b"%PDF", file="c", kind="application/pdf"),
    part("file", b'{"id": "d", "text": "x"}\n\n{"id": "e"}', file="more.jsonl"),
    part("file", b"x" * (MAX_BYTES + 1), file="large.txt"),
    part("colour", b"red"),
    part("file", b"x", file="f.txt"),
    part("file", b"x", file="g.exe"),
    part("file", b"x", file="h.txt"),
)


def test_a_mark_before_a_line_of_json_is_no_text() -> None:
    marked = b"\xef\xbb\xbf" + b'{"id": "a", "text": "x"}\n'
    items = parse("application/jsonl", marked + marked)
    assert [one.content for one in items if isinstance(one, IncomingDocument)] == [b"x", b"x"]


def test_a_file_may_name_its_encoding() -> None:
    kinds = [("a.txt", b"cp1252"), ("b.html", b"utf-16"), ("c.pdf", b"cp1252"), ("d.txt", b"rot13")]
    parts = [
        one
        for name, encoding in kinds
        for one in (part("encoding", encoding), part("file", b"x", file=name))
    ]
    read, page, *refused = parse(FORM, form(*parts))
    assert isinstance(read, IncomingDocument)
    assert isinstance(page, IncomingDocument)
    assert (read.encoding, page.encoding) == ("cp1252", "utf-16")
    assert [str(one.error).partition(":")[0] for one in refused] == ["encoding"] * 2  # type: ignore[union-attr]


def test_a_field_that_is_not_utf_8_is_refused() -> None:
    parts = part("title", b"Gr\xfc\xdfe"), part("file", b"x", file="a.txt")
    (refused,) = parse(FORM, form(*parts))
    assert isinstance(refused, RefusedDocument)
    assert str(refused.error) == "title: is not UTF-8; send the field in UTF-8"


def test_a_form_has_a_document_per_file_and_line() -> None:
    items = parse(FORM, BODY)
    assert described(items)[:4] == [
        ("docs", "a.txt", "text", b"one"),
        ("docs", "b.html", "html", b"<p>two</p>"),
        ("docs", "c", "pdf", b"%PDF"),
        ("docs", "d", "text", b"x"),
    ]
    first, second = items[:2]
    assert isinstance(first, IncomingDocument)
    assert isinstance(second, IncomingDocument)
    assert (first.fields.title, first.fields.metadata) == ("First", {"team": "core"})
    assert (second.fields.title, second.fields.metadata) == ("", {})
    refused = [one for one in items if isinstance(one, RefusedDocument)]
    assert [one.id for one in refused] == ["e", "large.txt", "f.txt", "g.exe"]
    assert [one.error.field for one in refused if isinstance(one.error, InvalidInput)] == [
        *("text", "file", "colour", "file")
    ]
    assert isinstance(refused[1].error, TooLarge)
    assert described(items)[-1] == ("docs", "h.txt", "text", b"x")


@given(sizes=st.lists(st.integers(0, 80)))
def test_pieces_of_any_size_have_the_same_documents(sizes: list[int]) -> None:
    assert described(parse(FORM, BODY, sizes)) == described(parse(FORM, BODY))


@given(sizes=st.lists(st.integers(0, 30)))
def test_lines_of_json_are_documents(sizes: list[int]) -> None:
    lines = [
        json.dumps({"id": "a", "text": "Ä"}, ensure_ascii=False).encode(),
        b"",
        b'{"id": "b", "text": "<p>x</p>", "content_type": "html", "collection": "other"}',
        b"no json",
        b'{"id": "c", "text": "' + b"x" * MAX_BYTES + b'"}',
        b'{"id": "d", "text": "last"}',
    ]
    items = parse("application/x-ndjson", b"\n".join(lines), sizes)
    found = described(items)
    assert found[0] == ("docs", "a", "text", "Ä".encode())
    assert found[1] == ("other", "b", "html", b"<p>x</p>")
    assert [len(one) for one in found] == [4, 4, 2, 2, 4]
    assert [one.line for one in items] == [1, 3, 4, 5, 6]
    assert str(found[3][1]).startswith("line: is over")


def test_a_form_that_ends_early_is_refused() -> None:
    with pytest.raises(InvalidInput, match="ends before the form does"):
        parse(FORM, BODY[:-10])
    with pytest.raises(InvalidInput, match="no usable form"):
        parse(FORM, b"no form at all")


@pytest.mark.parametrize("kind", ["", "text/html", "multipart/form-data", "application/json"])
def test_another_body_is_refused(kind: str) -> None:
    with pytest.raises(InvalidInput, match="Content-Type"):
        batch_parser(kind, "docs", MAX_BYTES)


def test_a_line_may_have_a_number_as_id() -> None:
    good, bad = parse("application/jsonl", b'{"id": 7, "text": "x"}\n{"id": 8.5}')
    assert isinstance(good, IncomingDocument)
    assert good.fields.id == "7"
    assert isinstance(bad, RefusedDocument)
    assert bad.id == "8.5"


def test_a_document_of_a_line_has_its_own_format() -> None:
    (item,) = parse("application/jsonl", b'{"id": "a.pdf", "text": "read already"}')
    assert isinstance(item, IncomingDocument)
    assert item.kind is DocumentFormat.TEXT


def test_fields_before_json_lines_are_not_ignored() -> None:
    body = b"".join(
        b'--B\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n' % one
        for one in (
            (b"metadata", b"", b'{"team": "core"}'),
            (b"file", b'; filename="d.jsonl"', b'{"id": "1", "text": "x"}'),
            (b"file", b'; filename="b.md"', b"# B"),
        )
    )
    parser = batch_parser("multipart/form-data; boundary=B", "default", 1 << 20)
    refused, other = parser.feed(body + b"--B--\r\n")
    assert isinstance(refused, RefusedDocument)
    assert not isinstance(other, RefusedDocument)
