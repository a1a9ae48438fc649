"""What commands know of each other through the data folder."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ragcache_cli.local.state_file import (
    ComponentRecord,
    PlatformRecord,
    find_data,
    only_supervisor,
    read_record,
    remove_record,
    write_record,
)
from ragcache_core.errors import InvalidInput

ME = PlatformRecord(
    name="docs",
    pid=os.getpid(),
    started=psutil.Process().create_time(),
    phase="ready",
    gateway_url="http://127.0.0.1:8080",
    model="tinyrag",
    parts=(
        ComponentRecord(
            "gateway", "gateway", 1, 2.0, "ready", "", 0, {"http": "127.0.0.1:1"}, "log"
        ),
        ComponentRecord("cachestore", "cachestore", 0, 0.0, "waiting", "", 0, {}, "log"),
    ),
)


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    write_record(tmp_path, ME)
    assert read_record(tmp_path) == ME
    assert ME.supervisor_lives
    assert ME.leaders == {1: 2.0}
    remove_record(tmp_path)
    assert read_record(tmp_path) is None


def test_a_process_that_took_the_number_is_a_stranger() -> None:
    assert not replace(ME, started=ME.started - 60).supervisor_lives


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 0}', '{"format": 1, "x": 1}'])
def test_a_record_of_another_version_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_record(tmp_path)


def test_the_one_that_runs_is_meant(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="nothing runs in"):
        find_data(None, tmp_path)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    write_record(tmp_path / "one", replace(ME, started=1.0))
    assert find_data(None, tmp_path)[0] == tmp_path / "one"
    write_record(tmp_path / "two", ME)
    assert find_data(None, tmp_path) == (tmp_path / "two", ME)
    assert find_data(tmp_path / "one", tmp_path)[0] == tmp_path / "one"
    write_record(tmp_path / "one", ME)
    several = rf"several are running: .*one at {ME.gateway_url}, .*two at .*; say which with --data"
    with pytest.raises(InvalidInput, match=several):
        find_data(None, tmp_path)
    with pytest.raises(InvalidInput, match=r"^--gateway: .*; say which with --gateway$"):
        find_data(None, tmp_path, "--gateway")


def test_a_folder_has_one_supervisor(tmp_path: Path) -> None:
    with (
        only_supervisor(tmp_path),
        pytest.raises(InvalidInput, match="already runs in"),
        only_supervisor(tmp_path),
    ):
        pytest.fail("the folder is held")
    with only_supervisor(tmp_path):
        pass
