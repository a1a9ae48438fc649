"""Fills the templates of web pages with words that each occur once in a page.

So a reader's output tells which words it has kept. A template calls ``text``, ``sentences`` and
``paragraphs`` for the document, ``menu``, ``other`` and ``links`` for what is around it, and
``code`` for lines of code, whose indentation counts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from jinja2 import Environment, FileSystemLoader

_TEMPLATES: Final = Path(__file__).parent / "templates"
_SYLLABLES: Final = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
_FEWEST_WORDS: Final = 8
_MOST_WORDS: Final = 18


@dataclass(slots=True)
class WebPage:
    """A page and what is in it.

    Args:
        content: Words of the document.
        navigation: Words of menus, buttons, related pages and the like.
        code: Lines of code, with their indentation.
    """

    name: str
    html: str = ""
    content: list[str] = field(default_factory=list)
    navigation: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)


def make_web_pages(seed: int) -> list[WebPage]:
    """Return one page of each template."""
    environment = Environment(loader=FileSystemLoader(_TEMPLATES), keep_trailing_newline=True)
    pages = []
    for name in sorted(environment.list_templates(extensions=["html"])):
        page = WebPage(name.removesuffix(".html"))
        page.html = environment.get_template(name).render(_Words(page, seed).functions())
        pages.append(page)
    return pages


class _Words:
    """Makes the words of one page, and notes what they are."""

    def __init__(self, page: WebPage, seed: int) -> None:
        self._page = page
        self._random = random.Random(f"{page.name} {seed}")
        self._made: set[str] = set()

    def functions(self) -> dict[str, Callable[..., object]]:
        """Return the functions that a template may call."""
        return {
            "text": self._text,
            "menu": self._menu,
            "sentences": lambda count: self._sentences(count, self._text),
            "other": lambda count: self._sentences(count, self._menu),
            "paragraphs": self._paragraphs,
            "links": self._links,
            "code": self._code,
        }

    def _text(self, count: int) -> str:
        return self._phrase(count, self._page.content)

    def _menu(self, count: int = 1) -> str:
        return self._phrase(count, self._page.navigation)

    def _sentences(self, count: int, phrase: Callable[[int], str]) -> str:
        lengths = [self._random.randint(_FEWEST_WORDS, _MOST_WORDS) for _ in range(count)]
        return " ".join(f"{phrase(length).capitalize()}." for length in lengths)

    def _paragraphs(self, count: int) -> str:
        return "\n".join(f"<p>{self._sentences(3, self._text)}</p>" for _ in range(count))

    def _links(self, count: int, before: str = "<li>", after: str = "</li>") -> str:
        return "".join(f'{before}<a href="/{i}">{self._menu(2)}</a>{after}' for i in range(count))

    def _code(self) -> list[str]:
        first, second, third, fourth = (self._text(1) for _ in range(4))
        lines = [
            f"for {first} in range(3):",
            f"    if {second} < {first}:",
            f"        {third}()",
            f"{fourth} = 1",
        ]
        self._page.code += lines
        return lines

    def _phrase(self, count: int, noted: list[str]) -> str:
        words: list[str] = []
        while len(words) < count:
            word = "".join(self._random.choices(_SYLLABLES, k=self._random.randint(3, 4)))
            if word not in self._made:
                self._made.add(word)
                words.append(word)
        noted += words
        return " ".join(words)
