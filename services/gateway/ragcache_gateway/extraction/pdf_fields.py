"""Reads what was filled in on a page of a PDF: fields of forms, and text put on it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any, Final

import pypdfium2
from pypdfium2 import raw

from ragcache_gateway.extraction.page_lines import Box, FieldValue

_MAX_BYTES: Final = 1 << 16
_HIDDEN: Final = raw.FPDF_ANNOT_FLAG_HIDDEN | raw.FPDF_ANNOT_FLAG_NOVIEW
_PASSWORD: Final = 1 << 13
_MARKED: Final = (raw.FPDF_FORMFIELD_CHECKBOX, raw.FPDF_FORMFIELD_RADIOBUTTON)
_WRITTEN: Final = (
    raw.FPDF_FORMFIELD_TEXTFIELD,
    raw.FPDF_FORMFIELD_COMBOBOX,
    raw.FPDF_FORMFIELD_LISTBOX,
)


def form_values(document: pypdfium2.PdfDocument, page: pypdfium2.PdfPage) -> list[FieldValue]:
    """Return the values on a page, without hidden ones and passwords."""
    found: list[FieldValue] = []
    for i in range(raw.FPDFPage_GetAnnotCount(page)):
        annotation = raw.FPDFPage_GetAnnot(page, i)
        if not annotation:
            continue
        try:
            found += _values(document, annotation)
        finally:
            raw.FPDFPage_CloseAnnot(annotation)
    return found


def _values(document: pypdfium2.PdfDocument, annotation: Any) -> Iterator[FieldValue]:
    if raw.FPDFAnnot_GetFlags(annotation) & _HIDDEN:
        return
    kind = raw.FPDFAnnot_GetSubtype(annotation)
    name = text = ""
    if kind == raw.FPDF_ANNOT_FREETEXT:
        text = _string(raw.FPDFAnnot_GetStringValue, annotation, b"Contents")
    elif kind == raw.FPDF_ANNOT_WIDGET and document.formenv is not None:
        form = document.formenv
        text = _field_text(form, annotation)
        name = _string(raw.FPDFAnnot_GetFormFieldAlternateName, form, annotation)
        name = name or _string(raw.FPDFAnnot_GetFormFieldName, form, annotation)
    if text:
        area = raw.FS_RECTF()
        raw.FPDFAnnot_GetRect(annotation, ctypes.byref(area))
        box = Box(area.left, area.bottom, area.right, area.top)
        yield FieldValue(" ".join(name.split()), " ".join(text.split()), box)


def _field_text(form: Any, annotation: Any) -> str:
    kind = raw.FPDFAnnot_GetFormFieldType(form, annotation)
    if kind in _MARKED:
        return "[x]" if raw.FPDFAnnot_IsChecked(form, annotation) else "[ ]"
    is_secret = raw.FPDFAnnot_GetFormFieldFlags(form, annotation) & _PASSWORD
    if kind not in _WRITTEN or (is_secret and kind == raw.FPDF_FORMFIELD_TEXTFIELD):
        return ""
    if kind == raw.FPDF_FORMFIELD_TEXTFIELD:
        return _string(raw.FPDFAnnot_GetFormFieldValue, form, annotation)
    count = raw.FPDFAnnot_GetOptionCount(form, annotation)
    labels = [
        _string(raw.FPDFAnnot_GetOptionLabel, form, annotation, i)
        for i in range(count)
        if raw.FPDFAnnot_IsOptionSelected(form, annotation, i)
    ]
    return ", ".join(labels) or _string(raw.FPDFAnnot_GetFormFieldValue, form, annotation)


def _string(get: Callable[..., int], *arguments: Any) -> str:
    """Return the text that a function of PDFium writes as UTF-16."""
    size = min(get(*arguments, None, 0), _MAX_BYTES)
    if size <= 2:  # only the final zero
        return ""
    buffer = ctypes.create_string_buffer(size)
    pointer = ctypes.cast(buffer, ctypes.POINTER(raw.FPDF_WCHAR))
    get(*arguments, pointer, size)
    return buffer.raw.decode("utf-16-le", "replace").partition("\0")[0]
