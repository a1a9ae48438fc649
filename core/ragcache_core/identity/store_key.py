"""The platform's key of stored values: what names them, and what proves who has computed them.

Gateways and engines have it, and cache stores have not. It cannot be rotated in place as signing
keys are: under another key all values have other names. Those of before are then unreachable, and
are evicted.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

_NAMES_CONTEXT = b"ragcache-store-names-1"
_TAGS_CONTEXT = b"ragcache-store-tags-1"


@dataclass(frozen=True, slots=True)
class StoreKey:
    """Two keys that follow from one secret (HMAC-SHA256), so that neither tells of the other.

    Attributes:
        names: Key of the hashes that name chunks and prefixes (32 bytes).
        tags: Key of the authentication tags of values (32 bytes).
    """

    names: bytes = field(repr=False)
    tags: bytes = field(repr=False)

    @classmethod
    def of_secret(cls, secret: bytes) -> StoreKey:
        """Derive both keys."""
        return cls(
            hmac.digest(secret, _NAMES_CONTEXT, "sha256"),
            hmac.digest(secret, _TAGS_CONTEXT, "sha256"),
        )
