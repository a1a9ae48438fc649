"""Documents below a mounted folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragcache_cli.sources import reading
from ragcache_cli.sources.documents import documents_in, read_content
from ragcache_cli.sources.read import read_folder
from ragcache_core.errors import InvalidInput


def write(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def ids(folder: Path, path: str = "") -> list[str]:
    return [file.id for file in read_folder("here", folder, path).files]


def test_documents_are_found_by_their_paths(tmp_path: Path) -> None:
    write(tmp_path, "b.md", "a/c.TXT", "a/d.py", "a/.hidden.md", ".git/e.md", "md")
    assert ids(tmp_path) == ["b.md", "a/c.TXT"]
    assert ids(tmp_path, "a") == ["c.TXT"]
    assert read_folder("here", tmp_path).skipped == 4, "a/d.py, a/.hidden.md, .git and md"


def test_a_mounted_config_map_is_read_through_its_links(tmp_path: Path) -> None:
    write(tmp_path, "..2026_01_01/a.md", "..2026_01_01/b.txt")
    (tmp_path / "..data").symlink_to("..2026_01_01")
    (tmp_path / "a.md").symlink_to("..data/a.md")
    (tmp_path / "b.txt").symlink_to("..data/b.txt")
    assert ids(tmp_path) == ["a.md", "b.txt"]


def test_links_that_lead_out_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "volume/docs/a.md", "secret.md")
    (tmp_path / "volume/docs/out.md").symlink_to(tmp_path / "secret.md")
    (tmp_path / "volume/docs/up.md").symlink_to("../../secret.md")
    (tmp_path / "volume/docs/folder").symlink_to(tmp_path)
    found = read_folder("here", tmp_path / "volume")
    assert [file.id for file in found.files] == ["docs/a.md"]
    assert [one.id for one in found.refused] == ["docs/out.md", "docs/up.md"]


@pytest.mark.parametrize("name", ["a.md", "a.jsonl"])
def test_a_file_that_becomes_a_link_out_is_not_read(tmp_path: Path, name: str) -> None:
    write(tmp_path, f"volume/docs/{name}", f"outside/{name}")
    [found] = read_folder("here", tmp_path / "volume").files
    assert read_content(found) == f"volume/docs/{name}".encode()
    (tmp_path / "volume/docs").rename(tmp_path / "volume/before")
    (tmp_path / "volume/docs").symlink_to(tmp_path / "outside")
    [document] = documents_in([found])
    with pytest.raises(InvalidInput, match="link out of its source"):
        read_content(document)


def test_a_path_that_is_a_link_out_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "volume/a.md", "else/b.md")
    (tmp_path / "volume/docs").symlink_to(tmp_path / "else")
    with pytest.raises(InvalidInput, match="leads out of the volume"):
        read_folder("here", tmp_path / "volume", "docs")


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"^here: is not there"):
        read_folder("here", tmp_path / "none")
    with pytest.raises(InvalidInput, match="holds no folder 'docs'"):
        read_folder("here", tmp_path, "docs")


def test_too_many_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_DOCUMENTS", 2)
    write(tmp_path, "a.md", "b.md", "c.md")
    with pytest.raises(InvalidInput, match="more than 2 documents"):
        ids(tmp_path)
