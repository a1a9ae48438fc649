"""Certificates of platforms, in folders as ``RAGCACHE_TLS_DIR`` names them."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Final

from ragcache_operator.builders.certificates import DAY_S, CertificateAuthority, IssuedCertificate
from ragcache_wire.peers.certificates import AUTHORITIES_FILE, CERTIFICATE_FILE, KEY_FILE

NAME: Final = "docs.team.ragcache.internal"


def issue(authority: str = "ours", name: str = NAME) -> IssuedCertificate:
    """A certificate of the authority with this name, which is valid for a day."""
    secret = hashlib.sha256(authority.encode()).digest()
    return CertificateAuthority(secret, name).issue_for(time.time(), DAY_S)


def write(folder: Path, made: IssuedCertificate, authorities: str = "") -> Path:
    """Write the files of a certificate, the certificate last. Return the folder.

    authorities: that its owner trusts, in place of its own.
    """
    folder.mkdir(exist_ok=True)
    for name, content in (
        (KEY_FILE, made.private_key),
        (AUTHORITIES_FILE, authorities or made.authorities),
        (CERTIFICATE_FILE, made.chain),
    ):
        new = folder / f"{name}.new"
        new.write_text(content)
        new.replace(folder / name)
    return folder
