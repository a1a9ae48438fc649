"""Reads the text of web pages."""

from __future__ import annotations

import copy
from typing import Final

import lxml.html
import trafilatura
from lxml.etree import ErrorTypes, LxmlError, XMLSyntaxError, strip_elements
from trafilatura.settings import DEFAULT_CONFIG

from ragcache_gateway.extraction.extracted import (
    ExtractedText,
    UnreadableDocument,
    cleaned,
    metadata_of,
    short_line,
)

_CONFIG: Final = copy.deepcopy(DEFAULT_CONFIG)
# Pages of documentation are often short. Under the default of 250 characters trafilatura would
# return the text of the whole page without its structure.
_CONFIG["DEFAULT"]["MIN_EXTRACTED_SIZE"] = "25"

_NO_TEXT: Final = ("script", "style", "noscript", "template", "head")


def read_html(content: bytes) -> ExtractedText:
    """Read a page without navigation, comments and scripts. Raises UnreadableDocument."""
    text = trafilatura.extract(
        content, output_format="markdown", include_comments=False, config=_CONFIG
    )
    text = cleaned(text or _whole_text(content))
    if not text:
        raise UnreadableDocument("has no text", "send a page with text")
    about = trafilatura.extract_metadata(content, extensive=False)
    if about is None:
        return ExtractedText(text, markdown=True)
    return ExtractedText(
        text,
        markdown=True,
        title=short_line(about.title),
        metadata=metadata_of(author=about.author, date=about.date),
    )


def _whole_text(content: bytes) -> str:
    """Return the text of a fragment or of a page that has no main part."""
    try:
        root = lxml.html.document_fromstring(content)
    except XMLSyntaxError as error:
        # trafilatura hides its errors: this is where a lack of memory shows.
        if error.code == ErrorTypes.ERR_NO_MEMORY:
            raise MemoryError from error
        return ""
    except (LxmlError, ValueError):
        return ""
    strip_elements(root, *_NO_TEXT, with_tail=False)
    lines = (" ".join(line.split()) for line in root.itertext())
    return "\n".join(line for line in lines if line)
