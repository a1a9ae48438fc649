"""Names of servers in place of their addresses, for callers that should not learn the network."""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Final
from urllib.parse import urlsplit

_NAME_CHARS: Final = 6

_IPV4: Final = r"[0-9]{1,3}(?:\.[0-9]{1,3}){3}"
_IPV6: Final = r"(?:[0-9A-Fa-f]{1,4}:){5,7}[0-9A-Fa-f]{1,4}|(?=[0-9A-Fa-f:]*?::)[0-9A-Fa-f:.]++"
_HOST: Final = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_END: Final = r"(?![\w-]|[.:][0-9])"
_ADDRESS: Final = re.compile(
    r"(?P<url>\b[a-z][a-z0-9+]{0,31}://[^\s'\"<>,;)\]]+(?:\][^\s'\"<>,;)]*)?)"
    rf"|\[(?:{_IPV6})\](?::[0-9]+)?"
    r"|%5B[0-9A-Fa-f:.]+%5D(?::[0-9]+)?"
    rf"|(?<![\w.-])(?:{_HOST}:[0-9]{{2,5}}|{_IPV4}){_END}"
    rf"|(?<![\w:.])(?:{_IPV6})(?![\w:])"
)
"""URLs, addresses with a port, and IP addresses, as errors of HTTP and gRPC libraries have them."""


class ServerNames:
    """Gives each address a name that tells nothing of it.

    Args:
        secret: Random bytes. Gateways with the same secret give the same names. Without it, an
            address could be found from its name by trying.
    """

    def __init__(self, secret: bytes) -> None:
        self._key = hmac.digest(secret, b"ragcache-server-names-1", hashlib.sha256)

    def of(self, address: str) -> str:
        """Return the name of the server at ``host:port``."""
        digest = hmac.new(self._key, address.encode(), hashlib.sha256).hexdigest()
        return f"server-{digest[:_NAME_CHARS]}"

    def replace_in(self, text: str) -> str:
        """Return a text with a name in place of each address and each URL."""
        return _ADDRESS.sub(self._replacement, text)

    def _replacement(self, found: re.Match[str]) -> str:
        address = found[0]
        if (url := found["url"]) is not None:
            try:
                # Without credentials, which are not part of the address.
                address = urlsplit(url).netloc.rpartition("@")[2] or url
            except ValueError:
                address = url
        return self.of(address)
