"""Pages of Confluence's storage format keep the text of macros, tasks and links."""

from __future__ import annotations

import pytest

from ragcache_gateway.extraction.html.reader import read_html


def macro(name: str, content: str) -> str:
    return f'<ac:structured-macro ac:name="{name}">{content}</ac:structured-macro>'


@pytest.mark.parametrize(
    ("element", "text"),
    [
        (
            macro("noformat", "<ac:plain-text-body><![CDATA[open\n  close]]></ac:plain-text-body>"),
            "```\nopen\n  close\n```",
        ),
        (
            macro(
                "code",
                '<ac:parameter ac:name="language">sh</ac:parameter>'
                "<ac:plain-text-body><![CDATA[ls > a]]></ac:plain-text-body>",
            ),
            "```\nls > a\n```",
        ),
        (
            macro(
                "expand",
                '<ac:parameter ac:name="title">Why?</ac:parameter>'
                "<ac:rich-text-body><p>Rust.</p></ac:rich-text-body>",
            ),
            "Why?\n\nRust.",
        ),
        (macro("warning", "<ac:rich-text-body><p>Hot.</p></ac:rich-text-body>"), "Hot."),
        (
            "<p>Is "
            + macro("status", '<ac:parameter ac:name="title">OPEN</ac:parameter>')
            + "</p>",
            "Is OPEN",
        ),
        (
            "<ac:task-list><ac:task><ac:task-id>7</ac:task-id><ac:task-status>complete"
            "</ac:task-status><ac:task-body>oil</ac:task-body></ac:task><ac:task><ac:task-status>"
            "incomplete</ac:task-status><ac:task-body>paint</ac:task-body></ac:task></ac:task-list>",
            "- [x] oil\n- [ ] paint",
        ),
        (
            '<p>See <ac:link><ri:page ri:content-title="Valves" /></ac:link> and <ac:link>'
            '<ri:page ri:content-title="V2" /><ac:plain-text-link-body><![CDATA[the list]]>'
            "</ac:plain-text-link-body></ac:link>.</p>",
            "See Valves and the list.",
        ),
        ('<p>Until <time datetime="2031-05-01" /> at noon</p>', "Until 2031-05-01 at noon"),
        (
            '<ac:layout><ac:layout-section ac:type="single"><ac:layout-cell><p>left</p>'
            "</ac:layout-cell><ac:layout-cell>right</ac:layout-cell></ac:layout-section></ac:layout>",
            "left\n\nright",
        ),
    ],
)
def test_elements_of_the_storage_format_are_read(element: str, text: str) -> None:
    contents = macro("toc", "") + '<ac:structured-macro ac:name="children" />'
    page = f"<p>Before the work.</p>{contents}{element}<p>After it.</p>"
    assert read_html(page.encode()).text == f"Before the work.\n\n{text}\n\nAfter it."


def test_a_parameter_in_a_placeholder_is_left_out() -> None:
    inner = "<ac:parameter ac:name='title'>x</ac:parameter>"
    assert read_html(f"<p>a</p><ac:placeholder>{inner}</ac:placeholder>".encode()).text == "a"
