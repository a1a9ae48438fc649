"""Citations of the passages in a prompt."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragcache_gateway.pipeline.answer import PREVIEW_CHARS, cite, cited_passages, preview
from ragcache_gateway.prompts.passages import group_by_document
from tests.unit.gateway.prompts.test_passages import hit


def test_a_hit_in_another_hits_window_is_cited_with_its_own_score() -> None:
    (document,) = group_by_document([hit("a", 1, 0.9, window=1), hit("a", 2, 0.4)])
    cited = cite(cited_passages(document))
    assert [(c.chunk, c.score) for c in cited] == [("a#1", 0.9), ("a#2", 0.4)]


def test_citations_have_the_order_of_the_search() -> None:
    hits = [hit("b", 3, 0.5), hit("a", 1, 0.5), hit("b", 1, 0.5), hit("a", 0, 0.6)]
    passages = [passage for document in group_by_document(hits) for passage in document]
    assert [one.chunk for one in cite(cited_passages(passages))] == ["b#3", "a#1", "b#1", "a#0"]


@given(text=st.text(max_size=600))
def test_a_preview_is_one_short_line(text: str) -> None:
    shown = preview(text)
    assert len(shown) <= PREVIEW_CHARS
    assert shown.split() == shown.split(" ") or not shown
