"""Signing keys in a file that may change."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ragcache_core.errors import InvalidInput
from ragcache_wire.watched.signing_keys import SigningKeys
from ragcache_wire.watched.watched_file import CHECK_EVERY_S
from tests.kit.clock import ManualClock

ONE, TWO = bytes([1] * 32), bytes([2] * 32)


def write(path: Path, *keys: bytes) -> Path:
    path.write_text("".join(f"{key.hex()}\n" for key in keys))
    return path


def test_a_rotation_is_seen_within_a_second(tmp_path: Path) -> None:
    clock = ManualClock(100.0)
    keys = SigningKeys(write(tmp_path / "keys", ONE), clock)
    for now in ((ONE, TWO), (TWO, ONE), (TWO,)):
        write(tmp_path / "keys.next", *now).replace(tmp_path / "keys")
        clock.now += CHECK_EVERY_S
        assert keys.current() == now
    assert CHECK_EVERY_S <= 1


@pytest.mark.parametrize("content", [None, b"", b"short", b"ab" * 31])
def test_a_bad_file_leaves_the_keys_as_they_were(
    tmp_path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock(100.0)
    path = write(tmp_path / "keys", ONE)
    keys = SigningKeys(path, clock)
    assert keys.current() == (ONE,)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            clock.now += CHECK_EVERY_S
            assert keys.current() == (ONE,)
    [line] = caplog.messages
    assert line.startswith("watched file: reload failed name=signing keys kept=1 keys error=")
    assert ONE.hex() not in line
    write(path, TWO)
    clock.now += CHECK_EVERY_S
    assert keys.current() == (TWO,)


def test_a_bad_file_is_refused_at_the_start(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_text("secret\n")
    for path in (tmp_path / "none", tmp_path, bad):
        with pytest.raises(InvalidInput, match=r"^RAGCACHE_SIGNING_KEY_FILE: "):
            SigningKeys(path)
    assert SigningKeys(write(tmp_path / "good", ONE, TWO)).current() == (ONE, TWO)
