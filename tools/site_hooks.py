"""Put the repository's own pages into the documentation site.

MkDocs calls these hooks (mkdocs.yml). Pages in docs/ link to files outside of it, such as
SECURITY.md and the examples, with relative paths that work in the repository. The site gets a copy
of each such file under ``repository/``, and the links lead to the copies.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parent.parent
COPIES: Final = "repository"
PAGES: Final = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Pages of the repository's root that the site's navigation names."""
_LINK: Final = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's pages, and each file that a page links to outside of docs/."""
    pages = {f"docs/{file.src_uri}": read(file) for file in files.documentation_pages()}
    pages |= {name: (ROOT / name).read_text() for name in PAGES}
    wanted = set(PAGES)
    for path, text in pages.items():
        wanted |= {target for target in targets(path, text) if not target.startswith("docs/")}
    for name in sorted(wanted):
        if (ROOT / name).is_file():
            files.append(
                File.generated(config, f"{COPIES}/{name}", abs_src_path=str(ROOT / name))
                if name in PAGES or not name.endswith(".md")
                else File.generated(
                    config, f"{COPIES}/{name}.txt", content=(ROOT / name).read_text()
                )
            )
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead the links of a page to where the site has their targets."""
    here = page.file.src_uri
    path = here.removeprefix(f"{COPIES}/") if here.startswith(f"{COPIES}/") else f"docs/{here}"

    def lead(match: re.Match[str]) -> str:
        target = match[2]
        if ":" in target:
            return match[0]
        found = site_path(resolve(path, target), files)
        start = posixpath.dirname(here) or "."
        link = target if found is None else posixpath.relpath(found, start)
        return f"{match[1]}{link}{match[3]}"

    return _LINK.sub(lead, markdown)


def read(file: File) -> str:
    """Return the source of a page."""
    return file.content_string


def resolve(path: str, link: str) -> str:
    """Return the repository path of a relative link of the page at ``path``."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def targets(path: str, text: str) -> Iterator[str]:
    """Yield the repository path of each relative link of a page."""
    for match in _LINK.finditer(text):
        if ":" not in match[2]:
            yield resolve(path, match[2])


def site_path(target: str, files: Files) -> str | None:
    """Return where the site has a file of the repository; None if it has none."""
    if target.startswith("docs/"):
        found = target.removeprefix("docs/")
        return found if files.get_file_from_path(found) else None
    for name in (f"{COPIES}/{target}", f"{COPIES}/{target}.txt"):
        if files.get_file_from_path(name):
            return name
    return None
