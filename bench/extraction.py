"""Measures what reading web pages keeps of their text and of their navigation, beside trafilatura.

The pages are as seventeen generators write them, such as Sphinx, MediaWiki or a shop. Each word is
known to be text or navigation (``bench/support/web_pages``). trafilatura writes Markdown without
comments, of texts from 25 characters on, because pages of documentation are short.

- ``kept_text_share``: the share of the text's words that the output has, the mean over the pages.
- ``kept_navigation_share``: the same of the words of menus, buttons, related pages and footers.
- ``kept_code_lines_share``: the share of lines of code that are lines with the same indentation.
- ``ms_per_page``: CPU time of a page, the median of rounds in which both readers take turns.

Figures that begin with ``trafilatura_`` are those of trafilatura.
"""

from __future__ import annotations

import copy
import json
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import trafilatura
from trafilatura.settings import DEFAULT_CONFIG

from bench.support.program import is_quick, say
from bench.support.web_pages.pages import WebPage, make_web_pages
from ragcache_gateway.extraction.html.reader import read_html

ROUNDS = 9
QUICK_ROUNDS = 3
SEEDS = 8
QUICK_SEEDS = 2

Reader = Callable[[bytes], str]


def read_by_trafilatura(content: bytes) -> str:
    """Return the main part of a page as Markdown by trafilatura."""
    config = copy.deepcopy(DEFAULT_CONFIG)
    config["DEFAULT"]["MIN_EXTRACTED_SIZE"] = "25"
    text = trafilatura.extract(
        content, output_format="markdown", include_comments=False, config=config
    )
    return text or ""


READERS: dict[str, Reader] = {
    "": lambda content: read_html(content).text,
    "trafilatura_": read_by_trafilatura,
}


def kept_share(words: Iterable[str], text: str) -> float:
    """Return the share of words that a text has."""
    has = set(re.findall(r"[a-z]+", text.lower()))
    return statistics.fmean(word in has for word in words)


def kept_lines_share(lines: Sequence[str], text: str) -> float:
    """Return the share of lines that are lines of a text."""
    has = set(text.split("\n"))
    return statistics.fmean(line in has for line in lines)


def measure(pages: Sequence[WebPage], rounds: int) -> dict[str, float]:
    """Read all pages by both readers."""
    figures: dict[str, float] = {"pages": len(pages)}
    contents = [page.html.encode() for page in pages]
    for prefix, read in READERS.items():
        texts = [read(content) for content in contents]
        kept = [kept_share(page.content, text) for page, text in zip(pages, texts, strict=True)]
        for page, share in zip(pages, kept, strict=True):
            say(f"{prefix or 'ragcache_'}{page.name} {share:.3f}")
        navigation = [
            kept_share(page.navigation, text)
            for page, text in zip(pages, texts, strict=True)
            if page.navigation
        ]
        code = [
            kept_lines_share(page.code, text)
            for page, text in zip(pages, texts, strict=True)
            if page.code
        ]
        figures[f"{prefix}kept_text_share"] = round(statistics.fmean(kept), 4)
        figures[f"{prefix}least_kept_text_share"] = round(min(kept), 4)
        figures[f"{prefix}kept_navigation_share"] = round(statistics.fmean(navigation), 4)
        figures[f"{prefix}kept_code_lines_share"] = round(statistics.fmean(code), 4)
    times: dict[str, list[float]] = {prefix: [] for prefix in READERS}
    for _ in range(rounds):
        for prefix, read in READERS.items():
            began_s = time.process_time()
            for content in contents:
                read(content)
            times[prefix].append((time.process_time() - began_s) / len(contents))
    for prefix, seconds in times.items():
        figures[f"{prefix}ms_per_page"] = round(statistics.median(seconds) * 1e3, 2)
    return figures


def main() -> None:
    quick = is_quick(__doc__, "fewer pages of each generator, and fewer rounds")
    seeds = range(1, 1 + (QUICK_SEEDS if quick else SEEDS))
    pages = [page for seed in seeds for page in make_web_pages(seed)]
    print(json.dumps(measure(pages, QUICK_ROUNDS if quick else ROUNDS)))


if __name__ == "__main__":
    main()
