"""What all steps ask of an element."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice
from typing import Final

from lxml.html import HtmlElement

HEADINGS: Final = {f"h{level}": level for level in range(1, 7)}

_MAX_NAME_CHARS: Final = 500
_MAX_TEXTS: Final = 64
_STATE: Final = re.compile(r"\b(?:has|is|no|with|js|hide|show|without|can)[-_][\w-]*")
"""A name such as has-sidebar tells of another element."""

_WORD: Final = re.compile(r"[A-Z]?[a-z]+")


def names_of(element: HtmlElement, *, with_id: bool = True) -> str:
    """Return the words of an element's class and id in lower case, each after a space."""
    names = f"{element.get('class', '')} {element.get('id', '') if with_id else ''}"
    if names == " ":
        return ""
    found = _WORD.findall(_STATE.sub("", names[:_MAX_NAME_CHARS]))
    return " " + " ".join(found).lower() + " "


def short_text(element: HtmlElement) -> str:
    """Return the text of an element that has little of it."""
    return joined(islice(element.itertext(), _MAX_TEXTS))


def joined(texts: Iterable[str]) -> str:
    """Return texts with one space for each white space."""
    return " ".join("".join(texts).split())


def clear(element: HtmlElement) -> None:
    """Remove what is in an element. The element stays, so that texts around it stay apart."""
    element.clear(keep_tail=True)


def has_text(text: str | None) -> bool:
    """Whether a text of an element is not only white space."""
    return bool(text) and not str(text).isspace()


def insert_label(element: HtmlElement, label: str) -> None:
    """Insert a paragraph before what is in an element."""
    paragraph = element.makeelement("summary")
    paragraph.text, paragraph.tail, element.text = label, element.text, None
    element.insert(0, paragraph)
