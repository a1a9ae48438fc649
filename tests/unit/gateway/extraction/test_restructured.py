"""reStructuredText becomes Markdown, with the directives and roles of Sphinx."""

from __future__ import annotations

import textwrap

import pytest
from docutils.parsers.rst import directives, roles

from ragcache_gateway.extraction.extracted import UnreadableDocument
from ragcache_gateway.extraction.restructured import read_restructured


def text_of(source: str) -> str:
    return read_restructured(textwrap.dedent(source).encode()).text


def test_titles_become_headings() -> None:
    source = """
        =====
        Guide
        =====

        Intro.

        Install
        -------

        Step one.

        Use
        ---
        """
    assert text_of(source) == "# Guide\n\nIntro.\n\n## Install\n\nStep one.\n\n## Use"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("*em* **strong** ``code``", "*em* **strong** `code`"),
        ("a `link <https://x.y>`_", "a [link](https://x.y)"),
        ("|x|\n\n.. |x| replace:: put in", "put in"),
        ("see [1]_\n\n.. [1] A note.", "see [1]\n\n[1] A note."),
        (":ref:`the guide <top>`, :doc:`/install`", "the guide, /install"),
        (":py:class:`~a.b.Client`, :envvar:`HOME`", "`Client`, `HOME`"),
        (".. _target:\n\n.. a comment\n\nText.", "Text."),
        ("| one\n|   two", "one\n  two"),
        ("Said:\n\n    quoted", "Said:\n\n> quoted"),
        ("Before::\n\n   x = 1\n     y", "Before:\n\n```\nx = 1\n  y\n```"),
        (">>> 1 + 1\n2", "```python\n>>> 1 + 1\n2\n```"),
        (".. code-block:: bash\n   :linenos:\n\n   ls", "```bash\nls\n```"),
        (".. code-block::\n   :caption: Run\n\n   ls", "Run\n\n```\nls\n```"),
        (".. note:: Beware of\n   dogs.", "**Note:** Beware of\ndogs."),
        (".. versionadded:: 3.2\n   An option.", "**New in version 3.2**\n\nAn option."),
        (".. tab-item:: npm\n\n   Run it.", "**npm**\n\nRun it."),
        (".. py:function:: f(a)\n   :async:\n\n   Does f.", "**f(a)**\n\nDoes f."),
        (".. image:: x.png\n   :alt: A pump", "A pump"),
        (".. figure:: x.png\n\n   A caption.", "A caption."),
        (".. math:: a^2", "$$\na^2\n$$"),
        (".. raw:: html\n\n   <b>x</b>", "```html\n<b>x</b>\n```"),
        (".. toctree::\n\n   install\n\nText.", "Text."),
    ],
)
def test_every_kind_keeps_its_text(source: str, text: str) -> None:
    assert text_of(source) == text


def test_lists_are_nested() -> None:
    source = """
        - one

          more

        - two

          - inner

        4. four
        5. five

        term : kind
            Its meaning.

        -f FILE, --file  Read it.

        :Author: Jane
        """
    assert (
        text_of(source)
        == textwrap.dedent("""
        - one

          more
        - two
          - inner

        4. four
        5. five

        - **term kind**: Its meaning.

        - **-f FILE, --file**: Read it.

        - **Author**: Jane
        """).strip()
    )


@pytest.mark.parametrize(
    "source",
    [
        """
        ====  =====
        part  price
        ====  =====
        AX-1  4
        ====  =====
        """,
        """
        +------+-------+
        | part | price |
        +======+=======+
        | AX-1 | 4     |
        +------+-------+
        """,
        """
        .. csv-table::
           :header: part, price

           AX-1, 4
        """,
        """
        .. list-table::
           :header-rows: 1

           * - part
             - price
           * - AX-1
             - 4
        """,
    ],
)
def test_all_tables_become_one_kind(source: str) -> None:
    assert text_of(source) == "| part | price |\n| --- | --- |\n| AX-1 | 4 |"


def test_text_that_cannot_be_read_stays() -> None:
    assert "broken" in text_of("Text.\n\n+---+\n| broken\n+--\n")


def test_other_files_are_not_read_but_named() -> None:
    source = b"Text.\n\n.. include:: /etc/passwd\n\n.. csv-table::\n   :file: /etc/passwd\n"
    read = read_restructured(source)
    assert "root:" not in read.text
    assert read.warnings == ("the included file /etc/passwd was not read; ingest it too",)


def test_docutils_is_left_as_it_was() -> None:
    before = directives.directive, roles.role
    text_of(".. unknown:: x")
    assert (directives.directive, roles.role) == before


def test_a_page_without_text_is_refused() -> None:
    with pytest.raises(UnreadableDocument):
        text_of(".. only a comment")
