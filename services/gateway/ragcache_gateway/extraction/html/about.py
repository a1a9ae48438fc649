"""Reads what a page declares of itself: title, author and date.

A date counts only if the page declares it as its own. A date in the text or in the address may be
that of anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import date
from email.utils import parsedate_to_datetime
from typing import Any, Final

from lxml.html import HtmlElement

from ragcache_gateway.extraction.html.markdown import heading_text
from ragcache_gateway.extraction.html.tree import joined, names_of, short_text

_DATES: Final = (
    *("article:published_time", "og:published_time", "datepublished", "dcterms.issued"),
    *(
        "dc.date.issued",
        "citation_publication_date",
        "citation_date",
        "publishdate",
        "publish-date",
    ),
    *("publish_date", "pubdate", "published_time", "parsely-pub-date", "sailthru.date", "date"),
    *("dcterms.date", "dc.date", "dcterms.created", "dc.date.created", "article:modified_time"),
    *("og:updated_time", "dcterms.modified", "datemodified", "last-modified", "revised"),
)
"""Names of elements ``meta``, the first day of the document before later ones."""

_AUTHORS: Final = ("author", "article:author", "dc.creator", "dcterms.creator", "citation_author")
_SITES: Final = ("og:site_name", "application-name", "apple-mobile-web-app-title")
_DOCUMENTS: Final = re.compile(
    r"(?:Article|Posting|Report|Page|HowTo|CreativeWork|DigitalDocument|Chapter|Book)$"
)
_TIME_NAMES: Final = re.compile(r" (?:dt published|entry date|published) ")
_DAY: Final = re.compile(r"\s*(\d{4})[-/.]?(\d{2})[-/.]?(\d{2})(?!\d)")
_TITLE_MARKS: Final = " |\u2013\u2014\u00b7\u00bb\u2022-"
_TITLE_BREAK: Final = re.compile(rf"\s+[{_TITLE_MARKS}]\s+")
_MAX_SCRIPT_CHARS: Final = 1 << 20


class About:
    """What a page says of itself before anything is removed from it."""

    def __init__(self, root: HtmlElement) -> None:
        self._meta = _meta(root)
        self._linked = list(_linked_data(root))
        self._titles = [joined(one.itertext()) for one in root.iterfind(".//head/title")]
        self.date = self._date(root)
        self.author = self._author(root)

    def title(self, headings: list[HtmlElement], others: list[HtmlElement]) -> str:
        """Return the title: a heading of the first level, or what the page declares.

        Args:
            headings: Those of the first level in the main part.
            others: Those outside, which may be the name of the site.
        """
        declared = self._meta.get("og:title") or next(iter(self._titles), "")
        texts = _texts(headings)
        sites = {site.casefold() for site in map(self._meta.get, _SITES) if site}
        if not texts:
            is_site = declared.endswith
            texts = [
                t for t in _texts(others) if t in declared and (t == declared or not is_site(t))
            ]
            sites |= {text.casefold() for text in _texts(others)} - {declared.casefold()}
        named = [text for text in texts if text in declared]
        if named or len(texts) == 1:
            return max(named, key=len, default=texts[0])
        return _without_site(declared, sites)

    def _date(self, root: HtmlElement) -> str | None:
        for value in map(self._meta.get, _DATES[:-5]):
            if day := _day(value):
                return day
        for name in ("datePublished", "dateCreated", "dateModified"):
            for one in self._linked:
                if day := _day(one.get(name)):
                    return day
        days = {_day(one.get("datetime")) for one in root.iter("time") if _is_publication(one)}
        days |= {
            _day(one.get("content")) for one in root.iterfind(".//*[@itemprop='datePublished']")
        }
        days -= {None}
        if len(days) == 1:
            return days.pop()
        return next(filter(None, (_day(self._meta.get(name)) for name in _DATES[-5:])), None)

    def _author(self, root: HtmlElement) -> str | None:
        names = (self._meta.get(name) for name in _AUTHORS)
        for name in (*names, *(_name(one.get("author")) for one in self._linked)):
            if name and not name.startswith(("http:", "https:")):
                return name
        named = root.find(".//*[@rel='author']")
        return short_text(named) if named is not None else None


def _texts(headings: list[HtmlElement]) -> list[str]:
    return [text for text in map(heading_text, headings) if text]


def _without_site(title: str, sites: set[str]) -> str:
    """Return a title without the name of the site after it."""
    parts = _TITLE_BREAK.split(title)
    if len(parts) > 1 and parts[-1].casefold() in sites:
        return title[: -len(parts[-1])].rstrip(_TITLE_MARKS)
    return title


def _meta(root: HtmlElement) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in root.iter("meta"):
        name = one.get("property") or one.get("name") or one.get("itemprop") or ""
        if (value := one.get("content", "").strip()) and name:
            found.setdefault(name.lower(), value)
    return found


def _linked_data(root: HtmlElement) -> Iterator[dict[str, Any]]:
    """Yield the documents that the page describes as JSON-LD: itself."""
    for script in root.iter("script"):
        if script.get("type") != "application/ld+json":
            continue
        try:
            value = json.loads((script.text or "")[:_MAX_SCRIPT_CHARS])
        except (ValueError, RecursionError):
            continue
        for one in value if isinstance(value, list) else [value]:
            graph = one.get("@graph", [one]) if isinstance(one, dict) else []
            for node in graph if isinstance(graph, list) else []:
                kinds = node.get("@type", "") if isinstance(node, dict) else ""
                for kind in kinds if isinstance(kinds, list) else [kinds]:
                    if isinstance(kind, str) and _DOCUMENTS.search(kind):
                        yield node


def _name(author: Any) -> str | None:
    if isinstance(author, list):
        return ", ".join(filter(None, map(_name, author[:8]))) or None
    if isinstance(author, dict):
        author = author.get("name")
    return author if isinstance(author, str) else None


def _is_publication(element: HtmlElement) -> bool:
    return (
        "pubdate" in element.attrib
        or element.get("itemprop") == "datePublished"
        or bool(_TIME_NAMES.search(names_of(element)))
    )


def _day(value: Any) -> str | None:
    """Return a day as YYYY-MM-DD, or None for other values."""
    if not isinstance(value, str):
        return None
    try:
        if found := _DAY.match(value):
            return date(*map(int, found.groups())).isoformat()
        return parsedate_to_datetime(value[:64]).date().isoformat()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
