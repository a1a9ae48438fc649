"""Certificates in a folder: what is read, what is refused, and how they are renewed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragcache_core.errors import InvalidInput
from ragcache_wire.peers.certificates import CERTIFICATE_FILE, KEY_FILE, Certificates
from tests.kit.certificates import NAME, issue, write
from tests.kit.clock import ManualClock


def test_a_changed_certificate_is_read_and_a_damaged_one_is_not(tmp_path: Path) -> None:
    folder, clock = write(tmp_path / "tls", issue("one")), ManualClock()
    found = Certificates(folder, clock)
    first = found.current()
    assert first.name == NAME
    clock.sleep(2)
    assert found.current() is first, "nothing has changed"
    write(folder, issue("two"))
    clock.sleep(2)
    second = found.current()
    assert second.chain != first.chain
    (folder / CERTIFICATE_FILE).write_text("no certificate")
    clock.sleep(2)
    assert found.current() is second
    assert found.is_stale


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "tls", issue("one"))
    (folder / KEY_FILE).write_text(issue("two").private_key)
    with pytest.raises(InvalidInput, match=r"^RAGCACHE_TLS_DIR: .*cannot be used"):
        Certificates(folder)


def test_the_files_are_of_one_state_while_kubernetes_swaps_the_folder(tmp_path: Path) -> None:
    """A mounted Secret has links to ``..data``, a link to the folder of the current state."""
    clock, mount = ManualClock(), tmp_path / "tls"
    mount.mkdir()
    write(mount / "..one", issue("one"))
    data = mount / "..data"
    data.symlink_to("..one")
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (mount / name).symlink_to(f"..data/{name}")
    found = Certificates(mount, clock)
    before = found.current()
    second = issue("two")
    write(mount / "..two", second)
    new = mount / "..data_tmp"
    new.symlink_to("..two")
    new.replace(data)
    clock.sleep(2)
    assert found.current().chain == second.chain.encode() != before.chain


def test_no_text_shows_the_private_key(tmp_path: Path) -> None:
    made = issue()
    found = Certificates(write(tmp_path / "tls", made)).current()
    assert "PRIVATE KEY" not in repr(found)
    assert "PRIVATE KEY" not in repr(made)
