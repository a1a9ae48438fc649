"""Finds the main part of a page, and removes navigation from it.

Elements are judged by what the page says of them (tag, role, class and id), and by the share of
links in their text. An element with a name of navigation stays if it has most of the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final, NamedTuple

from lxml.etree import iterwalk
from lxml.html import HtmlElement

from ragcache_gateway.extraction.html.tree import (
    HEADINGS,
    clear,
    insert_label,
    names_of,
    short_text,
)

_NAVIGATION_TAGS: Final = frozenset({"nav", "menu"})
_NAVIGATION_ROLES: Final = frozenset(
    {"navigation", "search", "contentinfo", "dialog", "alertdialog", "menu", "menubar"}
)
_SUSPECT_ROLES: Final = ("banner", "complementary")
_JUDGED_TAGS: Final = _NAVIGATION_TAGS | {"header", "footer", "aside"}
_NO_CONTENT: Final = re.compile(
    r" (?:breadcrumbs?|pagination|paginator|pager|toc|table of contents?|navbox|catlinks"
    r"|printfooter|editsection|edit (?:page|link|this)|headerlink|hash link|header anchor"
    r"|anchorjs link|viewcode|permalink|skip ?links?|skip (?:to|nav)|cookies?|consent|gdpr"
    r"|newsletter|advert\w*|ads?|sponsor\w*|social|share|sharing|sharedaddy|modal|popup|lightbox"
    r"|comments|comment (?:list|form)|disqus|respond|feedback|helpful|login|signup|subscribe"
    r"|clipboard|noprint|toolbar|jump link|site notice|announcement|source file) "
)
"""Names of elements that are not part of the document."""

_MAYBE_CONTENT: Final = re.compile(
    r" (?:nav|navbar|navigation|topnav|sidenav|subnav|menu|submenu|sidebar|sphinxsidebar|related\w*"
    r"|footer|header|masthead|topbar|banner|widget|promo|popular|trending|recommend\w*|tags?"
    r"|categor(?:y|ies)|meta|author|byline|prev|next|outline|languages?|actions?) "
)
"""Names of elements that are navigation if much of their text is links."""

_MAIN_NAMES: Final = re.compile(
    r" (?:(?:main |body |page |post |entry |article )?content|bodycontent|article body|main"
    r"|markdown body|parser output|primary) "
)
_Rule = Callable[[HtmlElement], bool]
_DECLARED: Final[tuple[_Rule, ...]] = (
    lambda one: one.tag == "main" or one.get("role") == "main",
    lambda one: one.get("itemprop") in ("articleBody", "mainContentOfPage"),
)
_LIKELY: Final[tuple[_Rule, ...]] = (
    lambda one: one.tag == "article",
    lambda one: bool(_MAIN_NAMES.search(names_of(one))),
)
_IN_SENTENCES: Final = frozenset({"a", "span", "b", "i", "em", "strong", "code", *HEADINGS})
_NAMED_BY_TEXT: Final = _IN_SENTENCES | {"dt", "dd", "li", "tr", "td", "th", "pre", "figure"}
"""Elements whose id is made from a title, a term or the name of a function."""

_LISTS: Final = frozenset({"ul", "ol", "div", "table", "td", "p", "section"})
_LABELLED: Final = frozenset({"div", "section", "article", "dd", "td"})

_MUCH: Final = 0.4
_NEARLY_ALL: Final = 0.8
_MAX_LISTS_SHARE: Final = 0.6
_FEWEST_TEXT_CHARS: Final = 25
_FEWEST_LINKS: Final = 3
_FEWEST_PAGE_LINKS: Final = 2
_MIN_MAIN_SHARE: Final = 0.5
_MIN_MAIN_CHARS: Final = 250
_MIN_LIKELY_SHARE: Final = 0.7
_MAX_SEARCHED: Final = 200
_MAX_BEFORE_HEADING: Final = 4


class _Counts:
    """What is in an element: characters, those of links, and links.

    Args:
        page_links: Links to parts of the same page.
        has_main: Whether the main part is in it.
        has_title: Whether a heading of the first level is in it.
    """

    __slots__ = ("chars", "has_main", "has_title", "link_chars", "links", "page_links")

    def __init__(self) -> None:
        self.chars = self.link_chars = self.links = self.page_links = 0
        self.has_main = self.has_title = False

    def add(self, other: _Counts) -> None:
        self.chars += other.chars
        self.link_chars += other.link_chars
        self.links += other.links
        self.page_links += other.page_links
        self.has_main |= other.has_main
        self.has_title |= other.has_title

    def add_text(self, text: str | None, *, is_link: bool) -> None:
        if text:
            chars = len(text.strip())
            self.chars += chars
            self.link_chars += chars * is_link


class _Measured(NamedTuple):
    """An element and what is in it. Inside: in the main part or in an article."""

    element: HtmlElement
    counts: _Counts
    is_inside: bool

    @property
    def own_chars(self) -> int:
        return self.counts.chars - self.counts.link_chars

    def is_linked(self, share: float) -> bool:
        """Whether links have a share of the text."""
        return self.counts.link_chars >= share * self.counts.chars


def main_part(body: HtmlElement) -> HtmlElement:
    """Remove navigation from a page and return the element of its main part."""
    _remove_contents(body)
    *inner, whole = _measured(body, _is_judged)
    for one in inner:
        if _is_navigation(one, whole):
            clear(one.element)
    candidates = [_common(body, rule) for rule in (*_DECLARED, *_LIKELY)]
    *inner, whole = _measured(body, lambda one: one in candidates)
    own_chars = {one.element: one.own_chars for one in inner}
    declared = min(_MIN_MAIN_CHARS, _MIN_MAIN_SHARE * whole.own_chars)
    likely = _MIN_LIKELY_SHARE * whole.own_chars
    for i, part in enumerate(candidates):
        enough = declared if i < len(_DECLARED) else likely
        if part is not None and part is not body and own_chars[part] >= enough:
            return part
    if whole.own_chars >= _MIN_MAIN_CHARS:
        _remove_lists_of_links(body)
    return body


def _is_judged(element: HtmlElement) -> bool:
    if element.tag in _JUDGED_TAGS or "role" in element.attrib:
        return True
    names = _names(element)
    return bool(names) and (_is_no_content(names) or _may_be_content(element, names))


def _names(element: HtmlElement) -> str:
    """Return the names of an element, without an id that is made from the text of the document."""
    names = names_of(element)
    if not (_NO_CONTENT.search(names) or _MAYBE_CONTENT.search(names)):
        return names
    return names_of(element, with_id=False) if _has_id_of_text(element) else names


def _has_id_of_text(element: HtmlElement) -> bool:
    """Whether an id is that of a heading, a term or a section with a heading, such as "login"."""
    if element.tag in _NAMED_BY_TEXT:
        return True
    if element.tag != "section" and " section " not in names_of(element, with_id=False):
        return False
    first = islice(element.iter(), _MAX_BEFORE_HEADING)
    heading = next((one for one in first if one.tag in HEADINGS), None)
    return heading is not None and _slug(short_text(heading)) == _slug(element.get("id", ""))


def _slug(text: str) -> list[str]:
    return re.findall("[a-z]+", text.lower())


def _is_no_content(names: str) -> bool:
    return _NO_CONTENT.search(names) is not None


def _may_be_content(element: HtmlElement, names: str) -> bool:
    return element.tag not in _IN_SENTENCES and _MAYBE_CONTENT.search(names) is not None


def _is_navigation(one: _Measured, whole: _Measured) -> bool:
    element, names = one.element, _names(one.element)
    role = element.get("role")
    if one.counts.has_main or one.own_chars > _NEARLY_ALL * whole.own_chars:
        return False
    if element.tag in _NAVIGATION_TAGS or role in _NAVIGATION_ROLES:
        return True
    if one.own_chars > max(_MIN_MAIN_CHARS, _MIN_MAIN_SHARE * whole.own_chars):
        return False
    # The classes of an article name its categories and tags, too.
    is_named = element.tag != "article" and _is_no_content(names)
    if is_named or (element.tag == "footer" and not one.is_inside):
        return True
    is_suspect = element.tag in _JUDGED_TAGS or role in _SUSPECT_ROLES
    return (
        (is_suspect or _may_be_content(element, names))
        and one.is_linked(_MUCH)
        and not one.counts.has_title
    )


def _measured(body: HtmlElement, is_wanted: _Rule) -> Iterator[_Measured]:
    """Yield the elements of a kind, inner ones first, and at the end the page."""
    open_counts: list[_Counts] = []
    links = mains = 0
    for event, element in iterwalk(body, ("start", "end")):
        tag = element.tag
        is_main = tag in ("main", "article") or element.get("role") == "main"
        if event == "start":
            counts = _Counts()
            open_counts.append(counts)
            links += tag == "a"
            mains += is_main
            counts.add_text(element.text, is_link=links > 0)
            if tag == "a":
                counts.links = 1
                counts.page_links = element.get("href", "").startswith("#")
            counts.has_main = is_main and tag != "article"
            counts.has_title = tag == "h1"
        else:
            links -= tag == "a"
            mains -= is_main
            counts = open_counts.pop()
            if element is body or is_wanted(element):
                yield _Measured(element, counts, is_inside=mains > 0)
            if open_counts:
                open_counts[-1].add(counts)
                open_counts[-1].add_text(element.tail, is_link=links > 0)


def _common(body: HtmlElement, rule: _Rule) -> HtmlElement | None:
    """Return the element that holds all elements to which a rule applies."""
    first = last = None
    for element in body.iter():
        if rule(element):
            first, last = (element if first is None else first), element
    if first is None or last is None:
        return None
    around = {id(one): one for one in (first, *first.iterancestors())}
    return next(one for one in (last, *last.iterancestors()) if id(one) in around)


def _remove_lists_of_links(body: HtmlElement) -> None:
    """Remove lists of links before and after the text, unless they are most of the page."""
    *inner, whole = _measured(body, lambda one: one.tag in _LISTS)
    lists = {
        one.element: one.counts.chars
        for one in inner
        if one.counts.links >= _FEWEST_LINKS
        and one.is_linked(_NEARLY_ALL)
        and not one.counts.has_title
    }
    before: list[HtmlElement] = []
    after: list[HtmlElement] = []
    has_begun = False
    chars = 0
    walk = iterwalk(body, ("start",))
    for _, element in walk:
        if element in lists:
            chars += lists[element]
            (after if has_begun else before).append(element)
            walk.skip_subtree()
        elif element.tag != "a" and len((element.text or "").strip()) >= _FEWEST_TEXT_CHARS:
            has_begun = True
            after.clear()
    if chars <= _MAX_LISTS_SHARE * whole.counts.chars:
        for element in (*before, *after):
            clear(element)


def _remove_contents(body: HtmlElement) -> None:
    """Remove lists of links to parts of the same page.

    The link to a part without a heading is its only name, as with tabs. It is put there.
    """
    targets: dict[str, str] = {}
    for one in list(_measured(body, lambda one: one.tag in ("ul", "ol"))):
        if one.counts.page_links < _FEWEST_PAGE_LINKS or one.counts.page_links < one.counts.links:
            continue
        if one.is_linked(_NEARLY_ALL):
            for link in one.element.iter("a"):
                targets[link.get("href", "")[1:]] = short_text(link)
            before = one.element.getprevious()
            if before is not None and before.tag in HEADINGS:
                clear(before)
            clear(one.element)
    if not targets:
        return
    for element in list(body.iter(*_LABELLED)):
        label = targets.pop(element.get("id", ""), "")
        if label and not any(one.tag in HEADINGS for one in islice(element.iter(), _MAX_SEARCHED)):
            insert_label(element, label)
