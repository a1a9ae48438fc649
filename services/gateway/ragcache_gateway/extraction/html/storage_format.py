"""Turns the elements of Confluence's storage format into those of HTML.

The storage format is what exports and the REST API of the wiki give. Its macros, tasks and links
are elements of their own. Text of a macro without formatting is in a CDATA section, which
``source`` has escaped.
"""

from __future__ import annotations

from typing import Final

from lxml.html import HtmlElement

from ragcache_gateway.extraction.html.tree import clear

_SHOWN_PARAMETERS: Final = frozenset({"title", "key"})
"""Titles of panels, texts of states and keys of tickets; others are settings."""

_NO_TEXT: Final = ("ac:placeholder", "ac:task-id", "ac:task-uuid", "ac:emoticon")
_TAGS: Final = {
    "ac:plain-text-body": "pre",
    "ac:rich-text-body": "div",
    "ac:task-list": "ul",
    "ac:task": "li",
    "ac:layout-section": "div",
    "ac:layout-cell": "div",
}


def to_html(root: HtmlElement) -> None:
    """Replace the elements of the storage format in a tree."""
    for element in list(root.iter("{*}*")):
        tag = element.tag
        if not isinstance(tag, str) or not tag.startswith(("ac:", "ri:")):
            continue
        if tag in _NO_TEXT or (
            tag == "ac:parameter" and element.get("ac:name") not in _SHOWN_PARAMETERS
        ):
            clear(element)
        elif tag == "ac:parameter":
            parent = element.getparent()  # None in an element that was cleared
            is_block = parent is not None and parent.find("ac:rich-text-body") is not None
            element.tag = "p" if is_block else "span"
        elif tag == "ac:task-status":
            element.text = "[x] " if (element.text or "").strip() == "complete" else "[ ] "
            element.tag = "span"
        elif tag == "ri:page" and element.getnext() is None:
            element.text = element.get("ri:content-title")
        element.tag = _TAGS.get(element.tag, element.tag)
