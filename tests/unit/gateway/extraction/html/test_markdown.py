"""The structure of a page becomes Markdown without a loss of text."""

from __future__ import annotations

import pytest

from ragcache_gateway.extraction.html.reader import read_html

INTRODUCTION = "<p>The press stamps lids, and one person runs it.</p>"


def text_of(main: str) -> str:
    """Return the text of a page after its introduction."""
    read = read_html(f"<main>{INTRODUCTION}{main}</main>".encode())
    before, found, after = read.text.partition("one person runs it.\n\n")
    assert found, before
    return after


def test_lists_in_cells_are_kept_in_one_line() -> None:
    table = """<table><thead><tr><th>Day</th><th>Work</th></tr></thead><tbody>
        <tr><td>Monday</td><td><ul><li>oil the rails</li><li><p>empty the tray</p></li></ul></td>
        <tr><td>Friday</td><td><ol><li>stop it.</li><li>clean it</li></ol><p>Log both.</p></td>
        <tr><td>Sunday</td><td><dl><dt>Guard<dd>one<dt>Cook<dd>none</dl></td></tr>
        </tbody></table>"""
    assert text_of(table) == (
        "| Day | Work |\n| --- | --- |\n"
        "| Monday | oil the rails; empty the tray |\n"
        "| Friday | 1. stop it. 2. clean it Log both. |\n"
        "| Sunday | Guard: one; Cook: none |"
    )


def test_a_cell_that_spans_rows_is_in_each_of_them() -> None:
    table = """<table><thead><tr><th rowspan=2>Hall</th><th colspan=2>Load</th></tr>
        <tr><th>least</th><th>most</th></tr></thead>
        <tr><td rowspan=2>North</td><td>1</td><td>2</td></tr>
        <tr><td>3 | 4</td><td>5</td></tr></table>"""
    assert text_of(table) == (
        "| Hall | Load least | Load most |\n| --- | --- | --- |\n"
        "| North | 1 | 2 |\n| North | 3 &#124; 4 | 5 |"
    )


def test_a_table_of_names_and_values_is_a_list() -> None:
    table = """<table class=infobox><tr><th colspan=2>Press 4</th></tr>
        <tr><th>Force</th><td>40 kN</td></tr>
        <tr><th>Built</th><td>Ulm<br>Germany</td></tr></table>"""
    assert text_of(table) == "- Press 4\n- Force: 40 kN\n- Built: Ulm Germany"


def test_a_table_with_code_or_a_table_inside_becomes_paragraphs_with_the_names_of_columns() -> None:
    table = """<table><tr><th>Task</th><th>Commands</th></tr>
        <tr><td>Reset</td><td><pre>if hot:\n    stop()</pre></td></tr>
        <tr><td>Sizes</td><td><table><tr><td>S</td><td>1</td></tr><tr><td>M</td><td>2</td></tr></table>
        </td></tr></table>"""
    assert text_of(table) == (
        "Task\nReset\n\nCommands\n\n```\nif hot:\n    stop()\n```\n\n"
        "Task\nSizes\n\nCommands\n\n| S | 1 |\n| --- | --- |\n| M | 2 |"
    )


def test_a_picture_in_a_cell_is_its_text() -> None:
    table = "<table><tr><th>Part<th>Spare<tr><td>Belt<td><img src=tick.png alt=yes></table>"
    assert text_of(table) == "| Part | Spare |\n| --- | --- |\n| Belt | yes |"


def test_terms_stay_beside_what_they_mean() -> None:
    page = """<dl><dt>Stroke</dt><dd><p>Way of the ram.</p><p>In mm.</p></dd>
        <dt>Die</dt><dd>A tool.</dd></dl>"""
    assert text_of(page) == "Stroke\n: Way of the ram.\n\nIn mm.\n\nDie\n: A tool."


def test_the_title_of_an_admonition_stays_beside_its_text() -> None:
    page = '<div><p class="admonition-title">Warning</p><p>Hot oil.</p></div>'
    assert text_of(page) == "Warning\nHot oil."


