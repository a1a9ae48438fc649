"""A server's certificate for its users."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from ragcache_core.errors import InvalidInput
from ragcache_wire.peers.certificates import KEY_FILE
from ragcache_wire.watched.server_certificate import ServerCertificate
from tests.kit.certificates import issue, write


def test_a_key_with_a_passphrase_is_refused_without_a_question(tmp_path: Path) -> None:
    folder = write(tmp_path / "served", issue())
    ServerCertificate(folder, "spec.gateway.tls")
    key = load_pem_private_key((folder / KEY_FILE).read_bytes(), None)
    locked = key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"a passphrase")
    )
    (folder / KEY_FILE).write_bytes(locked)
    with pytest.raises(InvalidInput, match=r"spec\.gateway\.tls"):
        ServerCertificate(folder, "spec.gateway.tls")
