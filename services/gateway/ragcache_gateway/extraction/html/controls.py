"""Replaces what a page shows by its controls: accordions, tabs, check boxes.

Panels that a click shows are in the page already. This module keeps the words of the buttons that
show them, and removes buttons that only do something, such as Copy.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from lxml.html import HtmlElement

from ragcache_gateway.extraction.html.tree import (
    HEADINGS,
    clear,
    has_text,
    insert_label,
    names_of,
    short_text,
)

_SHOWS_PANEL: Final = ("aria-expanded", "aria-controls", "data-toggle", "data-bs-toggle")
_PANEL_NAMES: Final = ("accord", "collaps", "expand", "faq", "question", "toggle", "spoiler", "tab")
_SENTENCE_TAGS: Final = frozenset({"p", "li", "td", "th", "dd", "span", "strong", "em", "b"})
_FEWEST_WORDS: Final = 4
"""A button with fewer words only does something, such as *Copy* or *Add to cart*."""

_NO_TEXT: Final = frozenset(
    {
        *("script", "style", "template", "head", "iframe", "object", "audio", "video", "canvas"),
        *("noscript", "svg", "select", "textarea", "datalist", "dialog", "map", "meter"),
        *("progress", "rp"),
    }
)


def replace_controls(root: HtmlElement) -> None:
    """Replace buttons, tabs and check boxes by their words, and remove elements without text."""
    _label_panels(root)
    for element in list(root.iter()):
        tag = element.tag
        if tag == "script" and element.get("type", "").startswith("math/tex"):
            element.tag = "span"
            element.text = f"${element.text}$" if has_text(element.text) else None
        elif tag in _NO_TEXT:
            clear(element)
        elif tag == "button" or element.get("role") == "button":
            _replace_button(element)
        elif tag == "input":
            _replace_input(element)
        elif tag == "time" and not has_text(element.text) and not len(element):
            element.text = element.get("datetime")


def _replace_button(button: HtmlElement) -> None:
    parent = button.getparent()
    around = parent.tag if parent is not None else ""
    if around in HEADINGS and _is_after_text(button, parent):
        clear(button)
    elif around in HEADINGS or around in ("summary", "dt"):
        button.tag = "span"
    elif _shows_panel(button):
        button.tag = "summary"
    elif around in _SENTENCE_TAGS and _is_inside_sentence(button, parent):
        button.tag = "span"
    else:
        text = short_text(button)
        if len(text.split()) >= _FEWEST_WORDS or text.endswith(("?", "？")):  # noqa: RUF001
            button.tag = "summary"
        else:
            clear(button)


def _is_after_text(button: HtmlElement, parent: HtmlElement) -> bool:
    before = button.getprevious()
    if before is None:
        return has_text(parent.text)
    return has_text(before.tail) or bool(short_text(before))


def _is_inside_sentence(button: HtmlElement, parent: HtmlElement) -> bool:
    return _is_after_text(button, parent) or has_text(button.tail)


def _shows_panel(button: HtmlElement) -> bool:
    if any(name in button.attrib for name in _SHOWS_PANEL):
        return True
    names = names_of(button)
    if any(name in names for name in _PANEL_NAMES):
        return True
    panel = button.getnext()
    return panel is not None and _is_hidden(panel)


def _is_hidden(element: HtmlElement) -> bool:
    """Whether a page does not show an element before a click."""
    style = element.get("style", "").replace(" ", "").lower()
    hides = "display:none" in style or "visibility:hidden" in style
    return hides or "hidden" in element.attrib or element.get("aria-hidden") == "true"


def _replace_input(control: HtmlElement) -> None:
    parent = control.getparent()
    if control.get("type") == "checkbox" and parent is not None and parent.tag in ("li", "p"):
        control.text = "[x] " if "checked" in control.attrib else "[ ] "
        control.tag = "span"


def _label_panels(root: HtmlElement) -> None:
    """Move the words of each tab to the panel that it shows.

    A tab names its panel, or the panels follow in the order of their tabs.
    """
    by_id: dict[str, HtmlElement] = {}
    waiting: deque[HtmlElement] = deque()
    for element in list(root.iter()):
        role = element.get("role")
        names = element.get("class", "")
        if role == "tablist" or "tabbed-labels" in names:
            waiting.clear()
        elif role == "tab" or element.get("data-toggle", element.get("data-bs-toggle")) == "tab":
            target = element.get("aria-controls") or _target_of(element)
            if target:
                by_id[target] = element
            waiting.append(element)
        elif element.tag == "label" and (parent := element.getparent()) is not None:
            if "tabbed-labels" in parent.get("class", ""):
                waiting.append(element)
        elif role == "tabpanel" or "tabbed-block" in names or element.get("id") in by_id:
            tab = by_id.pop(element.get("id", ""), None)
            if tab is None and waiting:
                tab = waiting.popleft()
            if tab is not None and (label := short_text(tab)):
                insert_label(element, label)
                clear(tab)


def _target_of(tab: HtmlElement) -> str:
    href: str = tab.get("href") or tab.get("data-bs-target") or tab.get("data-target") or ""
    return href[1:] if href.startswith("#") else ""
