"""Who may call a part of the platform."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ragcache_core.errors import Unauthenticated
from ragcache_core.identity.peer_token import MAX_CLOCK_SKEW_S, TOKEN_LIFETIME_S, token_problem
from ragcache_wire.clients.feed_client import ENGINE_FEED, SHARD_FEED
from ragcache_wire.peers import peer_access
from ragcache_wire.peers.peer_access import (
    TOKEN_METADATA,
    TOKEN_REUSE_S,
    PeerGuard,
    PeerTokens,
    is_loopback,
    proof_for,
)
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


def guard(keys: SigningKeys | None, listen: str = OPEN, now_s: float = NOW_S) -> PeerGuard:
    return PeerGuard(keys, listen, clock=lambda: now_s)


def token(keys: SigningKeys | None, method: str = ENGINE_FEED) -> tuple[tuple[str, str], ...]:
    return PeerTokens(keys, lambda: NOW_S).metadata(method)


def test_a_caller_with_a_key_is_admitted(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys", OLD).keys
    guard(keys).check(ENGINE_FEED, token(keys))


def test_a_caller_with_another_key_or_for_another_method_is_refused(tmp_path: Path) -> None:
    keys, others = KeyFile(tmp_path / "a", OLD).keys, KeyFile(tmp_path / "b", NEW).keys
    for metadata in (
        token(others),
        token(keys, SHARD_FEED),
    ):
        with pytest.raises(Unauthenticated, match="not signed"):
            guard(keys).check(ENGINE_FEED, metadata)


def test_a_caller_without_a_token_is_told_what_to_set(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys", OLD).keys
    for metadata in (None, (), ((TOKEN_METADATA, b"binary"),), token(None)):
        with pytest.raises(Unauthenticated, match="RAGCACHE_SIGNING_KEY_FILE of the caller"):
            guard(keys).check(ENGINE_FEED, metadata)
    both = 2 * token(keys)
    with pytest.raises(Unauthenticated, match="missing"):
        guard(keys).check(ENGINE_FEED, both)


def test_a_captured_token_is_refused_after_its_time(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys", OLD).keys
    captured = token(keys)
    later_s = NOW_S + TOKEN_LIFETIME_S + MAX_CLOCK_SKEW_S + 1
    with pytest.raises(Unauthenticated, match="expired"):
        guard(keys, now_s=later_s).check(ENGINE_FEED, captured)


def test_keys_are_rotated_while_both_sides_run(tmp_path: Path) -> None:
    reader, source = KeyFile(tmp_path / "reader", OLD), KeyFile(tmp_path / "source", OLD)

    def check() -> None:
        guard(source.keys).check(ENGINE_FEED, token(reader.keys))

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


def test_without_keys_a_service_has_callers_on_loopback_only() -> None:
    for listen in ("127.0.0.1:80", "[::1]:80", "localhost:80", "127.8.0.1:80"):
        assert is_loopback(listen)
        guard(None, listen).check(ENGINE_FEED, None)
    for listen in (OPEN, "[::]:80", "10.1.2.3:80", "engine:80"):
        with pytest.raises(Unauthenticated, match="RAGCACHE_SIGNING_KEY_FILE of this service"):
            guard(None, listen).check(ENGINE_FEED, None)


def test_a_token_is_made_once_and_verified_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, now_s, verified = KeyFile(tmp_path / "keys", OLD).keys, [NOW_S], []

    def count(*args: Any) -> str | None:
        verified.append(args)
        return token_problem(*args)

    monkeypatch.setattr(peer_access, "token_problem", count)
    tokens, door = PeerTokens(keys, lambda: now_s[0]), PeerGuard(keys, OPEN, lambda: now_s[0])
    first = tokens.metadata(ENGINE_FEED)
    for _ in range(5):
        assert tokens.metadata(ENGINE_FEED) is first
        door.check(ENGINE_FEED, first)
    assert len(verified) == 1
    with pytest.raises(Unauthenticated, match="not signed"):
        door.check(SHARD_FEED, first)
    now_s[0] += TOKEN_REUSE_S
    assert tokens.metadata(ENGINE_FEED) != first
    door.check(ENGINE_FEED, first)
    now_s[0] += TOKEN_LIFETIME_S + MAX_CLOCK_SKEW_S
    with pytest.raises(Unauthenticated, match="expired"):
        door.check(ENGINE_FEED, first)


def test_a_verified_token_ends_with_its_key(tmp_path: Path) -> None:
    own = KeyFile(tmp_path / "keys", OLD)
    door, sent = guard(own.keys), token(own.keys)
    door.check(ENGINE_FEED, sent)
    own.rotate(NEW)
    with pytest.raises(Unauthenticated, match="not signed"):
        door.check(ENGINE_FEED, sent)


def test_a_guard_keeps_a_bounded_number_of_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_access, "MAX_ADMITTED", 3)
    keys = KeyFile(tmp_path / "keys", OLD).keys
    door = guard(keys)
    for _ in range(10):
        door.check(ENGINE_FEED, token(keys))
    assert len(door._admitted[1]) <= 3


def test_a_proof_is_for_one_challenge_and_one_store(tmp_path: Path) -> None:
    keys, others = KeyFile(tmp_path / "a", OLD).keys, KeyFile(tmp_path / "b", NEW).keys
    challenge, store = bytes(32), b"s" * 16
    door = guard(keys)
    door.check_proof(proof_for(keys, challenge, store), challenge, store)
    for wrong in (
        b"",
        proof_for(None, challenge, store),
        proof_for(others, challenge, store),
        proof_for(keys, b"1" * 32, store),
        proof_for(keys, challenge, b"t" * 16),
    ):
        with pytest.raises(Unauthenticated, match="proof"):
            door.check_proof(wrong, challenge, store)
    guard(None, "127.0.0.1:1").check_proof(b"", challenge, store)
    with pytest.raises(Unauthenticated, match="of this service"):
        guard(None).check_proof(b"", challenge, store)
