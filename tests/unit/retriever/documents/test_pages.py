"""Form feeds divide a text into pages, and chunks know theirs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragcache_retriever.documents.chunking import Chunk, split_document
from ragcache_retriever.documents.collection import Chunking
from ragcache_retriever.documents.pages import PageBreaks


def split(text: str, size_tokens: int, *, markdown: bool = False) -> list[Chunk]:
    return split_document(
        text,
        markdown=markdown,
        chunking=Chunking(size_tokens, 0),
        count_tokens=lambda part: len(part.split()),
    )


def pages(text: str, size_tokens: int) -> list[tuple[int, int]]:
    return [(chunk.page, chunk.page_end) for chunk in split(text, size_tokens)]


def test_a_chunk_has_the_pages_of_its_first_and_last_text() -> None:
    text = "One one.\n\fTwo two.\n\f\n\fFour four."
    assert pages(text, 2) == [(1, 1), (2, 2), (4, 4)]
    assert pages(text, 4) == [(1, 2), (4, 4)]


def test_a_text_without_form_feeds_has_no_pages() -> None:
    assert pages("One.\n\nTwo.", 9) == [(0, 0)]


def test_a_new_page_is_a_new_line_in_a_chunk() -> None:
    (chunk,) = split("The valve closes when\fthe water is hot.", 9)
    assert chunk.text == "The valve closes when\nthe water is hot."


def test_a_heading_on_a_new_page_is_a_heading() -> None:
    chunks = split("# A\n\nOne.\n\f\n# B\n\nTwo.", 3, markdown=True)
    assert [(chunk.heading_path, chunk.page) for chunk in chunks] == [(("A",), 1), (("B",), 2)]


@given(st.text(st.sampled_from("a \n\f.")))
def test_pages_are_counted_by_the_form_feeds_before(text: str) -> None:
    breaks = PageBreaks(text)
    for i in range(len(text)):
        page = 1 + text[: i + 1].count("\f") if "\f" in text else 0
        assert breaks.pages(i, i + 1) == (page, page)


@given(st.text(st.sampled_from("ab \n\f.")), st.integers(1, 4))
def test_chunks_are_in_the_order_of_their_pages(text: str, size_tokens: int) -> None:
    found = split(text, size_tokens)
    ordered = [page for chunk in found for page in (chunk.page, chunk.page_end)]
    assert ordered == sorted(ordered)
    assert "\f" not in "".join(chunk.text for chunk in found)
