"""Reads the text of PDF files, page by page.

The text of a page begins after a form feed, so that a chunk knows its pages. A page that could not
be read is empty, and a warning names it.
"""

from __future__ import annotations

import ctypes
import functools
import gzip
import itertools
import json
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Final

import pypdfium2
from pypdfium2 import raw

from ragcache_gateway.extraction.extracted import (
    ExtractedText,
    UnreadableDocument,
    cleaned,
    metadata_of,
    numbered,
    short_line,
)
from ragcache_gateway.extraction.hyphens import HyphenChoice, words_of
from ragcache_gateway.extraction.page_lines import (
    LAST_HYPHEN,
    Box,
    Line,
    continues_row,
    in_columns,
    may_mix_columns,
    with_fields,
    without_running_lines,
)
from ragcache_gateway.extraction.pdf_fields import form_values

_PASSWORD: Final = raw.FPDF_ERR_PASSWORD
_HYPHEN: Final = "\ufffe"
"""PDFium's mark of a hyphen at the end of a line, in place of the line break, too."""

_LINE = re.compile(rf"[^\r\n{_HYPHEN}]+{_HYPHEN}?|{_HYPHEN}")
_SENTENCE_END = re.compile(r"[.!?:;…][\"'”’)\]]*\Z")  # noqa: RUF001

_BULLETS: Final = dict.fromkeys(map(ord, "\uf0b7\uf0a7\uf0d8\uf0a8\uf076\uf02d\uf06c\uf06e"), "•")
_BULLETS[0xF0FC] = "✓"
"""Characters of Symbol and Wingdings, which stand before items of lists."""

_PRIVATE = re.compile("[\ue000-\uf8ff\U000f0000-\U0010ffff\ufffd]")
_MAX_UNREADABLE_SHARE: Final = 0.25
_SAMPLED_CHARS: Final = 400
_MIN_PLAUSIBLE_SHARE: Final = 0.85
_VOWEL_SHARES: Final = (0.25, 0.55)

_FEW_CHARS: Final = 200
_MOST_OF_PAGE: Final = 0.6
_MIN_IMAGE_SHARE: Final = 0.02
_MIN_PATHS: Final = 50
"""Paths of a page without text that are probably letters or a drawing."""

OCR: Final = "recognize the text first (OCR), for example with ocrmypdf"


@dataclass(frozen=True, slots=True)
class _PdfPage:
    """What was found on a page.

    Args:
        num_lost: Characters without a meaning, which were left out.
        is_unreadable: Most characters have no meaning, so that the lines are left out.
        has_image: An image that may have text covers the page, or is all that it has.
    """

    lines: Sequence[Line]
    height: float
    num_lost: int = 0
    is_unreadable: bool = False
    has_image: bool = False


def read_pdf(content: bytes) -> ExtractedText:
    """Read the text of every page. Raises UnreadableDocument."""
    document = _open(content)
    try:
        pages = list(_pages(document))
        if not any(page.lines for page in pages):
            raise UnreadableDocument(*_no_text(pages))
        about = document.get_metadata_dict()
        metadata = metadata_of(author=about.get("Author"), subject=about.get("Subject"))
        return ExtractedText(
            _text_of(pages),
            markdown=False,
            title=short_line(about.get("Title")),
            metadata=metadata,
            warnings=tuple(_warnings(pages, document.get_formtype())),
        )
    except pypdfium2.PdfiumError as error:
        raise UnreadableDocument(f"is damaged ({error})", "save the PDF again") from error
    finally:
        document.close()


def _open(content: bytes) -> pypdfium2.PdfDocument:
    try:
        return pypdfium2.PdfDocument(content)
    except pypdfium2.PdfiumError as error:
        if error.err_code == _PASSWORD:
            raise UnreadableDocument("is an encrypted PDF", "save it without a password") from error
        raise UnreadableDocument("is not a PDF, or is damaged", "save the PDF again") from error


def _no_text(pages: Sequence[_PdfPage]) -> tuple[str, str]:
    """Return problem and fix for a PDF without text."""
    unreadable = [number for number, page in enumerate(pages, 1) if page.is_unreadable]
    if unreadable:
        where = numbered("page", unreadable)
        return f"has fonts without a mapping to characters ({where})", OCR
    images = [number for number, page in enumerate(pages, 1) if page.has_image]
    if images:
        return f"has only images of text ({numbered('page', images)})", OCR
    return "is a PDF without text", "send one with text"


