"""Refuses requests of foreign web pages, and requests for foreign host names.

A browser runs code of any site, inside the networks that its user can reach. Two checks keep that
code away from the gateway. The ``Host`` has to be a known name, because a site can have its own
name resolve to the gateway's address, and so read as the same origin (DNS rebinding). The
``Origin`` has to be the gateway's own or an allowed one, because a browser sends some requests of
any page, a form for example, without asking the gateway first.

Programs send no ``Origin``. IP addresses and names of the local machine are always allowed as
``Host``: no site can have them as its name.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from typing import Final
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ragcache_gateway.http.errors import Forbidden, response_to

ANY: Final = "*"
"""Pattern of every host and every origin."""

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_CHANGES_NOTHING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_FOREIGN_SITES: Final = frozenset({"cross-site", "same-site"})
"""Values of Sec-Fetch-Site, which no page can set, for requests of other origins."""


class BrowserGuard:
    """Answers 403 to requests with a foreign Host or Origin.

    Args:
        hosts: Host names, and ``*.NAME`` for all names below one, or ``*``.
        origins: Origins like ``https://app.example.com``, or ``*``.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], origins: Collection[str]) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            host = headers.get("host", "")
            if host and not is_allowed_host(host, self._hosts):
                error = Forbidden("Host", host, "spec.gateway.allowedHosts")
                await response_to(error)(scope, receive, send)
                return
            foreign = foreign_origin(scope["method"], headers)
            if foreign is not None and self._origins.isdisjoint({foreign, ANY}):
                error = Forbidden("Origin", foreign, "spec.gateway.allowedOrigins")
                await response_to(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def is_allowed_host(host: str, allowed: Collection[str]) -> bool:
    """Whether a Host header names the gateway.

    Args:
        allowed: Names in lower case, and ``*.NAME`` or ``*``.
    """
    if ANY in allowed:
        return True
    name = _host_name(host)
    if name is None:
        return False
    if _is_ip_address(name) or name == "localhost" or name.endswith(".localhost"):
        return True
    parents = (name[i:] for i, character in enumerate(name) if character == ".")
    return name in allowed or any(f"*{parent}" in allowed for parent in parents)


def foreign_origin(method: str, headers: Headers) -> str | None:
    """Return the origin of a page that is not the gateway's own; None for all other requests."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if site == "same-origin":
        return None
    if origin is None:
        hides_origin = site in _FOREIGN_SITES and method not in _CHANGES_NOTHING
        return "null" if hides_origin else None
    return None if _is_same_origin(origin, headers.get("host", "")) else origin


def _is_same_origin(origin: str, host: str) -> bool:
    """Whether an origin has the authority of a Host header.

    A proxy may end TLS, so the scheme of the request is not known; a missing port is the default
    one of the origin's scheme.
    """
    page, own = _split(origin), _split(f"//{host}")
    if page is None or own is None or page.scheme not in _DEFAULT_PORTS:
        return False
    default = _DEFAULT_PORTS[page.scheme]
    return (page.hostname, page.port or default) == (own.hostname, own.port or default)


def _host_name(host: str) -> str | None:
    """Return the name in a Host header in lower case; None if it is not a host and a port."""
    parts = _split(f"//{host}")
    if parts is None or parts.netloc != host or "@" in host or not parts.hostname:
        return None
    return parts.hostname.rstrip(".")


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        _ = parts.port  # parsed when it is read
    except ValueError:
        return None
    return parts


def _is_ip_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
