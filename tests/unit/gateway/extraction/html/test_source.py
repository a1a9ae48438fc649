"""Pages are read in any encoding, and with the syntax that others write."""

from __future__ import annotations

import pytest

from ragcache_gateway.extraction.extracted import UnreadableDocument
from ragcache_gateway.extraction.html.reader import read_html
from ragcache_gateway.extraction.html.source import decode

WESTERN = "Die Prüfung kostet 8 € und “alles” inbegriffen."


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (WESTERN.encode(), WESTERN),
        (WESTERN.encode("utf-8-sig"), WESTERN),
        (WESTERN.encode("utf-16"), WESTERN),
        (f"<p>{WESTERN}".encode("utf-16-le"), f"<p>{WESTERN}"),
        (f'<meta charset="iso-8859-1">{WESTERN}'.encode("cp1252"), WESTERN),
        (f'<meta charset="iso-8859-1">{WESTERN}'.encode(), WESTERN),
        (
            "<?xml version='1.0' encoding='koi8-r'?>Кран номер семь".encode("koi8-r"),
            "Кран номер семь",
        ),
        ('<meta charset="iso-2022-jp">日本語'.encode("iso-2022-jp"), "日本語"),
        ("Кран стоит в зале номер семь и поднимает тонну.".encode("cp1251"), "Кран стоит"),
        (b'<meta charset="punycode">Caf\xc3\xa9', "Café"),
        (b'<meta charset="no-such">Caf\xc3\xa9', "Café"),
    ],
)
def test_the_encoding_is_that_of_the_mark_or_of_the_page(content: bytes, text: str) -> None:
    assert text in decode(content)[0]


def test_an_encoding_that_the_page_does_not_show_is_said() -> None:
    page = "<p>Кран стоит в зале номер семь и поднимает тонну.</p>"
    assert read_html(page.encode("cp1251")).warnings == (
        "the encoding is taken to be cp1251; name it with encoding if it is another one",
    )
    assert read_html(f'<meta charset="cp1251">{page}'.encode("cp1251")).warnings == ()


def test_cdata_of_a_wiki_is_text_whatever_is_in_it() -> None:
    page = """<p>Do this.</p><ac:structured-macro><ac:plain-text-body><![CDATA[if a > b && c < d:
    print("<p>]]]]><![CDATA[>")]]></ac:plain-text-body></ac:structured-macro><p>Then rest.</p>"""
    assert read_html(page.encode()).text == (
        'Do this.\n\n```\nif a > b && c < d:\n    print("<p>]]>")\n```\n\nThen rest.'
    )


def test_cdata_of_a_script_is_no_text() -> None:
    page = "<head><script>//<![CDATA[\nf('<p>no</p>')\n//]]></script></head><body><p>yes</p>"
    assert read_html(page.encode()).text == "yes"
    assert read_html(b"<p>open <![CDATA[ end").text.startswith("open")


def test_elements_nested_too_deep_are_reported() -> None:
    read = read_html(b"<p>first</p>" + b"<div>" * 3000 + b"last")
    assert read.text == "first"
    assert read.warnings == (
        "elements are nested more than 2,000 deep; the text after that was not read",
    )
    with pytest.raises(UnreadableDocument, match="nested more than 2,000 deep"):
        read_html(b"<div>" * 3000 + b"last")


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        (b"", "has no text"),
        (b"<script>x</script>", "has no text without its scripts; save the page from a browser"),
        (b"<frameset><frame src=a></frameset>", "has no text"),
    ],
)
def test_a_page_without_text_is_refused_with_the_reason(page: bytes, problem: str) -> None:
    with pytest.raises(UnreadableDocument, match=problem):
        read_html(page)


def test_a_page_that_is_made_by_scripts_has_a_warning() -> None:
    page = "<div>Loading</div><noscript>Please enable JavaScript.</noscript><script></script>"
    read = read_html(page.encode())
    assert read.text == "Loading"
    assert read.warnings == (
        "the page asks for JavaScript and has little text without it; save it from a browser",
    )


def test_a_page_that_says_utf_16_in_ascii_is_not() -> None:
    page = "<?xml version='1.0' encoding='utf-16'?><p>Die Größe der Straße.</p>".encode("cp1252")
    assert read_html(page).text == "Die Größe der Straße."


def test_a_page_without_an_encoding_is_read_as_a_text_is() -> None:
    page = "<h1>Notes</h1>\n<p>El niño come mañana en la cocina</p>\n<p>Plain words</p>"
    assert "niño come mañana" in read_html(page.encode("cp1252")).text
