"""An API key in a file that may come later and change."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ragcache_wire.watched.bearer_key import BearerKey
from ragcache_wire.watched.watched_file import CHECK_EVERY_S
from tests.kit.clock import ManualClock


def test_a_key_may_come_later_and_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock, path = ManualClock(100.0), tmp_path / "key"
    key = BearerKey(path, clock)
    with caplog.at_level(logging.DEBUG):
        for content, found in (
            (None, ""),
            (b"sk-one\n", "sk-one"),
            (b"two\r\nX-Other: 1", "sk-one"),
            (b" \n", "sk-one"),
            (b"sk-two", "sk-two"),
        ):
            if content is not None:
                path.write_bytes(content)
            clock.now += CHECK_EVERY_S
            assert key.current() == found
    assert not any("sk-" in line or "two" in line for line in caplog.messages)


def test_a_servers_text_does_not_show_the_key(tmp_path: Path) -> None:
    path = tmp_path / "key"
    key = BearerKey(path)
    assert key.hidden_in(b"no key: sk-one") == b"no key: sk-one"
    path.write_text("sk-one")
    assert BearerKey(path).hidden_in(b"wrong: sk-one, sk-one") == b"wrong: ***, ***"
