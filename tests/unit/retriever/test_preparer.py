"""The embedded text of a chunk holds its title and headings."""

from __future__ import annotations

import pytest

from ragcache_retriever.documents.chunking import Chunk
from ragcache_retriever.preparer import embedded_text


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ((), "Title\nbody"),
        (("Title",), "Title\nbody"),
        (("Title", "Part"), "Title\nPart\nbody"),
        (("Other", "Part"), "Title\nOther\nPart\nbody"),
    ],
)
def test_a_chunk_is_embedded_with_title_and_headings(path: tuple[str, ...], text: str) -> None:
    assert embedded_text("Title", Chunk("body", path)) == text
