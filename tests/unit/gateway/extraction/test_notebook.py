"""A notebook becomes Markdown: texts, code in fences, and the text of outputs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ragcache_gateway.extraction.extracted import ExtractedText, UnreadableDocument
from ragcache_gateway.extraction.notebook import fence, read_notebook


def notebook(*cells: dict[str, Any], language: str = "python") -> ExtractedText:
    about = {"language_info": {"name": language}}
    content = {"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 5}
    return read_notebook(json.dumps(content).encode())


def code(source: str | list[str], *outputs: dict[str, Any]) -> dict[str, Any]:
    return {"cell_type": "code", "metadata": {}, "source": source, "outputs": list(outputs)}


def test_texts_and_code_follow_each_other() -> None:
    text = {"cell_type": "markdown", "metadata": {}, "source": ["# Plan\n", "First."]}
    read = notebook(text, code(["x = 1\n", "print(x)"]), code(""), language="R")
    assert read.text == "# Plan\nFirst.\n\n```r\nx = 1\nprint(x)\n```"
    assert read.markdown


def test_outputs_of_text_follow_their_code() -> None:
    read = notebook(
        code(
            "run()",
            {"output_type": "stream", "name": "stdout", "text": ["\x1b[31mred\x1b[0m\n", "two\n"]},
            {"output_type": "execute_result", "data": {"text/plain": ["   a\n", "0  1"]}},
            {"output_type": "error", "ename": "KeyError", "evalue": "'b'", "traceback": ["..."]},
        )
    )
    assert read.text.endswith("Output:\n\n```\nred\ntwo\n   a\n0  1\nKeyError: 'b'\n```")
    assert read.warnings == ()


def test_what_is_left_out_of_outputs_is_said() -> None:
    figure = {"image/png": "aGk=", "text/plain": ["<Figure size 640x480>"]}
    read = notebook(
        code("plot()", {"output_type": "display_data", "data": figure}),
        code("log()", {"output_type": "stream", "text": "x" * 5000}),
    )
    assert "Figure" not in read.text
    assert read.text.count("x") == 2000
    assert read.warnings == (
        "outputs without text left out: 1",
        "outputs cut to 2,000 characters for each cell: 1",
    )


def test_an_earlier_format_is_read() -> None:
    cells = [
        {"cell_type": "heading", "level": 2, "source": "Plan"},
        {"cell_type": "code", "input": "1 + 1", "outputs": [{"output_type": "pyout", "text": "2"}]},
    ]
    content = {"worksheets": [{"cells": cells}], "metadata": {}, "nbformat": 3}
    read = read_notebook(json.dumps(content).encode())
    assert read.text == "## Plan\n\n```python\n1 + 1\n```\n\nOutput:\n\n```\n2\n```"


def test_a_fence_is_longer_than_those_in_the_code() -> None:
    assert fence("```\nx\n````", "md") == "`````md\n```\nx\n````\n`````"


@pytest.mark.parametrize("content", [b"{}", b"[]", b"no json", b'{"cells": [1]}', b'{"cells": []}'])
def test_what_is_no_notebook_is_refused(content: bytes) -> None:
    with pytest.raises(UnreadableDocument):
        read_notebook(content)


def test_an_output_without_text_is_counted() -> None:
    output = {"output_type": "display_data", "data": {"text/html": "<b>42</b>"}}
    cell = {"cell_type": "code", "source": "x", "outputs": [output]}
    assert read_notebook(json.dumps({"cells": [cell]}).encode()).warnings
