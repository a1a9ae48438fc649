"""The API keys of the operator's own clients: its self-test, and the Jobs that sync collections.

They follow from one root key of the operator and the uid of a RagCache. So the operator needs to
read no Secret of a namespace, and a gateway knows only the hashes, which are no secret.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Final

from ragcache_core.access.key_file import BUILTIN_SCOPES, KEY_BYTES, hash_text, key_of

OPERATOR: Final = "operator"
SYNC: Final = "sync"


@dataclass(frozen=True, slots=True)
class ComponentKeys:
    """The keys of one operator.

    Args:
        root: Random bytes that only the operator has.
    """

    root: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.root) < KEY_BYTES:
            raise ValueError(f"the root key has {len(self.root)} bytes, and needs {KEY_BYTES}")

    def key(self, client: str, uid: str) -> str:
        """Return the key of a client for the RagCache of this uid."""
        text = f"ragcache-component-key-1\0{client}\0{uid}"
        return key_of(hmac.new(self.root, text.encode(), hashlib.sha256).digest())

    def hashes(self, uid: str) -> str:
        """Return the gateway's setting of built-in keys."""
        return ",".join(f"{name}={hash_text(self.key(name, uid))}" for name in BUILTIN_SCOPES)