def _warnings(pages: Sequence[_PdfPage], form_type: int) -> Iterator[str]:
    images: list[int] = []
    beside: list[int] = []
    unreadable: list[int] = []
    for number, page in enumerate(pages, 1):
        if page.is_unreadable:
            unreadable.append(number)
        elif page.has_image:
            (beside if page.lines else images).append(number)
    if images:
        yield f"not read, since without text: {numbered('page', images)} (images); {OCR}"
    if unreadable:
        where = numbered("page", unreadable)
        yield f"not read, since fonts have no mapping to characters: {where}; {OCR}"
    if beside:
        yield f"the image that covers {numbered('page', beside)} was not read; {OCR}"
    lost = [number for number, page in enumerate(pages, 1) if page.num_lost]
    if lost:
        count = sum(page.num_lost for page in pages)
        yield f"{count} characters without a meaning were left out on {numbered('page', lost)}"
    if form_type == raw.FORMTYPE_XFA_FULL:
        yield "the XFA form was not read; print it to a PDF first"


def _pages(document: pypdfium2.PdfDocument) -> Iterator[_PdfPage]:
    if document.get_formtype() != raw.FORMTYPE_NONE:
        document.init_forms()
    for page in document:
        text_page = page.get_textpage()
        try:
            yield _read_page(document, page, text_page)
        finally:
            text_page.close()
            page.close()


def _read_page(
    document: pypdfium2.PdfDocument, page: pypdfium2.PdfPage, text_page: pypdfium2.PdfTextPage
) -> _PdfPage:
    height = page.get_height()
    text = text_page.get_text_range().translate(_BULLETS)
    has_image = len(text) < _FEW_CHARS and _has_unread_image(page, is_empty=not text.strip())
    if _is_unreadable(text_page, text):
        return _PdfPage((), height, is_unreadable=True, has_image=has_image)
    values = form_values(document, page)
    runs = [Box(*text_page.get_rect(i)) for i in range(text_page.count_rects())]
    lines = list(_lines(text_page, text, with_characters=bool(values)))
    if may_mix_columns(lines, runs):
        # The positions of all characters take much longer than those of lines.
        lines = in_columns(list(_lines(text_page, text, with_characters=True)), runs)
    if values:
        lines = with_fields(lines, values)
    return _PdfPage(lines, height, num_lost=len(_PRIVATE.findall(text)), has_image=has_image)


def _lines(text_page: pypdfium2.PdfTextPage, text: str, *, with_characters: bool) -> Iterator[Line]:
    """Yield the lines of a page in the order of the file."""
    # PDFium counts in UTF-16.
    starts = None
    if any(character > "\uffff" for character in text):
        starts = list(itertools.accumulate((1 + (one > "\uffff") for one in text), initial=0))

    def box_at(position: int) -> Box:
        index = raw.FPDFText_GetCharIndexFromTextIndex(
            text_page, position if starts is None else starts[position]
        )
        return _character_box(text_page, index)

    for match in _LINE.finditer(text):
        whole = match[0]
        shown = whole.removesuffix(_HYPHEN)
        is_broken = len(shown) < len(whole)
        if not is_broken and (hyphen := LAST_HYPHEN.search(shown)):
            shown, is_broken = shown[: hyphen.start()], True
        stripped = shown.strip()
        if not stripped and not is_broken:
            continue
        start = match.start() + len(shown) - len(shown.lstrip())
        first, last = box_at(start), box_at(start + max(len(stripped) - 1, 0))
        boxes = [box_at(start + i) for i in range(len(stripped))] if with_characters else []
        box = Box(
            min(first.left, last.left),
            min(first.bottom, last.bottom),
            max(first.right, last.right),
            max(first.top, last.top),
        )
        lefts, rights = (one.left for one in boxes), (one.right for one in boxes)
        yield Line(stripped, box, is_broken, tuple(lefts), tuple(rights))


def _character_box(text_page: pypdfium2.PdfTextPage, index: int) -> Box:
    found = raw.FS_RECTF()
    raw.FPDFText_GetLooseCharBox(text_page, index, ctypes.byref(found))
    return Box(found.left, found.bottom, found.right, found.top)


