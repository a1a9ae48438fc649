"""A folder's files are selected or skipped with a reason; none is passed over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ragcache_cli.sources.documents import Selection, read_fields, select
from ragcache_cli.sources.skipped import SkippedFile, SkipReason, counts_of, summary_of
from ragcache_core.errors import InvalidInput


def write(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def skipped_in(selection: Selection, folder: Path) -> dict[str, SkipReason]:
    return {Path(one.name).relative_to(folder).as_posix(): one.reason for one in selection.skipped}


def test_every_file_is_selected_or_skipped(tmp_path: Path) -> None:
    write(tmp_path, "a.md", "b/c.csv", "b/d.rst", "b/Makefile", "e.PNG", ".env", ".git/f.md")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "link.md").symlink_to("a.md")
    (tmp_path / "broken.md").symlink_to("none.md")
    (tmp_path / "circle").symlink_to(tmp_path)
    selection = select([tmp_path])
    assert [one.id for one in selection.files] == ["a.md", "b/c.csv", "b/d.rst", "link.md"]
    assert skipped_in(selection, tmp_path) == {
        "b/Makefile": SkipReason.OTHER_KIND,
        "e.PNG": SkipReason.OTHER_KIND,
        ".env": SkipReason.HIDDEN,
        ".git": SkipReason.HIDDEN,
        "pipe.txt": SkipReason.NO_FILE,
        "broken.md": SkipReason.NO_FILE,
        "circle": SkipReason.NO_FILE,
    }


def test_a_folder_that_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "open/a.md", "closed/b.md")
    scandir = os.scandir

    def guarded(path: str) -> object:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    selection = select([tmp_path])
    assert [one.id for one in selection.files] == ["open/a.md"]
    assert [str(one) for one in selection.refused] == [
        f"{tmp_path}/closed: cannot be read: Permission denied; check its permissions"
    ]


def test_a_summary_has_a_line_for_each_reason() -> None:
    few = [SkippedFile("a.png", SkipReason.OTHER_KIND), SkippedFile(".git", SkipReason.HIDDEN)]
    assert list(summary_of(few)) == ["1 of another kind: a.png", "1 hidden: .git"]
    assert counts_of(few) == {"other_kind": 1, "hidden": 1}
    assert list(summary_of([])) == []


def test_a_long_summary_names_kinds_and_the_first_files() -> None:
    names = [f"{i}.png" for i in range(1200)] + [f"{i}.zip" for i in range(3)] + ["Makefile"]
    (line,) = summary_of(SkippedFile(name, SkipReason.OTHER_KIND) for name in names)
    assert line == (
        "1,204 of another kind (1,200 .png, 3 .zip, 1 no suffix): "
        "0.png, 1.png, 2.png, 3.png, 4.png and 1,199 more"
    )


@pytest.mark.parametrize(("line", "name"), [('{"id": 1001}', "1001"), ('{"id": "a"}', "a")])
def test_the_id_of_a_line_may_be_a_number(tmp_path: Path, line: str, name: str) -> None:
    (tmp_path / "a.jsonl").write_text(line)
    [file] = select([tmp_path]).files
    assert read_fields(file)["id"] == name


@pytest.mark.parametrize("line", ['{"id": true}', '{"id": null}', "{}", "[]"])
def test_a_line_without_an_id_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text(line)
    [file] = select([tmp_path]).files
    with pytest.raises(InvalidInput, match="has no id"):
        read_fields(file)
