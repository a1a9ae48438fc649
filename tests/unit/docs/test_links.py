"""Each relative link of a Markdown page leads to a file, and each anchor to a heading."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.kit.documentation import ROOT, anchors, links, tracked

PAGES = tracked("*.md")


def broken_links(page: Path, root: Path) -> list[str]:
    broken = []
    for line, link in links(page):
        target, _, anchor = unquote(link).partition("#")
        if ":" in target:
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.is_relative_to(root) or not path.exists():
            broken.append(f"{page.relative_to(root)}:{line}: {link} does not exist")
        elif anchor and path.suffix == ".md" and anchor not in anchors(path):
            broken.append(f"{page.relative_to(root)}:{line}: {link} names no heading")
    return broken


def test_links_lead_to_files_and_headings() -> None:
    assert len(PAGES) > 100
    assert [problem for page in PAGES for problem in broken_links(page, ROOT)] == []


@pytest.mark.parametrize(
    ("link", "problem"),
    [
        ("other.md", None),
        ("other.md#the-second-part", None),
        ("#here-too", None),
        ("https://example.com/x#y", None),
        ("missing.md", "does not exist"),
        ("other.md#the-third-part", "names no heading"),
        ("../outside.md", "does not exist"),
    ],
)
def test_a_broken_link_is_found(tmp_path: Path, link: str, problem: str | None) -> None:
    root = tmp_path / "repository"
    root.mkdir()
    (tmp_path / "outside.md").write_text("# Outside\n")
    (root / "other.md").write_text("# Other\n\n## The `second` part\n")
    page = root / "page.md"
    page.write_text(f"# Page\n\n## Here, too\n\nSee [this]({link}).\n")
    found = broken_links(page, root)
    assert len(found) == (problem is not None)
    if problem is not None:
        assert found[0] == f"page.md:5: {link} {problem}"
