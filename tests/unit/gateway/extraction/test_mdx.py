"""MDX becomes Markdown. Its tags go, and their text stays."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_gateway.extraction.extracted import UnreadableDocument
from ragcache_gateway.extraction.mdx import read_mdx


def text_of(source: str) -> str:
    return read_mdx(source.encode()).text


def test_imports_and_exports_go() -> None:
    source = """import Tabs from '@theme/Tabs';
import {
  A,
} from "x"
import './style.css'
export const meta = {
  title: 'x',

  call: () => { return "}" },
}

# Guide

export default ({ children }) => <Page>{children}</Page>

End."""
    assert text_of(source) == "# Guide\n\nEnd."


@pytest.mark.parametrize(
    "sentence",
    [
        "import duties are due at the border.",
        "Then\nimport it from 'x'.",
        "exported goods are free.",
    ],
)
def test_sentences_with_such_words_stay(sentence: str) -> None:
    assert text_of(sentence) == sentence


def test_front_matter_gives_title_and_metadata() -> None:
    read = read_mdx(b"---\ntitle: Ports\ntags: [net]\n---\n\n<Note>Open 8080.</Note>\n")
    assert (read.title, read.metadata, read.text) == ("Ports", {"tags": ["net"]}, "Open 8080.")


def test_the_text_of_elements_stays() -> None:
    source = """<Tabs values={[{label: 'a', value: {x: 1}}]} onChange={(e) => { go("<b>") }}>
  <TabItem value="npm" label="npm">

    Install it:

    ```bash
    npm install x
      --save
    ```

  </TabItem>
  <TabItem label={'yarn'}>Run <b>yarn</b>.</TabItem>
</Tabs>"""
    assert text_of(source) == (
        "**npm**\n\nInstall it:\n\n```bash\nnpm install x\n  --save\n```\n\n**yarn**\n\nRun yarn."
    )


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("Press <Kbd>Ctrl</Kbd>+C.", "Press Ctrl+C."),
        ("<Note>Beware.</Note>", "Beware."),
        ("<Card\n  title=\"Billing\"\n  href='/x'\n>\n  Pay.\n</Card>", "**Billing**\n\nPay."),
        ('A pump: <img src="x.png" alt="P-1" />', "A pump: P-1"),
        ("one<br/>two", "one\ntwo"),
        ("<ul><li>a</li><li>b</li></ul>", "- a\n\n- b"),
        ("<>a</>", "a"),
        ("a{/* hidden */}b<!-- hidden -->c", "abc"),
        ("{\"a text\"}{' '}{`x`}", "a text x"),
        ("# Guide {#guide}", "# Guide"),
        ("## Of `a` {#a} and b", "## Of `a` {#a} and b"),
    ],
)
def test_tags_go_and_their_text_stays(source: str, text: str) -> None:
    assert text_of(source) == text


@pytest.mark.parametrize(
    "source",
    [
        "Use `<Tabs>` and ``{`x`}``.",
        "a < b, 1 <2, a<b and c> d",
        "A List<String> of <https://x.y/z> and <jane@x.y>.",
        "Version {props.version}, $\\frac{a}{b}$ and \\{x\\}.",
        "an unclosed {brace and <Tag attribute",
        "```jsx\nimport A from 'a'\n<A>{x}</A>\n```",
        "~~~\n<b>\n```\n~~~",
        "- one\n  - two",
    ],
)
def test_code_and_other_marks_stay(source: str) -> None:
    assert text_of(source) == source


@given(
    st.lists(st.sampled_from(["a", "<B>", "</B>", "{", "}", "`", "```\n", "\n", "'", "<", "\\"]))
)
def test_no_word_is_lost(pieces: list[str]) -> None:
    source = "".join(pieces)
    if "a" in pieces:
        shown = re.sub(r"[^a]", "", text_of(source))
        assert shown == "a" * pieces.count("a")


@pytest.mark.parametrize("source", ["", "<Toc />", "import A from 'a'"])
def test_a_page_without_text_is_refused(source: str) -> None:
    with pytest.raises(UnreadableDocument):
        text_of(source)


def test_code_in_a_list_keeps_its_tags() -> None:
    page = b'- ```jsx\n  <Tabs value="x">Hi</Tabs>\n  ```\n\nText <b>bold</b> here.\n'
    assert read_mdx(page).text == '- ```jsx\n  <Tabs value="x">Hi</Tabs>\n  ```\n\nText bold here.'
