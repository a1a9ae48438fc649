"""Lets an API server of Kubernetes 1.20 look like one of 1.29, which the product needs.

Debian has no newer source of Kubernetes that builds an API server. Clients of the product connect
to this proxy. It reports version 1.29, serves the API versions that 1.20 has under older names with
the same fields, and removes CEL rules from definitions. All else passes through unchanged.
"""

from __future__ import annotations

import argparse
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import yaml
from aiohttp import ClientSession, ClientTimeout, StreamReader, TCPConnector, web
from yarl import URL

MINOR: Final = 29
_RENAMED: Final = {"policy/v1": "policy/v1beta1", "autoscaling/v2": "autoscaling/v2beta2"}
"""Name in the older server, by name in the newer one."""
_DISCOVERY: Final = {"/apis", "/apis/policy", "/apis/autoscaling"}
_SCHEMAS: Final = "/openapi/v2"
_DEFINITIONS: Final = "/customresourcedefinitions"
_RULES: Final = "x-kubernetes-validations"
_LARGEST_BODY: Final = 16 << 20
_DROPPED: Final = {
    *("host", "content-length", "transfer-encoding", "connection", "accept-encoding"),
    *("content-encoding", "upgrade"),
}


def main() -> None:
    """Serve until the process ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--upstream", required=True)
    parser.add_argument("--authority", type=Path, required=True)
    parser.add_argument("--certificate", type=Path, required=True)
    parser.add_argument("--key", type=Path, required=True)
    given = parser.parse_args()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(given.certificate, given.key)
    app = web.Application(client_max_size=_LARGEST_BODY)
    proxy = _Proxy(given.upstream, ssl.create_default_context(cafile=str(given.authority)))
    app.cleanup_ctx.append(proxy.connected)
    app.router.add_route("*", "/{path:.*}", proxy.handle)
    web.run_app(
        app,
        host=given.listen,
        port=given.port,
        ssl_context=context,
        print=None,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=0.1,
    )


class _Proxy:
    """Forwards requests to the older server."""

    def __init__(self, upstream: str, trust: ssl.SSLContext) -> None:
        self._upstream = upstream
        self._trust = trust

    async def connected(self, _: web.Application) -> AsyncIterator[None]:
        """Hold connections to the server while the application runs."""
        connector = TCPConnector(ssl=self._trust, limit=0)
        timeout = ClientTimeout(total=None)
        async with ClientSession(
            connector=connector, timeout=timeout, skip_auto_headers=("Accept-Encoding",)
        ) as self._session:
            yield

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Forward one request and its response."""
        old = older_path(request.raw_path)
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _DROPPED}
        body = await request.read()
        renamed = old != request.raw_path
        if renamed:
            headers["Accept"] = "application/json"
        if body and (renamed or _DEFINITIONS in old):
            body = json.dumps(older_object(yaml.safe_load(body))).encode()
        async with self._session.request(
            request.method,
            URL(self._upstream + old, encoded=True),
            headers=headers,
            data=body or None,
            allow_redirects=False,
        ) as reply:
            kept = {k: v for k, v in reply.headers.items() if k.lower() not in _DROPPED}
            if request.path == "/version" or request.path.rstrip("/") in _DISCOVERY:
                text = json.dumps(newer_answer(json.loads(await reply.read())))
                return web.Response(status=reply.status, text=text, headers=kept)
            if request.path == _SCHEMAS:
                return web.Response(
                    status=reply.status, body=without_schema(await reply.read()), headers=kept
                )
            response = web.StreamResponse(status=reply.status, headers=kept)
            await response.prepare(request)
            async for part in _lines(reply.content) if renamed else reply.content.iter_any():
                await response.write(newer_text(part) if renamed else part)
            await response.write_eof()
            return response


async def _lines(content: StreamReader) -> AsyncIterator[bytes]:
    """Yield whole lines of any length. A watch sends one object in each."""
    rest = b""
    async for part in content.iter_any():
        *lines, rest = (rest + part).splitlines(keepends=True) or [b""]
        if rest.endswith(b"\n"):
            lines, rest = [*lines, rest], b""
        for line in lines:
            yield line
    yield rest


def older_path(path: str) -> str:
    """Return the path of the older server's API version."""
    for new, old in _RENAMED.items():
        if path == f"/apis/{new}" or path.startswith((f"/apis/{new}/", f"/apis/{new}?")):
            return path.replace(new, old, 1)
    return path


def older_object(obj: Any) -> Any:
    """Return an object, or a patch, without what the older server does not know."""
    if isinstance(obj, list):
        return [older_object(item) for item in obj]
    if not isinstance(obj, dict):
        return obj
    found = {key: older_object(value) for key, value in obj.items() if key != _RULES}
    version = found.get("apiVersion")
    if isinstance(version, str):
        found["apiVersion"] = _RENAMED.get(version, version)
    return found


def newer_text(text: bytes) -> bytes:
    """Return JSON of the older server with the names of the newer one."""
    for new, old in _RENAMED.items():
        text = text.replace(f'"{old}"'.encode(), f'"{new}"'.encode())
    return text


def without_schema(schemas: bytes) -> bytes:
    """Hide the schema of definitions. Helm would reject CEL rules with it before it sends them.

    It is in protobuf, where a replacement must have the same length.
    """
    return schemas.replace(b"kind: CustomResourceDefinition\n", b"kind: Custom-ResourceDefinitio\n")


def newer_answer(answer: Any) -> Any:
    """Return the answer to a question about the server itself, as the newer server gives it."""
    if "gitVersion" in answer:
        return {**answer, "major": "1", "minor": str(MINOR), "gitVersion": f"v1.{MINOR}.0"}
    for group in answer.get("groups", [answer]):
        for new, old in _RENAMED.items():
            served = group.get("versions") or []
            if any(version["groupVersion"] == old for version in served):
                named = {"groupVersion": new, "version": new.partition("/")[2]}
                group["versions"] = [named, *served]
                group["preferredVersion"] = named
    return answer


if __name__ == "__main__":
    main()
