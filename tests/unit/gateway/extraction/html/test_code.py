"""Each line of code stays a line with its indentation, and without its number."""

from __future__ import annotations

import pytest

from ragcache_gateway.extraction.html.reader import read_html

CODE = "```\nif full:\n    empty()\n\nstart()\n```"
LINES = ("if full:", "    empty()", "", "start()")


def _table(numbers: str, code: str) -> str:
    return f"<table><tbody><tr><td>{numbers}</td>\n<td>{code}</td></tr></tbody></table>"


NUMBERS = "\n".join(map(str, range(1, 5)))
BLOCKS = {
    "plain": "<pre>\nif full:\n    empty()\n\nstart()\n</pre>",
    "line breaks": f"<pre>{'<br>'.join(LINES)}</pre>",
    "copy button": f"<pre><button>Copy</button>{chr(10).join(LINES)}</pre>",
    "numbers beside the code": _table(f"<pre>{NUMBERS}</pre>", f"<pre>{chr(10).join(LINES)}</pre>"),
    "numbers in each line": "<pre>{}</pre>".format(
        "\n".join(f'<span class="linenos">{i}</span>{line}' for i, line in enumerate(LINES, 1))
    ),
    "numbers by class": _table(
        '<div class="gutter">{}</div>'.format("".join(f"<div>{i}</div>" for i in range(1, 5))),
        f"<pre>{chr(10).join(LINES)}</pre>",
    ),
    "list of lines": "<pre><ol>{}</ol></pre>".format("".join(f"<li>{x}</li>" for x in LINES)),
    "blocks as lines": "<pre><code>{}</code></pre>".format(
        "".join(f"<div>{line}</div>" for line in LINES)
    ),
    "rows as lines": "<table>{}</table>".format(
        "\n".join(
            f'<tr><td class="blob-num" data-line-number="{i}"></td>'
            f'<td class="blob-code">{line}</td></tr>'
            for i, line in enumerate(LINES, 1)
        )
    ),
    "highlighter of divs": '<div class="syntaxhighlighter"><table><tr><td class="gutter">{}</td>'
    '<td class="code"><div>{}</div></td></tr></table></div>'.format(
        "".join(f'<div class="line">{i}</div>' for i in range(1, 5)),
        "".join(
            f'<div class="line"><code>{line.replace(" ", "&nbsp;")}</code></div>' for line in LINES
        ),
    ),
    "inline code with line breaks": "<p><code>{}</code></p>".format(
        "<br>".join(line.replace("  ", "&nbsp;&nbsp;") for line in LINES)
    ),
    "style": f'<code style="display:block; white-space: pre">{chr(10).join(LINES)}</code>',
    "variants": "<pre><code>if full:\n    empty()\n</code><code>\nstart()</code></pre>",
    "elements": f"<pre><code>{LINES[0]}</code><code>{LINES[1]}</code>\n\nstart()</pre>",
    "old element": f"<xmp>{chr(10).join(LINES)}</xmp>",
}


@pytest.mark.parametrize("name", BLOCKS)
def test_lines_of_code_stay_lines(name: str) -> None:
    page = f"<main><p>Run this after each shift.</p>{BLOCKS[name]}<h2>Then</h2></main>"
    assert read_html(page.encode()).text == f"Run this after each shift.\n\n{CODE}\n\n## Then"


def test_the_tokens_of_a_highlighter_are_joined() -> None:
    lines = "\n".join(
        "".join(f"<span>{part}</span>" for part in line.partition(" ")) for line in LINES
    )
    read = read_html(f"<main><p>Run this.</p><pre><span></span>{lines}\n</pre></main>".encode())
    assert read.text == f"Run this.\n\n{CODE}"


@pytest.mark.parametrize(
    "around",
    ["<dl><dt>Usage</dt><dd>{}</dd></dl>", "<ul><li>{}</li></ul>", "<blockquote>{}</blockquote>"],
)
def test_code_begins_at_the_margin_wherever_it_is(around: str) -> None:
    page = f"<main><p>Run this.</p>{around.format(BLOCKS['plain'])}<h2>Then</h2><p>Go.</p></main>"
    assert f"\n\n{CODE}\n\n## Then\n\nGo." in read_html(page.encode()).text


def test_a_step_that_is_only_code_keeps_its_number() -> None:
    page = "<main><p>Run this.</p><ol><li><pre>a</pre></li><li>wait</li></ol></main>"
    assert read_html(page.encode()).text == "Run this.\n\n1. \n\n```\na\n```\n\n2. wait"


def test_a_fence_is_longer_than_those_in_the_code() -> None:
    page = "<main><p>Write this.</p><pre>```sh\nls\n```</pre></main>"
    assert read_html(page.encode()).text == "Write this.\n\n````\n```sh\nls\n```\n````"


def test_a_column_of_numbers_that_count_no_lines_stays() -> None:
    page = "<main><p>Sizes.</p><table><tr><td><pre>4\n8</pre></td><td>mm</td></tr></table></main>"
    assert "4\n8" in read_html(page.encode()).text


def test_a_number_in_a_block_with_line_numbers_is_code() -> None:
    assert "42" in read_html(b"<p>See</p><pre class='line-numbers'><code>42</code></pre>").text
