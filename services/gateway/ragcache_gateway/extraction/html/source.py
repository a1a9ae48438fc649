"""Parses the bytes of a page: its encoding, its CDATA sections and its self-closing elements."""

from __future__ import annotations

import codecs
import contextlib
import html
import re
from typing import Final

import lxml.html
from lxml.etree import ErrorTypes, LxmlError, XMLSyntaxError

from ragcache_gateway.extraction.encodings import MARKS, decode_guessed
from ragcache_gateway.extraction.extracted import UnreadableDocument

_DECLARED: Final = re.compile(rb"""(?:charset|encoding)\s{0,8}=\s{0,8}["']?([\w.:-]{1,40})""", re.I)
_DECLARED_WITHIN: Final = 2048
_OF_PAGES: Final = re.compile(r"utf|iso|cp\d|koi8|gb|big5|euc|shift|mac|hz|ascii|tis|johab")
"""Other codecs of Python, such as punycode, are no encodings of pages, and may take long."""
_SEVEN_BITS: Final = ("iso2022", "hz")
# What browsers take these to be.
_WINDOWS: Final = {"iso8859-1": "cp1252", "ascii": "cp1252"}
# HTML has no CDATA outside SVG, and would end the section at its first ">".
_CDATA_BEGIN: Final = "<![CDATA["
_CDATA_END: Final = "]]>"
# HTML reads <ac:link/> as a start tag, and takes all after it as its content.
_SELF_CLOSING: Final = re.compile(r"<((?:ac|ri|at):[\w.-]{1,64}|time)\b([^<>]*)/>")


def parse(page: str) -> tuple[lxml.html.HtmlElement | None, bool]:
    """Parse the characters of a page.

    Returns:
        The root, or None if there is no element, and whether the parser left out a part.

    Raises:
        MemoryError: The page needs more memory than there is.
    """
    text = _without_cdata(page.replace("\0", ""))
    text = _SELF_CLOSING.sub(r"<\1\2></\1>", text)
    parser = lxml.html.HTMLParser(
        encoding="utf-8", huge_tree=True, remove_comments=True, remove_pis=True
    )
    try:
        root = lxml.html.document_fromstring(text.encode("utf-8", "replace"), parser=parser)
    except XMLSyntaxError as error:
        if error.code == ErrorTypes.ERR_NO_MEMORY:
            raise MemoryError from error
        return None, False
    except (LxmlError, ValueError):
        return None, False
    if any(error.type == ErrorTypes.ERR_NO_MEMORY for error in parser.error_log):
        raise MemoryError
    return root, any(error.level_name == "FATAL" for error in parser.error_log)


def decode(content: bytes) -> tuple[str, str | None]:
    """Decode a page by its mark, its declaration, or else by a guess.

    Returns:
        The characters, and the encoding that was assumed; None: the page itself shows it.
    """
    for mark, encoding in MARKS:
        if content.startswith(mark):
            return content[len(mark) :].decode(encoding, "replace"), None
    if b"\0" in content[:2]:
        encoding = "utf-16-le" if content[1:2] == b"\0" else "utf-16-be"
        return content.decode(encoding, "replace"), None
    declared = _declared(content)
    # A page that is valid as UTF-8 is UTF-8, also if it declares another encoding.
    seven_bits = declared.startswith(_SEVEN_BITS)
    for encoding in (declared, "utf-8") if seven_bits else ("utf-8", declared):
        try:
            return content.decode(encoding), None
        except UnicodeError:
            continue
    if declared == "utf-8":
        with contextlib.suppress(UnreadableDocument):
            return decode_guessed(content)
    return content.decode(declared, "replace"), declared


def _declared(content: bytes) -> str:
    """Return the name of the encoding that a page declares, or utf-8."""
    found = _DECLARED.search(content[:_DECLARED_WITHIN])
    try:
        name = codecs.lookup(found[1].decode("ascii", "replace")).name if found else "utf-8"
    except (LookupError, ValueError):
        return "utf-8"
    # What is declared in ASCII is in none of these, as with browsers.
    if name.startswith(("utf-7", "utf-16", "utf-32")) or not _OF_PAGES.match(name):
        return "utf-8"
    return _WINDOWS.get(name, name)


def _without_cdata(text: str) -> str:
    """Return a page with the characters of its CDATA sections escaped."""
    before, *sections = text.split(_CDATA_BEGIN)
    parts = [before]
    for section in sections:
        inside, found, after = section.partition(_CDATA_END)
        parts += [html.escape(inside, quote=False), after] if found else [_CDATA_BEGIN, section]
    return "".join(parts)
