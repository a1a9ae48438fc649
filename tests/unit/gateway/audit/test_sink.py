"""Files of the audit log: appended to, rotated, and complete after failures."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ragcache_core.access.audit import encode_line
from ragcache_core.access.audit_files import STOPPED_S
from ragcache_core.errors import InvalidInput
from ragcache_gateway.audit.sink import NUM_FILES, FileSink, StreamSink


def write(sink: StreamSink, lines: bytes) -> None:
    sink.add(lines)
    sink.flush()


def all_lines(folder: Path) -> list[bytes]:
    """Return the lines of all files: full ones by their time, then the open one."""
    files = sorted(folder.iterdir(), key=lambda one: (one.name == "g.jsonl", one.name))
    return b"".join(one.read_bytes() for one in files).splitlines()


def test_a_file_is_private_and_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "new" / "g.jsonl"
    for number in range(2):
        sink = FileSink(path, 1 << 20)
        write(sink, b"%d\n" % number)
        sink.close()
    assert path.read_bytes() == b"0\n1\n"
    assert path.stat().st_mode & 0o777 == 0o600


def test_full_files_are_renamed_and_the_oldest_are_deleted(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "g.jsonl", NUM_FILES * 100)
    for number in range(100):
        write(sink, b"%048d\n" % number)
    files = list(tmp_path.iterdir())
    assert len(files) == NUM_FILES
    assert sum(one.stat().st_size for one in files) <= NUM_FILES * 100
    numbers = list(map(int, all_lines(tmp_path)))
    assert numbers == list(range(numbers[0], 100)), "the latest ones, in order and complete"


def test_a_file_that_was_moved_away_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "g.jsonl"
    sink = FileSink(path, 1 << 20)
    write(sink, b"a\n")
    path.rename(tmp_path / "moved")
    write(sink, b"b\n")
    assert (tmp_path / "moved").read_bytes() == b"a\n"
    assert path.read_bytes() == b"b\n"


def test_lines_that_a_full_disk_cuts_are_completed_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = FileSink(tmp_path / "g.jsonl", 1 << 20)
    real = os.write
    room = [3]

    def write_some(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        written = real(descriptor, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", write_some)
    sink.add(b"first\n")
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            sink.flush()
    sink.add(b"second\n")
    room[0] = 100
    sink.flush()
    assert all_lines(tmp_path) == [b"first", b"second"]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch()
    (tmp_path / "g.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidInput, match="RAGCACHE_AUDIT"):
        FileSink(tmp_path / "g.jsonl", 1 << 20)


def test_a_folder_that_cannot_be_written_is_an_error_of_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match="name a file in a folder"):
        FileSink(tmp_path / "file" / "g.jsonl", 1 << 20)


def test_files_of_stopped_gateways_are_deleted_and_other_files_stay(tmp_path: Path) -> None:
    line = encode_line({"action": "search"})
    names = ["a", "a-01700000000000000000", "b", "other", "old"]
    for age, name in enumerate(names):
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(b"{}\n" if name == "other" else line * 10)
        changed_s = time.time() - STOPPED_S * 2 + age
        os.utime(path, (changed_s, changed_s))
    target = tmp_path.parent / f"{tmp_path.name}-target"
    target.write_bytes(line)
    (tmp_path / "link.jsonl").symlink_to(target)
    (tmp_path / "running.jsonl").write_bytes(line * 100)
    sink = FileSink(tmp_path / "g.jsonl", 20 * len(line))
    sink.close()
    assert {one.stem for one in tmp_path.iterdir()} == {"b", "other", "old", "link", "running", "g"}
    assert target.exists()


def test_files_of_stopped_gateways_are_deleted_when_a_file_is_full(tmp_path: Path) -> None:
    line = encode_line({"action": "search"})
    sink = FileSink(tmp_path / "g.jsonl", NUM_FILES * len(line))
    left = tmp_path / "a.jsonl"
    left.write_bytes(line * (NUM_FILES + 1))
    os.utime(left, (1, 1))
    write(sink, line)
    assert left.exists()
    write(sink, line)
    assert not left.exists()
    sink.close()
