"""The documentation site: it builds without a warning, is complete, and asks no other host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.kit.documentation import ROOT, tracked


class Loads(HTMLParser):
    """Gathers what a browser loads for a page, and the links that readers follow."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.followed: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "a":
            self.followed.append(values.get("href") or "")
        else:
            self.loaded.extend(values.get(name) or "" for name in ("src", "href"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_each_page_of_docs_is_in_the_site(site: Path) -> None:
    for source in tracked("docs/*.md", "docs/**/*.md"):
        path = source.relative_to(ROOT / "docs").with_suffix(".html")
        name = path.with_name("index.html") if path.name == "README.html" else path
        assert (site / name).is_file(), name
    assert (site / "search" / "search_index.json").is_file()


def test_links_to_files_outside_of_docs_lead_to_copies(site: Path) -> None:
    for page in set(site.rglob("*.html")) - {site / "404.html"}:  # its links begin at the root
        for link in Loads(page.read_text()).followed:
            target = link.partition("#")[0]
            if target and ":" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(site)}: {link}"


def test_no_page_loads_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 100
    for page in pages:
        assert 'class="mermaid"' not in page.read_text(), "its script comes from another host"
        external = [link for link in Loads(page.read_text()).loaded if "//" in link]
        assert external == [], page.relative_to(site)
    for sheet in site.rglob("*.css"):
        assert not re.search(r"@import|url\(\"?(https?:)?//", sheet.read_text()), sheet.name


def test_a_page_that_loads_from_another_host_is_found() -> None:
    page = '<link href="//fonts.example.com/x.css"><script src="https://cdn.example.com/x.js"></script>'
    assert [link for link in Loads(page).loaded if "//" in link] == [
        "//fonts.example.com/x.css",
        "https://cdn.example.com/x.js",
    ]
