"""Text files in encodings that programs write."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_gateway.extraction.encodings import (
    decode_guessed,
    decode_named,
    decode_plain,
    is_encoding,
    read_text,
)
from ragcache_gateway.extraction.extracted import UnreadableDocument

MARKS = {
    "utf-8": codecs.BOM_UTF8,
    "utf-16-le": codecs.BOM_UTF16_LE,
    "utf-16-be": codecs.BOM_UTF16_BE,
    "utf-32-le": codecs.BOM_UTF32_LE,
    "utf-32-be": codecs.BOM_UTF32_BE,
}
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufeff"), min_size=1)


@given(text=texts.filter(str.strip), encoding=st.sampled_from(sorted(MARKS)))
def test_a_mark_names_the_encoding(text: str, encoding: str) -> None:
    assert decode_plain(MARKS[encoding] + text.encode(encoding)) == text


@given(texts.filter(str.strip))
def test_utf_8_needs_no_mark(text: str) -> None:
    assert decode_plain(text.encode()) == text


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("text", ["Key of the blue box\r\n", "Schlüssel für Größe 4\n"])
def test_zeros_between_letters_are_wide_characters(text: str, encoding: str) -> None:
    assert decode_plain(text.encode(encoding)) is None
    assert decode_guessed(text.encode(encoding)) == (text, encoding)


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("Käse und Brötchen kosten 5 €.", "cp1252"),
        ("El niño come mañana", "cp1252"),
        ("Det är en ö, à la carte €", "cp1252"),
        ("Zażółć gęślą jaźń, proszę o fakturę za usługę.", "cp1250"),
        ("Договор поставки оборудования, сегодня хорошая погода", "cp1251"),
        ("Привет, как дела? Сегодня хорошая погода.", "koi8_r"),
        ("これは日本語のテキストです。会議は三階で行われます。", "cp932"),
        ("这是一个中文文本。会议在三楼举行。", "gb18030"),
        ("이것은 한국어 텍스트입니다. 회의는 삼층에서 열립니다.", "cp949"),
    ],
)
def test_other_text_is_guessed_and_the_guess_is_said(text: str, encoding: str) -> None:
    content = ("Plain line.\n" * 3000 + text).encode(encoding)
    read = read_text(content)
    assert read.text.endswith(text)
    assert encoding in read.warnings[0]


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"\0" * 64, b"a\0b"])
def test_binary_files_are_refused(content: bytes) -> None:
    with pytest.raises(UnreadableDocument):
        decode_guessed(content)


def test_a_named_encoding_is_used_or_refused() -> None:
    assert decode_named("Größe".encode("cp850"), "cp850") == "Größe"
    assert decode_named("Größe".encode("utf-16"), "utf-16") == "Größe"
    with pytest.raises(UnreadableDocument, match=r"is not text in ascii \(byte 2\)"):
        decode_named("Größe".encode(), "ascii")
    with pytest.raises(UnreadableDocument, match="is empty"):
        decode_named(b" \n", "cp1252")


def test_codecs_that_are_no_encodings_are_unknown() -> None:
    assert all(map(is_encoding, ("utf-16", "latin-1", "Shift_JIS", "CP1252")))
    assert not any(map(is_encoding, ("base64", "rot13", "punycode", "idna", "no such", "\0")))


def test_few_wrong_bytes_leave_a_text_utf_8() -> None:
    read = read_text(("Die Größe der Düse beträgt fünf Millimeter. " * 3).encode() + b"\xe2\x80")
    assert read.text.startswith("Die Größe der Düse")
    assert "utf-8" in read.warnings[0]


def test_utf_7_and_unknown_names_are_no_encodings() -> None:
    import encodings

    assert not is_encoding("utf-7")
    assert not is_encoding("no-such-encoding-35")
    assert "no_such_encoding_35" not in encodings._cache
