"""The main part of a page is read without navigation, and content with a suspicious name stays."""

from __future__ import annotations

import pytest

from ragcache_gateway.extraction.html.reader import read_html

SENTENCE = "The boiler of hall C heats the water for both houses and for the wash room. "
MENU = """<ul><li><a href="/a">Home</a></li><li><a href="/b">Plants</a></li>
<li><a href="/c">Staff</a></li></ul>"""


@pytest.mark.parametrize(
    "around",
    [
        f"<nav>{MENU}</nav>",
        f'<div class="sphinxsidebar">{MENU}</div>',
        f'<div id="left-menu">{MENU}</div>',
        f'<aside class="related-posts"><h3>Related</h3>{MENU}</aside>',
        f"<footer><p>Boilers and more since 1904</p>{MENU}</footer>",
        f'<header><a href="/">Works</a>{MENU}</header>',
        f'<ol class="breadcrumb">{MENU}</ol>',
        '<div class="cookie-consent"><p>We count visits. All right?</p><button>Yes</button></div>',
        '<div class="newsletter"><p>News each month.</p></div>',
        '<a class="skip-link" href="#c">Skip to content</a>',
        f"<div><div>{MENU}</div></div>",
    ],
)
def test_navigation_is_left_out(around: str) -> None:
    text = f"<h1>Boiler</h1><p>{SENTENCE * 5}</p>"
    wanted = f"# Boiler\n\n{SENTENCE * 5}".strip()
    assert read_html(f"<body>{around}<div>{text}</div></body>".encode()).text == wanted
    assert read_html(f"<body>{around}<main>{text}</main></body>".encode()).text == wanted


@pytest.mark.parametrize(
    "content",
    [
        '<div class="menu"><h2>Lunch</h2><p>Soup, then fish with rice.</p></div>',
        '<aside class="sidebar"><p>Ask the guard for the key first.</p></aside>',
        '<section class="related"><p>A boiler is related to a kettle.</p></section>',
        '<ul><li><a href="/k">Kettle</a></li><li><a href="/p">Pump</a></li></ul>',
        "<footer><p>Written by the guard.</p></footer>",
        '<h2><a class="header" href="#s">Safety</a></h2>',
        '<p>See <a class="menu" href="/v">the valve</a></p>',
    ],
)
def test_content_stays_whatever_its_name(content: str) -> None:
    words = read_html(content.encode()).text.replace("#", "").replace("-", "").split()
    page = f"<body><main><h1>Boiler</h1><article><p>{SENTENCE}</p>{content}</article></main></body>"
    assert words
    assert [word for word in words if word not in read_html(page.encode()).text] == []


def test_a_table_that_arranges_the_page_is_no_table() -> None:
    links = "".join(f'<a href="/{i}">Plant {i}</a><br>' for i in range(6))
    page = f"""<table><tr><td>{links}</td><td><h1>Boiler</h1><p>{SENTENCE * 5}
        <table border=1><tr><th>Year<th>Work<tr><td>2<td>seal</table></td></tr></table>"""
    assert read_html(page.encode()).text == (
        f"# Boiler\n\n{SENTENCE * 5}".strip() + "\n\n| Year | Work |\n| --- | --- |\n| 2 | seal |"
    )


def test_a_list_of_contents_is_left_out_with_its_heading() -> None:
    page = f"""<main><h1>Boiler</h1><h2>Contents</h2><ul><li><a href="#o">Oil</a></li><li>
        <a href="#g">Gas</a></li></ul><h2 id="o">Oil</h2><p>{SENTENCE}</p>
        <section id="g"><h2>Gas</h2><p>None.</p></section></main>"""
    assert read_html(page.encode()).text == (
        f"# Boiler\n\n## Oil\n\n{SENTENCE.strip()}\n\n## Gas\n\nNone."
    )


def test_all_posts_of_a_discussion_are_read() -> None:
    posts = "".join(f'<div class="comment"><p>Post {i}. {SENTENCE}</p></div>' for i in range(4))
    page = f'<body><nav>{MENU}</nav><h1>Cold water</h1><div class="comments">{posts}</div></body>'
    text = read_html(page.encode()).text
    assert text.count("The boiler of hall C") == 4
    assert "Plants" not in text


def test_a_page_of_links_is_not_empty() -> None:
    page = f"<body><nav>{MENU}</nav></body>"
    assert read_html(page.encode()).text == "- Home\n- Plants\n- Staff"


def test_an_index_is_not_taken_for_navigation() -> None:
    entries = "".join(f'<p><a href="/{i}">Valve {i}</a> <a>a</a> <a>b</a></p>' for i in range(60))
    page = f"<body><div><h1>Index</h1><p>{SENTENCE * 4}</p><div>{entries}</div></div></body>"
    text = read_html(page.encode()).text
    assert [i for i in range(60) if f"Valve {i} a b" not in text] == []


def test_links_between_texts_stay() -> None:
    links = "".join(f'<a href="/{i}">Valve {i}</a> ' for i in range(4))
    page = f"<body><div>{MENU}</div><p>{SENTENCE * 4}</p><p>{links}</p><p>{SENTENCE * 4}</p></body>"
    assert "\n\nValve 0 Valve 1 Valve 2 Valve 3\n\n" in read_html(page.encode()).text


def test_text_beside_an_element_with_the_name_of_content_stays() -> None:
    named = f'<div class="content"><p>{SENTENCE * 5}</p></div>'
    page = f"<body>{named}<div><p>{'Oil it. ' * 50}</p></div></body>"
    assert read_html(page.encode()).text.count("Oil it.") == 50


def test_a_heading_before_the_main_part_is_its_heading() -> None:
    page = f"""<head><title>oil - Boiler - Works</title></head><body><header><h1>Works</h1></header>
        <div><h1>Boiler</h1></div><main><p>{SENTENCE}</p></main></body>"""
    read = read_html(page.encode())
    assert read.title == "Boiler"
    assert read.text == f"# Boiler\n\n{SENTENCE.strip()}"


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("<h2 id='configure-login'>Configure login</h2><p>Set it.</p>", "## Configure login"),
        ("<section id='cookies'><h2>Cookies</h2><p>We set two.</p></section>", "We set two."),
        ("<dl><dt id='smtplib.SMTP.login'>SMTP.login(user)</dt><dd>In.</dd></dl>", "SMTP.login"),
        ("<table><tr><th>A<th>B</tr><tr id='feedback'><td>x<td>y</tr></table>", "| x | y |"),
    ],
)
def test_an_id_that_is_made_from_the_text_is_no_name_of_navigation(part: str, text: str) -> None:
    page = f"<main><h1>Guide</h1><p>{SENTENCE * 5}</p>{part}</main>"
    assert text in read_html(page.encode()).text


def test_an_article_of_a_category_with_such_a_name_stays() -> None:
    article = f"<h1>Boiler</h1><p>{SENTENCE * 6}</p>"
    comments = f"<div class='comments-area'><p>{'I have one, too. ' * 40}</p></div>"
    page = f"<main><article class='post category-newsletter'>{article}</article>{comments}</main>"
    assert read_html(page.encode()).text.startswith("# Boiler")


def test_comments_with_a_heading_are_left_out() -> None:
    page = (
        f"<main><h1>G</h1><p>{SENTENCE * 5}</p><div id='comments'><h3>Comments</h3><p>Hm</p></div>"
    )
    assert "Hm" not in read_html(page.encode()).text
