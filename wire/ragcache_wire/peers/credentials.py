"""What a part of a platform shows to the other parts, and checks of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ragcache_wire.peers.certificates import Certificates
from ragcache_wire.watched.signing_keys import SigningKeys


@dataclass(frozen=True, slots=True)
class Credentials:
    """The signing keys of a platform, and the certificate of one of its parts.

    Args:
        keys: Calls carry tokens under the first key. None: they carry none.
        certificates: Connections are encrypted, and both ends show a certificate. None: they are
            plain.
    """

    keys: SigningKeys | None = None
    certificates: Certificates | None = None


NO_CREDENTIALS: Final = Credentials()
