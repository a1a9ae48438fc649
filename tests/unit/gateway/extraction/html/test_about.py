"""Title, author and date are those that the page declares, and never a guess."""

from __future__ import annotations

import json

import pytest

from ragcache_gateway.extraction.extracted import ExtractedText
from ragcache_gateway.extraction.html.reader import read_html


def read(head: str, body: str = "<p>The crane was checked on 2011-03-04.</p>") -> ExtractedText:
    return read_html(f"<html><head>{head}</head><body>{body}</body></html>".encode())


SITE = '<meta property="og:site_name" content="Works">'


def linked(value: object) -> str:
    return f'<script type="application/ld+json">{json.dumps(value)}</script>'


@pytest.mark.parametrize(
    ("head", "body"),
    [
        ("", "<p>Checked on 2011-03-04.</p>"),
        ("<link rel=canonical href='https://x.example/2011/03/04/crane'>", "<p>Crane.</p>"),
        ("", "<p>Built <time datetime='1999-01-02'>long ago</time>.</p>"),
        ("", "<p>Crane.</p><footer>© 2011-2020 Works</footer>"),
        (linked({"@type": "Product", "releaseDate": "1999-01-02"}), "<p>Crane.</p>"),
        (linked({"@type": "Review", "datePublished": "1999-01-02"}), "<p>Crane.</p>"),
        ("<meta name=date content='some day'>", "<p>Crane.</p>"),
        ("<meta name=date content='2011-13-44'>", "<p>Crane.</p>"),
        (
            "",
            "<article><time pubdate datetime=2001-01-01>a</time></article>"
            "<article><time pubdate datetime=2002-02-02>b</time></article>",
        ),
    ],
)
def test_a_page_that_declares_no_date_has_none(head: str, body: str) -> None:
    assert "date" not in read(head, body).metadata


@pytest.mark.parametrize(
    ("head", "body"),
    [
        ('<meta property="article:published_time" content="2024-05-06T23:00:00+02:00">', ""),
        ('<meta name="DC.date.issued" content="20240506">', ""),
        ('<meta name="citation_publication_date" content="2024/05/06">', ""),
        ('<meta name="date" content="Mon, 06 May 2024 10:00:00 GMT">', ""),
        (linked({"@type": "TechArticle", "datePublished": "2024-05-06"}), ""),
        (
            linked([{"@graph": [{"@type": ["WebPage"], "dateModified": "2024-05-06T01:00:00Z"}]}]),
            "",
        ),
        ("", '<time pubdate datetime="2024-05-06">in May</time>'),
        ("", '<time itemprop="datePublished" datetime="2024-05-06T08:00">in May</time>'),
        ("", '<time class="entry-date published" datetime="2024-05-06">in May</time>'),
        (
            '<meta property="article:modified_time" content="2025-01-01">'
            '<meta property="article:published_time" content="2024-05-06">',
            "",
        ),
    ],
)
def test_a_date_that_the_page_declares_is_its_metadata(head: str, body: str) -> None:
    assert read(head, f"<p>Checked on 2011-03-04.</p>{body}").metadata["date"] == "2024-05-06"


@pytest.mark.parametrize(
    ("head", "body", "author"),
    [
        ('<meta name="author" content="Ida Holm">', "", "Ida Holm"),
        (linked({"@type": "Article", "author": [{"name": "Ida"}, {"name": "Bo"}]}), "", "Ida, Bo"),
        ('<meta property="article:author" content="https://x.example/ida">', "", None),
        ("", '<a rel="author" href="/ida">Ida Holm</a>', "Ida Holm"),
    ],
)
def test_the_author_is_a_name(head: str, body: str, author: str | None) -> None:
    assert read(head, f"<p>Crane.</p>{body}").metadata.get("author") == author


@pytest.mark.parametrize("script", ["{", "[" * 100_000, '["x"]', '{"@graph": 1}', "null"])
def test_linked_data_that_is_wrong_is_passed_over(script: str) -> None:
    assert read(f'<script type="application/ld+json">{script}</script>').metadata == {}


@pytest.mark.parametrize(
    ("head", "body", "title"),
    [
        (
            "<title>Crane 7 - Works</title>",
            "<h1>Crane 7<a class=headerlink href=#c>¶</a></h1>",
            "Crane 7",
        ),
        (f"<title>Crane 7 | Works</title>{SITE}", "", "Crane 7"),
        (f"<title>Crane 7 - lifting - Works</title>{SITE}", "", "Crane 7 - lifting"),
        ("<title>Hall A - Hall B</title>", "", "Hall A - Hall B"),
        ("<title>x</title><meta property='og:title' content='Crane 7'>", "", "Crane 7"),
        ("<title>Crane 7: use</title>", "<h1>Works</h1><h1>Crane 7</h1>", "Crane 7"),
        ("<title>Works - Crane 7</title>", "<h1>Crane 7</h1>", "Crane 7"),
        (
            "<title>Crane 7 - Works</title>",
            "<h1>Works</h1><main><p>It lifts a ton.</p></main>",
            "Crane 7",
        ),
        ("", "<h1>Use of <code>crane</code></h1>", "Use of crane"),
        ("", "", ""),
    ],
)
def test_the_title_has_neither_pilcrow_nor_the_name_of_the_site(
    head: str, body: str, title: str
) -> None:
    assert read(head, f"{body}<p>Crane.</p>").title == title


@pytest.mark.parametrize(
    "date", ["Mon, 01 Jan 99999999999999999999 00:00:00 +0000", "1 Jan 2024 0:0 +" + "9" * 20]
)
def test_a_wrong_date_refuses_no_page(date: str) -> None:
    assert read_html(f"<meta name=date content='{date}'><p>Text</p>".encode()).text == "Text"
