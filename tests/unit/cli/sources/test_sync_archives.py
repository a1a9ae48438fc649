"""Untrusted archives: which members are read, and which are ignored or rejected."""

from __future__ import annotations

import contextlib
import gzip
import io
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_cli.sources import archive, reading
from ragcache_cli.sources.archive import read_tar, read_tar_gz, read_zip
from ragcache_cli.sources.documents import LARGEST_BYTES
from ragcache_cli.sources.reading import Scratch, SourceContents
from ragcache_core.errors import InvalidInput, TooLarge

MIB = 1 << 20


@pytest.fixture
def scratch(tmp_path: Path) -> Scratch:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return Scratch(folder, 64 * MIB)


def tar_gz(path: Path, files: dict[str, bytes], *more: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for info in more:
            tar.addfile(info)
    return path


def zipped(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as whole:
        for name, data in files.items():
            whole.writestr(name, data)
    return path


def test_members_that_are_no_documents_are_counted(tmp_path: Path, scratch: Scratch) -> None:
    files = {"a.md": b"a", "b.png": b"b", ".c.md": b"c", "d/e.txt": b"e"}
    link = tarfile.TarInfo("f.md")
    link.type = tarfile.SYMTYPE
    assert read_tar_gz("x", tar_gz(tmp_path / "a.tgz", files, link), scratch).skipped == 3
    assert read_zip("x", zipped(tmp_path / "a.zip", files), scratch).skipped == 2


Archive = Callable[[Path, dict[str, bytes]], SourceContents]


@pytest.fixture(params=["tar.gz", "zip"])
def read(request: pytest.FixtureRequest, scratch: Scratch) -> Archive:
    """Makes an archive of files in a folder, and reads it."""

    def make_and_read(folder: Path, files: dict[str, bytes]) -> SourceContents:
        if request.param == "zip":
            return read_zip("here", zipped(folder / "a.zip", files), scratch)
        return read_tar_gz("here", tar_gz(folder / "a.tar.gz", files), scratch)

    return make_and_read


def texts(found: SourceContents) -> dict[str, str]:
    return {file.id: file.path.read_text() for file in found.files}


def test_documents_come_out_by_their_paths(read: Archive, tmp_path: Path) -> None:
    files = {"./a.md": b"A", "docs/b.TXT": b"B", "docs/c.markdown": b"C", "docs/d.png": b"D"}
    assert texts(read(tmp_path, files)) == {"a.md": "A", "docs/b.TXT": "B", "docs/c.markdown": "C"}


def test_a_sole_top_folder_is_left_away(read: Archive, tmp_path: Path) -> None:
    files = {"handbook-1.2/a.md": b"A", "handbook-1.2/docs/b.md": b"B", "handbook-1.2/x.py": b""}
    assert set(texts(read(tmp_path, files))) == {"a.md", "docs/b.md"}


def test_a_top_folder_beside_others_stays(read: Archive, tmp_path: Path) -> None:
    assert set(texts(read(tmp_path, {"docs/a.md": b"A", "source/x.py": b""}))) == {"docs/a.md"}
    assert set(texts(read(tmp_path, {"docs/a.md": b"A", "Makefile": b""}))) == {"docs/a.md"}


def test_hidden_files_are_left_aside(read: Archive, tmp_path: Path) -> None:
    files = {".github/a.md": b"A", "docs/._b.md": b"B", "docs/c.md": b"C", "d.md": b"D"}
    assert set(texts(read(tmp_path, files))) == {"docs/c.md", "d.md"}


@pytest.mark.parametrize("name", ["../a.md", "docs/../../a.md", "/etc/a.md", "..\\a.md"])
def test_a_path_that_leads_out_condemns_the_archive(
    read: Archive, tmp_path: Path, name: str
) -> None:
    with pytest.raises(InvalidInput, match="leads out of it"):
        read(tmp_path, {"a.md": b"A", name: b"B"})
    assert not (tmp_path.parent / "a.md").exists()


def test_names_are_no_paths_here(read: Archive, tmp_path: Path, scratch: Scratch) -> None:
    long = "x" * 200 + ".md"
    found = read(tmp_path, {"a.md": b"file", "a.md/b.md": b"below a file", f"{long}/{long}": b"L"})
    assert texts(found)["a.md/b.md"] == "below a file"
    parents = {file.path.parent for file in found.files}
    assert parents == {tmp_path / "scratch"}


def test_the_last_of_one_name_stays(tmp_path: Path, scratch: Scratch) -> None:
    free = scratch.free_bytes
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for data in (b"old text", b"new"):
            info = tarfile.TarInfo("a.md")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    assert texts(read_tar_gz("here", path, scratch)) == {"a.md": "new"}
    assert scratch.free_bytes == free - len("new")


def test_links_and_devices_are_passed_over(tmp_path: Path, scratch: Scratch) -> None:
    odd = []
    for number, kind in enumerate(
        (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)
    ):
        info = tarfile.TarInfo(f"odd{number}.md")
        info.type, info.linkname = kind, "/etc/passwd"
        odd.append(info)
    found = read_tar_gz("here", tar_gz(tmp_path / "a.tgz", {"a.md": b"A"}, *odd), scratch)
    assert texts(found) == {"a.md": "A"}


def test_links_in_zips_are_passed_over(tmp_path: Path, scratch: Scratch) -> None:
    path = zipped(tmp_path / "a.zip", {"a.md": b"A"})
    with zipfile.ZipFile(path, "a") as whole:
        info = zipfile.ZipInfo("link.md")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        whole.writestr(info, "/etc/passwd")
    assert texts(read_zip("here", path, scratch)) == {"a.md": "A"}


def test_a_document_past_its_bound_is_refused_alone(
    read: Archive, tmp_path: Path, scratch: Scratch
) -> None:
    free = scratch.free_bytes
    found = read(tmp_path, {"big.md": b"x" * (LARGEST_BYTES + 1), "small.md": b"S"})
    assert texts(found) == {"small.md": "S"}
    assert [one.id for one in found.refused] == ["big.md"]
    assert scratch.free_bytes == free - 1


def test_a_bomb_meets_the_bound_of_the_scratch_folder(read: Archive, tmp_path: Path) -> None:
    files = {f"{n}.md": bytes(7 * MIB) for n in range(10)}
    with pytest.raises(TooLarge, match="more than 64 MiB"):
        read(tmp_path, files)
    assert sum(file.stat().st_size for file in (tmp_path / "scratch").iterdir()) <= 64 * MIB


def test_what_is_passed_over_counts_too(
    tmp_path: Path, scratch: Scratch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "MOST_UNPACKED_BYTES", MIB)
    path = tar_gz(tmp_path / "a.tgz", {"video.mp4": bytes(2 * MIB), "a.md": b"A"})
    with pytest.raises(TooLarge, match="unpacks to more"):
        read_tar_gz("here", path, scratch)


def test_too_many_members_are_refused(
    read: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "MOST_MEMBERS", 3)
    with pytest.raises(TooLarge, match="more than 3 files"):
        read(tmp_path, {f"{n}.bin": b"" for n in range(4)})


def test_too_many_documents_are_refused(
    read: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MOST_DOCUMENTS", 3)
    with pytest.raises(InvalidInput, match="more than 3 documents"):
        read(tmp_path, {f"{n}.md": b"A" for n in range(4)})


def test_a_header_of_absurd_length_is_refused(tmp_path: Path, scratch: Scratch) -> None:
    info = tarfile.TarInfo("header")
    info.type, info.size = tarfile.XHDTYPE, 3 << 30
    path = tmp_path / "a.tgz"
    path.write_bytes(gzip.compress(info.tobuf(tarfile.USTAR_FORMAT) + bytes(10 * 512)))
    with pytest.raises(InvalidInput, match="absurd length"):
        read_tar_gz("here", path, scratch)


def test_an_encrypted_zip_is_refused(tmp_path: Path, scratch: Scratch) -> None:
    path = zipped(tmp_path / "a.zip", {"a.md": b"A"})
    data = bytearray(path.read_bytes())
    # The flag stands in the local header and in the directory at the end.
    data[6] |= 1
    data[data.index(b"PK\1\2") + 8] |= 1
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match="is encrypted"):
        read_zip("here", path, scratch)


@pytest.mark.parametrize("read_it", [read_tar_gz, read_zip])
@pytest.mark.parametrize("data", [b"", b"<html>", gzip.compress(b"no tar at all" * 99, mtime=0)])
def test_what_is_no_archive_is_refused(
    tmp_path: Path, scratch: Scratch, read_it: Callable[..., SourceContents], data: bytes
) -> None:
    path = tmp_path / "a"
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match=r"^here: cannot be unpacked"):
        read_it("here", path, scratch)


@given(cut=st.integers(0, 400), at=st.integers(0, 400), byte=st.integers(0, 255))
def test_a_damaged_archive_is_a_mistake_or_whole(
    tmp_path_factory: pytest.TempPathFactory, cut: int, at: int, byte: int
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    files = {"docs/a.md": b"Alpha " * 20, "docs/b.md": b"Beta " * 20}
    for path, read_it in (
        (tar_gz(folder / "a.tgz", files), read_tar_gz),
        (zipped(folder / "a.zip", files), read_zip),
    ):
        data = bytearray(path.read_bytes())
        data[at % len(data)] = byte
        path.write_bytes(data[: max(0, len(data) - cut)] if cut % 2 else data)
        (folder / path.suffix).mkdir()
        # Anything but a mistake that names the source would end the whole sync.
        with contextlib.suppress(InvalidInput):
            assert len(read_it("here", path, Scratch(folder / path.suffix, MIB)).files) <= 2


def test_a_plain_stream_keeps_its_top_folder(scratch: Scratch) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        info = tarfile.TarInfo("docs/a.md")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"A"))
    stream.seek(0)
    assert texts(read_tar("here", stream, scratch)) == {"docs/a.md": "A"}
