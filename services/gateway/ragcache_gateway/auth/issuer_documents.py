"""Reads the JSON documents of token issuers: their discovery document and their public keys.

The host of each URL has to pass the gate, and the connection goes to an address that was checked.
No redirect is followed, and a document that is large or slow is refused.

Source: OpenID Connect Discovery 1.0, section 4.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from ragcache_core.access.token_claims import TokenIssuer
from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_wire.address_gate import AddressGate

MAX_DOCUMENT_BYTES: Final = 256 << 10
READ_TIMEOUT_S: Final = 10.0
"""Time for one document, from the name server's answer to the last byte."""
_WAIT_S: Final = 5.0
"""Longest wait for a connection or for a part of the document."""
_DISCOVERY_PATH: Final = "/.well-known/openid-configuration"


class IssuerDocuments:
    """Reads the documents of issuers, for one event loop."""

    def __init__(self, gate: AddressGate) -> None:
        self._gate = gate

    async def keys_of(self, issuer: TokenIssuer) -> list[Any]:
        """Return the JSON Web Keys that an issuer publishes, not checked yet.

        Raises:
            Unavailable, InvalidInput: They cannot be read.
        """
        url = issuer.jwks_url
        if url is None:
            found = await self._read(issuer.issuer.rstrip("/") + _DISCOVERY_PATH)
            if found.get("issuer") != issuer.issuer:
                raise Unavailable("issuer", "its discovery document is that of another issuer")
            url = found.get("jwks_uri")
        if not isinstance(url, str) or not _is_safe(url, issuer.issuer):
            raise Unavailable("issuer", "its discovery document has no https URL of keys")
        keys = (await self._read(url)).get("keys")
        if not isinstance(keys, list):
            raise Unavailable("issuer", "its document of keys has no list of keys")
        return keys

    async def _read(self, url: str) -> dict[str, Any]:
        """Return the JSON object at a URL. Raises Unavailable or InvalidInput."""
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                content = await self._content(url)
            found = json.loads(content)
        except TimeoutError as error:
            raise Unavailable("issuer", f"{url} did not arrive in time") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unavailable("issuer", f"{url} cannot be read ({error})") from error
        except (ValueError, RecursionError) as error:
            raise Unavailable("issuer", f"{url} has no JSON") from error
        if not isinstance(found, dict):
            raise Unavailable("issuer", f"{url} has no JSON object")
        return found

    async def _content(self, url: str) -> bytes:
        """Return what a URL has, from the first address that accepts a connection."""
        try:
            route = await asyncio.to_thread(self._gate.route, "issuer", url)
        except ValueError as error:
            raise InvalidInput("issuer", f"{url} is no URL", "correct it") from error
        named = httpx.URL(url)
        # As sources of collections: the name is checked, and its address is connected to.
        targets = [named.copy_with(host=one) for one in route.addresses]
        headers = {"Accept-Encoding": "identity", "Host": named.netloc.decode("ascii")}
        transport = httpx.AsyncHTTPTransport(proxy=route.proxy)
        async with httpx.AsyncClient(transport=transport, timeout=_WAIT_S) as client:
            *others, last = [named] if route.proxy else targets
            for target in others:
                try:
                    return await self._get(client, target, headers, route.host)
                except httpx.ConnectError:
                    continue
            return await self._get(client, last, headers, route.host)

    async def _get(
        self, client: httpx.AsyncClient, url: httpx.URL, headers: dict[str, str], host: str
    ) -> bytes:
        request = client.build_request(
            "GET", url, headers=headers, extensions={"sni_hostname": host}
        )
        reply = await client.send(request, stream=True)
        try:
            if reply.status_code != httpx.codes.OK:
                raise Unavailable("issuer", f"{host} answers {reply.status_code}")
            content = b""
            async for part in reply.aiter_raw():
                content += part
                if len(content) > MAX_DOCUMENT_BYTES:
                    size = f"over {MAX_DOCUMENT_BYTES >> 10} KiB"
                    raise Unavailable("issuer", f"a document of {host} has {size}")
            return content
        finally:
            await reply.aclose()


def _is_safe(url: str, issuer: str) -> bool:
    """Whether keys may come from a URL: by https, or by http for an issuer on this machine."""
    scheme = urlsplit(url).scheme
    return scheme == "https" or (scheme == "http" and urlsplit(issuer).scheme == "http")
