"""Reads the text of web pages."""

from __future__ import annotations

from itertools import islice
from typing import Final

from lxml.html import HtmlElement

from ragcache_gateway.extraction.encodings import assumed_encoding
from ragcache_gateway.extraction.extracted import (
    ExtractedText,
    UnreadableDocument,
    cleaned,
    metadata_of,
    short_line,
)
from ragcache_gateway.extraction.html.about import About
from ragcache_gateway.extraction.html.code import mark_code
from ragcache_gateway.extraction.html.controls import replace_controls
from ragcache_gateway.extraction.html.main_part import main_part
from ragcache_gateway.extraction.html.markdown import heading_text, markdown
from ragcache_gateway.extraction.html.source import decode, parse
from ragcache_gateway.extraction.html.storage_format import to_html
from ragcache_gateway.extraction.html.tree import short_text

_NESTED: Final = "elements are nested more than 2,000 deep; the text after that was not read"

_SCRIPTED: Final = (
    "the page asks for JavaScript and has little text without it; save it from a browser"
)
_LITTLE_CHARS: Final = 200
_MAX_HEADINGS: Final = 8


def read_html(content: bytes) -> ExtractedText:
    """Read a page without navigation, comments and scripts. Raises UnreadableDocument."""
    page, assumed = decode(content)
    root, is_cut = parse(page)
    if root is None:
        raise _refusal(has_scripts=False)
    has_scripts = root.find(".//script") is not None
    asks_for_scripts = any("javascript" in short_text(one).lower() for one in root.iter("noscript"))
    about = About(root)
    body = _body(root)
    main = main_part(body)
    headings = list(islice(main.iter("h1"), _MAX_HEADINGS))
    others = [] if headings else list(islice(body.iter("h1"), _MAX_HEADINGS))
    title = about.title(headings, others)
    text = cleaned(markdown(main)) or _whole(page)
    if not text and is_cut:
        raise UnreadableDocument("has elements nested more than 2,000 deep", "send its text")
    if not text:
        raise _refusal(has_scripts=has_scripts)
    if any(heading_text(one) == title for one in others):
        # The heading of the page is before its main part.
        text = f"# {title}\n\n{text}"
    warnings = (
        (assumed_encoding(assumed or ""), assumed is not None),
        (_NESTED, is_cut),
        (_SCRIPTED, has_scripts and asks_for_scripts and len(text) < _LITTLE_CHARS),
    )
    return ExtractedText(
        text,
        markdown=True,
        title=short_line(title),
        metadata=metadata_of(author=about.author, date=about.date),
        warnings=tuple(warning for warning, holds in warnings if holds),
    )


def _body(root: HtmlElement) -> HtmlElement:
    to_html(root)
    replace_controls(root)
    mark_code(root)
    body = root.find("body")
    return root if body is None else body


def _whole(page: str) -> str:
    """Return all text of a page that consists of navigation."""
    root, _ = parse(page)
    return "" if root is None else cleaned(markdown(_body(root)))


def _refusal(*, has_scripts: bool) -> UnreadableDocument:
    if has_scripts:
        return UnreadableDocument(
            "has no text without its scripts", "save the page from a browser, and send that file"
        )
    return UnreadableDocument("has no text", "send a page with text")
