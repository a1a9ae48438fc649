"""Returns the title of a Markdown or HTML heading as plain text.

Anchors, attributes, images and tags around a title are no part of it.
"""

from __future__ import annotations

import html
import re
from typing import Final

MAX_TITLE_CHARS: Final = 200

# Only names of tags: "List<String>" is a title. Text in backticks comes first and stays.
_MARKUP: Final = re.compile(
    r"(`[^`]*`)"
    r"|!\[(?P<alt>[^\[\]]*)\]\([^()]*\)"
    r"|<img\b[^<>]*?\balt=[\"'](?P<tag_alt>[^\"'<>]*)[\"'][^<>]*>"
    r"|</?(?:a|abbr|b|big|br|center|code|del|div|em|font|h[1-6]|i|img|ins|kbd|mark|p|picture|s"
    r"|small|source|span|strong|sub|sup|svg|u)(?:\s[^<>]*)?/?>",
    re.IGNORECASE | re.DOTALL,
)
# "{#id}", "{.class}" and "{: #id}" after a title.
_ATTRIBUTES: Final = re.compile(r"\{\s*(?:[#.][\w:.-]|:|/\*)[^{}]*\}")
_PERMALINK: Final = re.compile(
    r"\[[^\[\]\w]{0,4}\]\(#[^()]*\)|<a\s[^<>]*>[^<>\w]{0,4}</a>|¶\s*$", re.IGNORECASE
)
_LINK: Final = re.compile(r"\[([^\[\]]+)\]\([^()\s]*(?:\s[^()]*)?\)")
_ESCAPE: Final = re.compile(r"\\([!-/:-@\[-`{-~])")


def title_of(heading: str) -> str | None:
    """Return the title of a heading, or None if it has none or a longer one than a title is.

    Args:
        heading: Its text without ``#`` marks, of bounded length.
    """
    text = _PERMALINK.sub("", heading).rstrip()
    if _ATTRIBUTES.fullmatch(text, max(0, begin := text.rfind("{"))):
        text = text[:begin]
    title = _plain(_MARKUP.sub(_without_images, text))
    # A heading may have no text but a logo.
    title = title or _plain(_MARKUP.sub(_alternative_text, text))
    return title if 0 < len(title) <= MAX_TITLE_CHARS else None


def _without_images(match: re.Match[str]) -> str:
    return match.group(1) or ""


def _alternative_text(match: re.Match[str]) -> str:
    return match.group(1) or match.group("alt") or match.group("tag_alt") or ""


def _plain(text: str) -> str:
    text = _ESCAPE.sub(r"\1", _LINK.sub(r"\1", text))
    return " ".join(html.unescape(text).split())
