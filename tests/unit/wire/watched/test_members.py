"""Members of the cache store: a fixed list, or a file that may change."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from ragcache_core.errors import InvalidInput
from ragcache_wire.watched.members import FileMembers, members_from
from ragcache_wire.watched.watched_file import CHECK_EVERY_S
from tests.kit.clock import ManualClock

VARIABLE = "RAGCACHE_CACHESTORE"


def listing(*members: str) -> str:
    return json.dumps({"members": members})


def mount(folder: Path, content: str, generation: int) -> Path:
    """Write as a kubelet does: a folder for each generation, and a symbolic link that it swaps."""
    data = folder / f"..{generation}"
    data.mkdir()
    (data / "cachestore.json").write_text(content)
    link = folder / "..next"
    link.symlink_to(data.name)
    os.replace(link, folder / "..data")
    path = folder / "cachestore.json"
    if not path.is_symlink():
        path.symlink_to("..data/cachestore.json")
    return path


def test_a_list_of_addresses_is_read() -> None:
    assert members_from(VARIABLE, "store:50051").current() == ("store:50051",)
    assert members_from(VARIABLE, "a:1, b:2").current() == ("a:1", "b:2")


@pytest.mark.parametrize(
    "setting", ["", "store", "store:", ":1", "a:1,", "a:1,a:1", "a:0", "a:65536", "file:relative"]
)
def test_a_wrong_setting_is_named(setting: str) -> None:
    with pytest.raises(InvalidInput, match=VARIABLE):
        members_from(VARIABLE, setting)


def test_a_swapped_mount_is_seen_within_a_second(tmp_path: Path) -> None:
    clock = ManualClock(100.0)
    members = FileMembers(mount(tmp_path, listing("a:1"), 1), clock)
    assert members.current() == ("a:1",)
    assert members.current() is members.current()
    mount(tmp_path, listing("a:1", "b:1"), 2)
    assert members.current() == ("a:1",), "checked more than once a second"
    clock.now += CHECK_EVERY_S
    assert members.current() == ("a:1", "b:1")
    mount(tmp_path, listing(), 3)
    clock.now += CHECK_EVERY_S
    assert members.current() == ()


def test_before_there_is_a_file_there_are_no_members(tmp_path: Path) -> None:
    clock = ManualClock(100.0)
    path = tmp_path / "members.json"
    members = FileMembers(path, clock)
    assert members.current() == ()
    path.write_text(listing("a:1"))
    clock.now += CHECK_EVERY_S
    assert members.current() == ("a:1",)


@pytest.mark.parametrize(
    "content",
    [None, "", "{", "[]", "{}", '{"members": "a:1"}', '{"members": [1]}', '{"members": ["a"]}',
     '{"members": ["a:1", "a:1"]}', "\x80"],
)  # fmt: skip
def test_a_bad_file_leaves_the_members_as_they_were_and_is_logged_once(
    tmp_path: Path, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock(100.0)
    path = tmp_path / "members.json"
    path.write_text(listing("a:1"))
    members = FileMembers(path, clock)
    assert members.current() == ("a:1",)
    path.unlink()
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            clock.now += CHECK_EVERY_S
            assert members.current() == ("a:1",)
    assert len(caplog.records) == 1
    path.write_text(listing("b:1"))
    clock.now += CHECK_EVERY_S
    assert members.current() == ("b:1",)
