"""Where the API server asks: HTTPS behind a Service, with a certificate that changes as it runs.

Kopf's own server knows only URLs, and starts anew for a new certificate, which fails the requests
of that moment. This one loads it into the listening socket: connections stay, new ones get it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Self

import kopf
from aiohttp import web

from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_operator.webhooks.certificates import Bundle, Certificate

log = logging.getLogger(__name__)

# A review carries an object twice, each as large as the API server stores: 1.5 MiB.
_LARGEST_REVIEW_BYTES = 8 << 20
_RETRY_S = 10.0

ClientConfigFactory = Callable[[str], kopf.WebhookClientConfig]
"""How the API server reaches this server, given the caBundle it is to trust."""


def service_client_config(service: str, namespace: str, port: int = 443) -> ClientConfigFactory:
    """A Service in front of this server."""

    def endpoint(ca_bundle: str) -> kopf.WebhookClientConfig:
        return {
            "service": {"name": service, "namespace": namespace, "port": port},
            "caBundle": ca_bundle,
        }

    return endpoint


def url_client_config(url: str) -> ClientConfigFactory:
    """A URL, for an operator that runs outside the cluster."""

    def endpoint(ca_bundle: str) -> kopf.WebhookClientConfig:
        return {"url": url, "caBundle": ca_bundle}

    return endpoint


class WebhookServer:
    """Kopf's admission server (``settings.admission.server``) for as long as its context.

    certificates: the bundle to serve now, given the one that is served. announce: tells the API
    server about a clientConfig; it is called again and again, and heals what others changed. Both
    raise RagCacheError when that fails now. port: 0 for a free one. poll_s: between two looks at
    the certificates; jitter, in [0, 1], makes it up to a fifth longer.
    """

    def __init__(
        self,
        *,
        certificates: Callable[[Bundle | None], Awaitable[Bundle]],
        announce: Callable[[kopf.WebhookClientConfig], Awaitable[None]],
        endpoint: ClientConfigFactory,
        port: int = 9443,
        poll_s: float = 300.0,
        jitter: Callable[[], float],
    ) -> None:
        self._certificates = certificates
        self._announce = announce
        self._endpoint = endpoint
        self._port = port
        self._poll_s = poll_s
        self._jitter = jitter
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        runner, self._runner = self._runner, None
        if runner is None:
            return
        assert runner.server is not None
        transports = [connection.transport for connection in runner.server.connections]
        await runner.cleanup()
        # Every request is answered; a TLS farewell is not worth waiting for.
        for transport in transports:
            if transport is not None:
                transport.abort()

    async def __call__(self, fn: kopf.WebhookFn) -> AsyncIterator[kopf.WebhookClientConfig]:
        """Serve fn; gives the configuration, and again whenever the authorities change."""
        served: Bundle | None = None
        announced: kopf.WebhookClientConfig | None = None
        problem = ""
        while True:
            wait_s = self._poll_s
            try:
                bundle = await self._certificates(served)
                config = self._endpoint(bundle.ca_bundle)
                if served is None:
                    # Asked before it listens, it would refuse.
                    load_certificate(self._tls, bundle.serving)
                    self._runner = await self._listen(fn)
                    served = bundle
                # An authority is known before its certificate is served.
                await self._announce(config)
                if bundle != served:
                    load_certificate(self._tls, bundle.serving)
                    served = bundle
            except RagCacheError as error:
                if str(error) != problem:
                    problem = str(error)
                    log.warning("the webhooks are not up to date: %s", problem)
                wait_s = min(_RETRY_S, self._poll_s)
            else:
                problem = ""
                if config != announced:
                    announced = config
                    yield config
            await asyncio.sleep(wait_s * (1 + 0.2 * self._jitter()))

    async def _listen(self, fn: kopf.WebhookFn) -> web.AppRunner:
        async def review(request: web.Request) -> web.Response:
            # What Kopf raises for a review it cannot make sense of becomes a 500, and a line in
            # the log: the API server goes on without an answer.
            headers = dict(request.headers)
            webhook = request.match_info["webhook"]
            return web.json_response(
                await fn(await request.json(), webhook=webhook, headers=headers, sslpeer={})
            )

        app = web.Application(client_max_size=_LARGEST_REVIEW_BYTES)
        app.router.add_post("/{webhook}", review)
        runner = web.AppRunner(app, handle_signals=False, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, port=self._port, ssl_context=self._tls).start()
        except OSError as error:
            await runner.cleanup()
            raise Unavailable("admission port", str(error)) from error
        log.info("webhooks are served on port %d", self._port)
        return runner


def load_certificate(tls: ssl.SSLContext, certificate: Certificate) -> None:
    """Serve a certificate from the next handshake on.

    The ssl module reads files only; this one is in memory, so that the key is never on a disk.
    """
    file = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        with open(file, "wb", closefd=False) as memory:
            memory.write(certificate.key + certificate.certificate)
        tls.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
