"""Each word of a made page is text or navigation, and the reader keeps the text."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from bench.extraction import kept_lines_share, kept_share
from bench.support.web_pages.pages import WebPage, make_web_pages
from ragcache_gateway.extraction.html.reader import read_html

PAGES = make_web_pages(1)


def test_pages_are_a_function_of_the_seed() -> None:
    assert make_web_pages(2) == make_web_pages(2)
    assert make_web_pages(2) != PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_each_word_where_it_says(page: WebPage) -> None:
    words = Counter(re.findall(r"[a-z]+", page.html.lower()))
    assert page.content
    assert not set(page.content) & set(page.navigation)
    assert all(words[word] for word in (*page.content, *page.navigation))
    assert "{{" not in page.html


def test_shares_count_words_and_whole_lines() -> None:
    assert kept_share(["sun", "moon"], "The SUN shines") == 0.5
    assert kept_lines_share(["a", "  b"], "a\nb") == 0.5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_reader_keeps_text_and_code_and_little_navigation(page: WebPage) -> None:
    text = read_html(page.html.encode()).text
    assert kept_share(page.content, text) >= 0.98
    assert not page.code or kept_lines_share(page.code, text) == 1
    assert not page.navigation or kept_share(page.navigation, text) < 0.15
