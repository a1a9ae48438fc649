"""What a page shows after a click is read too, with the words of its control."""

from __future__ import annotations

import pytest

from ragcache_gateway.extraction.html.reader import read_html

QUESTION = "Who repairs the lift?"
ANSWER = "The house technician, within a day."
PANELS = {
    "details": f"<details><summary>{QUESTION}</summary><p>{ANSWER}</p></details>",
    "hidden": f"<button>{QUESTION}</button><div hidden>{ANSWER}</div>",
    "display none": f'<button>{QUESTION}</button><div style="display: none">{ANSWER}</div>',
    "aria-hidden": f'<button>{QUESTION}</button><div aria-hidden="true"><p>{ANSWER}</p></div>',
    "role of a button": f'<div role="button" aria-expanded="false">{QUESTION}</div>'
    f'<div class="panel" hidden><p>{ANSWER}</p></div>',
    "link": f'<p><a data-toggle="collapse" href="#p">{QUESTION}</a></p><div id="p">{ANSWER}</div>',
}


@pytest.mark.parametrize("name", PANELS)
def test_questions_and_answers_of_an_accordion_are_read(name: str) -> None:
    page = f"<body><h1>House</h1><p>Questions of tenants.</p>{PANELS[name]}</body>"
    lines = [line for line in read_html(page.encode()).text.split("\n") if line]
    assert lines == ["# House", "Questions of tenants.", QUESTION, ANSWER]


def test_a_button_in_a_heading_is_the_heading() -> None:
    heading = f"<h3><button aria-expanded=false>{QUESTION}</button></h3>"
    page = f"<main><h1>House</h1>{heading}<div hidden>{ANSWER}</div></main>"
    assert read_html(page.encode()).text == f"# House\n\n### {QUESTION}\n\n{ANSWER}"


TABS = {
    "by id": """<div role="tablist"><button role="tab" aria-controls="a">Oil</button>
        <button role="tab" aria-controls="b">Gas</button></div><div id="a">Turn left.</div>
        <div id="b" hidden>Turn right.</div>""",
    "by order": """<ul role="tablist"><li role="tab">Oil</li><li role="tab">Gas</li></ul><div><div
        role="tabpanel">Turn left.</div><div role="tabpanel" hidden>Turn right.</div></div>""",
    "links": """<ul><li><a href="#a">Oil</a></li><li><a href="#b">Gas</a></li></ul><div id="a">Turn
        left.</div><div id="b">Turn right.</div>""",
    "labels": """<div class="tabbed-set"><input type="radio"><div class="tabbed-labels">
        <label>Oil</label><label>Gas</label></div><div class="tabbed-content">
        <div class="tabbed-block">Turn left.</div><div class="tabbed-block">Turn right.</div>
        </div></div>""",
}


@pytest.mark.parametrize("name", TABS)
def test_each_panel_has_the_name_of_its_tab(name: str) -> None:
    page = f"<main><p>How to close the valve.</p>{TABS[name]}</main>"
    assert read_html(page.encode()).text == (
        "How to close the valve.\n\nOil\nTurn left.\n\nGas\nTurn right."
    )


def test_a_button_in_a_sentence_stays_and_one_that_only_acts_goes() -> None:
    page = """<main><p>Press <button>Stop</button> twice.</p><button>Print</button>
        <div><button>Share</button></div><ul><li><input type=checkbox checked> oiled</li>
        <li><input type=checkbox> painted</li></ul></main>"""
    assert read_html(page.encode()).text == ("Press Stop twice.\n\n- [x] oiled\n- [ ] painted")


def test_an_empty_formula_is_no_text() -> None:
    assert read_html(b"<p>a</p><script type='math/tex'></script>").text == "a"