def _text_of(pages: Sequence[_PdfPage]) -> str:
    """Return the text of the pages, with a form feed between two.

    A page that begins in the middle of a sentence follows without an empty line.
    """
    kept = without_running_lines([page.lines for page in pages], [page.height for page in pages])
    choice = HyphenChoice(words_of(_whole_lines(kept)), _known_words)
    texts: list[str] = []
    is_broken = False
    last = -1  # the page that has the last text
    for lines in kept:
        text = ""
        for before, line in itertools.pairwise((None, *lines)):
            assert line is not None
            shown = _PRIVATE.sub("", cleaned(line.text)).strip()
            if not is_broken:
                joint = " " if before is not None and continues_row(line, before) else "\n"
                text = f"{text}{joint}{shown}" if text else shown
            elif text:
                text = choice.joined(text, shown)
            else:
                # The rest of the word goes to the page where it begins.
                word, _, text = shown.partition(" ")
                texts[last] = choice.joined(texts[last], word)
            is_broken = line.is_broken
        texts.append(text)
        last = len(texts) - 1 if text else last
    if is_broken:
        texts[last] += "-"
    return _with_page_breaks(texts)


def _with_page_breaks(pages: Sequence[str]) -> str:
    text = pages[0]
    for page in pages[1:]:
        continues = page[:1].islower() and not _SENTENCE_END.search(text[-8:])
        text += f"\f{page}" if continues else f"\n\f{page}"
    return text


def _whole_lines(pages: Sequence[Sequence[Line]]) -> Iterator[str]:
    """Yield the lines without the parts of broken words."""
    is_broken = False
    for line in itertools.chain.from_iterable(pages):
        text = line.text.partition(" ")[2] if is_broken else line.text
        is_broken = line.is_broken
        yield text.rpartition(" ")[0] if is_broken else text


@functools.cache
def _known_words(language: str) -> Container[str]:
    file = resources.files("spellchecker").joinpath("resources", f"{language}.json.gz")
    return frozenset(json.loads(gzip.decompress(file.read_bytes())))


def _is_unreadable(text_page: pypdfium2.PdfTextPage, text: str) -> bool:
    """Whether most characters of a page have no meaning, or not that of the text layer."""
    solid = "".join(text.split())
    if not solid:
        return False
    if len(_PRIVATE.findall(solid)) > _MAX_UNREADABLE_SHARE * len(solid):
        return True
    count = text_page.count_chars()
    sampled = range(0, count, max(count // _SAMPLED_CHARS, 1))
    errors = sum(raw.FPDFText_HasUnicodeMapError(text_page, i) == 1 for i in sampled)
    # Some files have no mapping, and the numbers of their glyphs are those of Unicode.
    return errors > _MAX_UNREADABLE_SHARE * len(sampled) and not _is_plausible(text)


def _is_plausible(text: str) -> bool:
    """Whether a text looks like one in Latin letters."""
    words = text.split()
    letters = [one for one in text.casefold() if one.isalpha()]
    if not letters or len(letters) < _MIN_PLAUSIBLE_SHARE * sum(map(len, words)):
        return False
    vowels = sum(one in "aeiouyäöüéèàáíóú" for one in letters) / len(letters)
    return _VOWEL_SHARES[0] <= vowels <= _VOWEL_SHARES[1] and len(letters) / len(words) < 12


def _has_unread_image(page: pypdfium2.PdfPage, *, is_empty: bool) -> bool:
    """Whether a page with little text has an image that may have more.

    Args:
        is_empty: The page has no text. Drawings count then, too.
    """
    area = page.get_width() * page.get_height()
    kinds = (raw.FPDF_PAGEOBJ_IMAGE, raw.FPDF_PAGEOBJ_PATH)
    num_paths, covered = 0, 0.0
    for shape in page.get_objects(filter=kinds if is_empty else kinds[:1], max_depth=2):
        if shape.type == raw.FPDF_PAGEOBJ_PATH:
            num_paths += 1
        else:
            left, bottom, right, top = shape.get_bounds()
            covered += (right - left) * (top - bottom)
    least = _MIN_IMAGE_SHARE if is_empty else _MOST_OF_PAGE
    return covered >= least * area or num_paths >= _MIN_PATHS
