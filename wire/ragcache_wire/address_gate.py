"""Resolves the hosts of URLs that a user wrote, and refuses addresses that they may not have.

A client connects to the addresses that were checked. The host is not resolved again, so a name
server that gives another address later has no effect (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
import re
import socket
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from ragcache_core.access.networks import Address, AddressRules
from ragcache_core.errors import InvalidInput, Unavailable

Resolve = Callable[[str, int], list[str]]
"""Returns the addresses of a host for a port. Raises OSError."""


_PLAIN_HOST = re.compile(r"[a-z0-9_]([a-z0-9._-]*[a-z0-9_])?|[0-9a-f:.]*:[0-9a-f:.]*")


@dataclass(frozen=True, slots=True)
class CheckedRoute:
    """How a URL is reached.

    Attributes:
        addresses: Checked addresses of the host. They are all that may be connected to.
        proxy: URL of the proxy, which connects in place of this process; None without one.
    """

    host: str
    port: int
    addresses: tuple[str, ...]
    proxy: str | None = None

    @property
    def pin(self) -> str | None:
        """The route for curl's option ``resolve``; None if there is nothing to resolve."""
        if self.proxy is not None or ":" in self.host:
            return None
        addresses = ",".join(f"[{one}]" if ":" in one else one for one in self.addresses)
        return f"{self.host}:{self.port}:{addresses}"


def resolve_host(host: str, port: int) -> list[str]:
    """Return the addresses of a host, each once. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class AddressGate:
    """Decides which hosts the URLs of sources and of token issuers may have."""

    def __init__(self, rules: AddressRules, resolve: Resolve = resolve_host) -> None:
        self._rules = rules
        self._resolve = resolve

    def route(self, what: str, url: str) -> CheckedRoute:
        """Return the checked addresses of a URL's host.

        A proxy of the environment resolves hosts itself. The gate refuses what resolves to a closed
        address here, too; the proxy decides about names that only it can resolve.

        Raises:
            InvalidInput: The host has an address that such URLs may not have.
            Unavailable: The host has no address now.
        """
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        # Git and httpx read other spellings of a host in different ways.
        if not _PLAIN_HOST.fullmatch(host):
            raise InvalidInput(what, f"has the host {host!r}", "write its ASCII name or address")
        proxy = _proxy_of(parts.scheme, parts.netloc.rpartition("@")[2])
        try:
            addresses = self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            if proxy is not None:
                return CheckedRoute(host, port, (), proxy)
            raise Unavailable(what, f"the host {host} cannot be resolved ({error})") from error
        for text in addresses:
            if not self._rules.allows(_parse(text)):
                raise InvalidInput(
                    what,
                    f"leads to {host} at {text}, a closed address",
                    "name a public host, or let the cluster's administrator allow its network",
                )
        return CheckedRoute(host, port, tuple(addresses), proxy)


def _parse(text: str) -> Address:
    return ipaddress.ip_address(text.partition("%")[0])


def _proxy_of(scheme: str, host: str) -> str | None:
    if urllib.request.proxy_bypass(host):
        return None
    proxies = urllib.request.getproxies()
    found = proxies.get(scheme) or proxies.get("all")
    return found if found is None or "://" in found else f"http://{found}"
