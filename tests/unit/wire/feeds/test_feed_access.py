"""Who may read a feed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragcache_core.errors import Unauthenticated
from ragcache_core.identity.feed_token import MAX_CLOCK_SKEW_S, TOKEN_LIFETIME_S
from ragcache_wire.clients.feed_client import ENGINE_FEED, SHARD_FEED
from ragcache_wire.feeds.feed_access import TOKEN_METADATA, FeedGuard, feed_metadata, is_loopback
from ragcache_wire.watched.signing_keys import SigningKeys
from ragcache_wire.watched.watched_file import CHECK_EVERY_S

OPEN = "0.0.0.0:9000"
OLD, NEW = "a1" * 32, "b2" * 32
NOW_S = 1_800_000_000.0


class KeyFile:
    """A key file, and keys that read it again when their clock has moved."""

    def __init__(self, path: Path, *keys: str) -> None:
        self.path = path
        self.now_s = 0.0
        self.path.write_text("\n".join(keys))
        self.keys = SigningKeys(path, clock=lambda: self.now_s)

    def rotate(self, *keys: str) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text("\n".join(keys))
        fresh.rename(self.path)
        self.now_s += 2 * CHECK_EVERY_S


def guard(keys: SigningKeys | None, listen: str = OPEN, now_s: float = NOW_S) -> FeedGuard:
    return FeedGuard(keys, listen, ENGINE_FEED, clock=lambda: now_s)


def test_a_caller_with_a_key_is_admitted(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys", OLD).keys
    guard(keys).check(feed_metadata(keys, ENGINE_FEED, lambda: NOW_S))


def test_a_caller_with_another_key_or_for_another_method_is_refused(tmp_path: Path) -> None:
    keys, others = KeyFile(tmp_path / "a", OLD).keys, KeyFile(tmp_path / "b", NEW).keys
    for metadata in (
        feed_metadata(others, ENGINE_FEED, lambda: NOW_S),
        feed_metadata(keys, SHARD_FEED, lambda: NOW_S),
    ):
        with pytest.raises(Unauthenticated, match="not signed"):
            guard(keys).check(metadata)


def test_a_caller_without_a_token_is_told_what_to_set(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys", OLD).keys
    for metadata in (None, (), ((TOKEN_METADATA, b"binary"),), feed_metadata(None, ENGINE_FEED)):
        with pytest.raises(Unauthenticated, match="RAGCACHE_SIGNING_KEY_FILE of the caller"):
            guard(keys).check(metadata)
    both = 2 * feed_metadata(keys, ENGINE_FEED, lambda: NOW_S)
    with pytest.raises(Unauthenticated, match="missing"):
        guard(keys).check(both)


def test_a_captured_token_is_refused_after_its_time(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys", OLD).keys
    captured = feed_metadata(keys, ENGINE_FEED, lambda: NOW_S)
    later_s = NOW_S + TOKEN_LIFETIME_S + MAX_CLOCK_SKEW_S + 1
    with pytest.raises(Unauthenticated, match="expired"):
        guard(keys, now_s=later_s).check(captured)


def test_keys_are_rotated_while_both_sides_run(tmp_path: Path) -> None:
    reader, source = KeyFile(tmp_path / "reader", OLD), KeyFile(tmp_path / "source", OLD)

    def check() -> None:
        guard(source.keys).check(feed_metadata(reader.keys, ENGINE_FEED, lambda: NOW_S))

    check()
    source.rotate(OLD, NEW)
    check()
    reader.rotate(NEW, OLD)
    check()
    source.rotate(NEW)
    check()
    reader.rotate(OLD)
    with pytest.raises(Unauthenticated):
        check()


def test_without_keys_a_feed_is_served_on_loopback_only() -> None:
    for listen in ("127.0.0.1:80", "[::1]:80", "localhost:80", "127.8.0.1:80"):
        assert is_loopback(listen)
        guard(None, listen).check(None)
    for listen in (OPEN, "[::]:80", "10.1.2.3:80", "engine:80"):
        with pytest.raises(Unauthenticated, match="RAGCACHE_SIGNING_KEY_FILE of this service"):
            guard(None, listen).check(None)