def test_lists_are_nested_and_numbered_from_their_start() -> None:
    page = """<ol start=3><li><p>Open</p><p>Wait.</p></li><li>Close<ul><li>left</li>
        <li>right</li></ul></li></ol><blockquote><p>Never<br>alone.</p></blockquote>"""
    assert text_of(page) == (
        "3. Open\n\n   Wait.\n\n4. Close\n   - left\n   - right\n\n> Never\n> alone."
    )


@pytest.mark.parametrize(
    ("sentence", "text"),
    [
        ("10<sup>6</sup> m<sup>2</sup> on the 5<sup>th</sup>", "10^6 m^2 on the 5th"),
        ("cost <del>$10</del> $8", "cost ~~$10~~ $8"),
        ('said so<sup><a href="#n">3</a></sup>', "said so[3]"),
        ('said<sup class="reference"><a href="#n">[1]</a></sup> so', "said so"),
        ('see <a class="reference internal" href="#b">the list</a>', "see the list"),
        ('so<a class="footnote-reference brackets" href="#id2">1</a>.', "so."),
        ("run <kbd>stop</kbd> and <code>a`b</code>", "run `stop` and ``a`b``"),
        (
            "<math><mi>x</mi><annotation encoding='application/x-tex'>x_1</annotation></math>",
            "$x_1$",
        ),
        ('<script type="math/tex">y^2</script> holds', "$y^2$ holds"),
        ("wait <time datetime='2031-05-01'></time> long", "wait 2031-05-01 long"),
        ("# no heading", "\\# no heading"),
        ("---", "\\---"),
        ("&lt;!-- shown --&gt;", "\\<!-- shown -->"),
    ],
)
def test_what_is_in_a_sentence_keeps_its_meaning(sentence: str, text: str) -> None:
    assert text_of(f"<p>{sentence}</p>") == text


@pytest.mark.parametrize(
    ("heading", "text"),
    [
        ('Safety<a class="headerlink" href="#s" title="Link to this heading">¶</a>', "Safety"),
        ('C# <a href="#c">#</a>', "C#"),
        ('<a href="#s" id="s">Safety</a>', "Safety"),
        ('<a class="anchor" href="#s">Safety</a>', "Safety"),
        ("Safety <small>[<a href='/p?action=edit'>change</a>]</small>", "Safety"),
        ('Safety<span class="mw-editsection">[<a>edit</a> | <a>source</a>]</span>', "Safety"),
        ('Safety<a href="#s" aria-label="Direct link to Safety">&#8203;</a>', "Safety"),
        ("<span aria-hidden=true>🔗</span> Safety <button>Copy link</button>", "Safety"),
        ('Release <a href="/v2">v2</a> notes', "Release v2 notes"),
        ("Safety<br>first", "Safety first"),
    ],
)
def test_headings_have_no_links_to_themselves_or_to_an_editor(heading: str, text: str) -> None:
    page = f"<h3>{heading}</h3><p>Wear gloves.</p>"
    assert text_of(page) == f"### {text}\n\nWear gloves."


def test_a_heading_by_its_role_is_one() -> None:
    page = '<div role="heading" aria-level="4">Safety</div><p>Wear gloves.</p>'
    assert text_of(page) == "#### Safety\n\nWear gloves."


def test_text_after_a_heading_in_an_item_is_not_part_of_the_item() -> None:
    page = "<ul><li><section><h2>Methods</h2><p>One.</p><ul><li>a</li></ul></section></li></ul>"
    assert text_of(page) == "## Methods\n\nOne.\n\n- a"


def test_nested_elements_take_no_more_than_the_parser_allows() -> None:
    page = "<ul><li>" * 400 + "deep" + "</ul>" * 400 + "<p>after</p>"
    assert text_of(page).endswith("- deep\n\nafter")


def test_marks_in_an_item_open_no_code() -> None:
    read = read_html(b"<h1>T</h1><ul><li>```</li></ul><dl><dt>x</dt><dd>a<br># b</dd></dl>")
    assert read.text == "# T\n\n- \\```\n\nx\n: a\n\\# b"
