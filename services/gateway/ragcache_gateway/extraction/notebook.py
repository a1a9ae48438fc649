"""Reads a Jupyter notebook as Markdown: its texts, its code, and the text of its outputs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from ragcache_gateway.extraction.encodings import decoded
from ragcache_gateway.extraction.extracted import ExtractedText, UnreadableDocument, cleaned

_MAX_OUTPUT_CHARS: Final = 2000
"""Of all outputs of one cell. Logs and tables of data may be very long."""
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_DAMAGED: Final = ("is no notebook", "save it again with Jupyter")


def read_notebook(content: bytes) -> ExtractedText:
    """Read the cells of a notebook. Raises UnreadableDocument."""
    text, warnings = decoded(content)
    try:
        notebook = json.loads(text)
        reader = _CellReader(_language(notebook))
        blocks = [block for cell in _cells(notebook) for block in reader.blocks(cell)]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise UnreadableDocument(*_DAMAGED) from error
    found = cleaned("\n\n".join(blocks))
    if not found:
        raise UnreadableDocument("has no text", "send a notebook with text or code")
    return ExtractedText(found, markdown=True, warnings=(*warnings, *reader.warnings()))


def fence(code: str, language: str = "") -> str:
    """Return a block of code, between marks that the code does not have."""
    longest = max(map(len, re.findall(r"^\s*(`{3,})", code, re.MULTILINE)), default=2)
    mark = "`" * (longest + 1)
    return f"{mark}{language}\n{code.strip(chr(10))}\n{mark}"


def _cells(notebook: Any) -> list[dict[str, Any]]:
    if "cells" in notebook:
        return list(notebook["cells"])
    # Format 3
    return [cell for sheet in notebook["worksheets"] for cell in sheet["cells"]]


def _language(notebook: Any) -> str:
    about = notebook.get("metadata", {})
    named = about.get("language_info", {}).get("name") or about.get("kernelspec", {}).get(
        "language", "python"
    )
    return str(named).lower()


class _CellReader:
    """Reads cells, and counts what it leaves out."""

    def __init__(self, language: str) -> None:
        self._language = language
        self._num_images = 0
        self._num_cut = 0

    def warnings(self) -> Iterator[str]:
        """Yield what was left out."""
        if self._num_images:
            yield f"outputs without text left out: {self._num_images}"
        if self._num_cut:
            limit = f"{_MAX_OUTPUT_CHARS:,} characters"
            yield f"outputs cut to {limit} for each cell: {self._num_cut}"

    def blocks(self, cell: dict[str, Any]) -> Iterator[str]:
        """Yield the blocks of a cell."""
        source = _joined(cell.get("source", cell.get("input", "")))
        kind = cell["cell_type"]
        if kind == "code":
            if source.strip():
                yield fence(source, self._language)
            yield from self._outputs(cell.get("outputs", []))
        elif kind == "heading":  # format 3
            yield f"{'#' * int(cell.get('level', 1))} {source}"
        elif source.strip():
            yield source

    def _outputs(self, outputs: list[dict[str, Any]]) -> Iterator[str]:
        texts = [self._output(one) for one in outputs]
        text = _ESCAPE.sub("", "\n".join(filter(None, texts)))
        if len(text) > _MAX_OUTPUT_CHARS:
            self._num_cut += 1
            text = text[:_MAX_OUTPUT_CHARS]
        if text:
            yield "Output:\n\n" + fence(text)

    def _output(self, output: dict[str, Any]) -> str:
        if output.get("output_type") in ("error", "pyerr"):
            return f"{output.get('ename', 'error')}: {output.get('evalue', '')}"
        data = output.get("data", output)
        found = data.get("text/plain", data.get("text/markdown", data.get("text", "")))
        if any(name.startswith(("image/", "png", "jpeg", "svg")) for name in data):
            self._num_images += 1
            return ""  # its text only names the object
        text = _joined(found).strip("\n")
        if not text and "data" in output and data:
            self._num_images += 1
        return text


def _joined(source: str | list[str]) -> str:
    return source if isinstance(source, str) else "".join(source)
