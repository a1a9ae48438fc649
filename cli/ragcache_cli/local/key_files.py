"""The keys of a local platform: of plans, stored values and commands, and the user's API keys."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ragcache_cli.local.placement import API_KEYS_FILE, GATEWAY_TLS_FOLDER, RUN_FOLDER
from ragcache_core.access.key_file import KEY_BYTES, hash_text, key_of
from ragcache_core.errors import InvalidInput
from ragcache_operator.builders.certificates import DAY_S, CertificateAuthority
from ragcache_wire.peers.certificates import AUTHORITIES_FILE, CERTIFICATE_FILE, KEY_FILE

_NAME: Final = "api.key"
_RUN_S: Final = 10 * 365 * DAY_S
"""How long a certificate of a local platform is valid. Each start makes another one."""
_HEAD: Final = "# API keys of this platform. Add entries with `ragcache keys new`.\n"


@contextmanager
def plan_key_file(path: Path) -> Iterator[None]:
    """Write a file with a new random key, readable by this user alone, and delete it at the end."""
    with private_file(path, f"{secrets.token_hex(KEY_BYTES)}\n"):
        yield


@contextmanager
def certificate_files(folder: Path, name: str) -> Iterator[None]:
    """Write a certificate of a new authority for one run of a platform, and delete it at the end.

    Args:
        folder: In a folder that this user alone can read.
        name: Name of the platform.
    """
    authority = CertificateAuthority(secrets.token_bytes(KEY_BYTES), name)
    made = authority.issue_for(time.time(), _RUN_S)
    folder.mkdir(mode=0o700, exist_ok=True)
    with (
        private_file(folder / AUTHORITIES_FILE, made.authorities),
        private_file(folder / KEY_FILE, made.private_key),
        private_file(folder / CERTIFICATE_FILE, made.chain),
    ):
        yield


def gateway_certificate(data: Path) -> Path:
    """Return the path of the certificate that the gateway of a data folder shows to clients."""
    return data / GATEWAY_TLS_FOLDER / CERTIFICATE_FILE


def demand_gateway_certificate(data: Path) -> None:
    """Check that the user has put the gateway's certificate into a data folder.

    Raises:
        InvalidInput: A file is missing.
    """
    certificate = gateway_certificate(data)
    key = certificate.with_name(KEY_FILE)
    for path in (certificate, key):
        if not path.is_file():
            raise InvalidInput(
                "spec.gateway.tls",
                f"needs {path} on this machine",
                f"put a certificate there, like that of `mkcert -cert-file {certificate} "
                f"-key-file {key} localhost 127.0.0.1`",
            )


@contextmanager
def private_file(path: Path, content: str) -> Iterator[None]:
    """Write a file that this user alone can read, and delete it at the end."""
    path.unlink(missing_ok=True)
    _create(path, content)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def ensure_key(path: Path) -> None:
    """Make a file with a new random key, readable by this user alone, unless it exists."""
    if not path.exists():
        _create(path, f"{secrets.token_hex(KEY_BYTES)}\n")


def _create(path: Path, content: str) -> None:
    # The file never has wider permissions, and a link is not followed.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(content)


@contextmanager
def platform_key(data: Path) -> Iterator[str]:
    """Write a new key for the commands of this user, and delete it at the end. Yield its hash."""
    key = key_of(secrets.token_bytes(KEY_BYTES))
    with private_file(data / RUN_FOLDER / _NAME, f"{key}\n"):
        yield hash_text(key)


def read_api_key(data: Path) -> str | None:
    """Return the key of the platform that runs in a folder; None if it needs no key."""
    try:
        return (data / RUN_FOLDER / _NAME).read_text().strip()
    except OSError:
        return None


def ensure_key_file(data: Path) -> None:
    """Make the file of the user, without an entry, unless it exists."""
    path = data / API_KEYS_FILE
    if not path.exists():
        path.write_text(_HEAD)
