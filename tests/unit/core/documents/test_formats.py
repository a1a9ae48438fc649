"""Formats by name and media type."""

from __future__ import annotations

import pytest

from ragcache_core.documents.formats import (
    DocumentFormat,
    format_of_name,
    format_of_type,
    suffix_of,
)


@pytest.mark.parametrize("kind", DocumentFormat)
def test_a_format_is_known_by_its_name_and_its_media_type(kind: DocumentFormat) -> None:
    assert format_of_type(kind.value) is kind
    assert format_of_type(f"{kind.media_type}; charset=utf-8") is kind


def test_a_file_name_tells_the_format_by_its_suffix() -> None:
    assert format_of_name("docs/A.PDF") is DocumentFormat.PDF
    assert format_of_name("notes.markdown") is DocumentFormat.MARKDOWN
    assert format_of_name("archive.tar.gz") is None
    assert format_of_name("README") is None
    assert suffix_of("a/B.HTM") == ".htm"
    assert suffix_of("a/b.exe") is None


def test_an_unknown_type_has_no_format() -> None:
    assert format_of_type("application/octet-stream") is None
    assert format_of_type("") is None
