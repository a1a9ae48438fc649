"""The HTTPS server of the webhooks, which changes its certificate while it runs.

Kopf's own server supports only URLs. It restarts for a new certificate, and requests fail during
the restart. This server loads the certificate into the listening socket instead: connections stay
open, and new ones use it.
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

# A review contains an object twice. The API server stores objects of up to 1.5 MiB.
_MAX_REVIEW_BYTES = 8 << 20
_RETRY_S = 10.0

ClientConfigFactory = Callable[[str], kopf.WebhookClientConfig]
"""Returns how the API server connects to this server, given the caBundle to trust."""


def service_client_config(service: str, namespace: str, port: int = 443) -> ClientConfigFactory:
    """Return the client config for a Service in front of this server."""

    def endpoint(ca_bundle: str) -> kopf.WebhookClientConfig:
        return {
            "service": {"name": service, "namespace": namespace, "port": port},
            "caBundle": ca_bundle,
        }

    return endpoint


def url_client_config(url: str) -> ClientConfigFactory:
    """Return the client config for a URL, for an operator outside the cluster."""

    def endpoint(ca_bundle: str) -> kopf.WebhookClientConfig:
        return {"url": url, "caBundle": ca_bundle}

    return endpoint


class WebhookServer:
    """Admission server for Kopf (``settings.admission.server``).

    Args:
        certificates: Returns the bundle to serve, given the bundle that is served now. Raises
            RagCacheError for a temporary failure.
        announce: Registers a client config with the API server. It is called at each poll, so it
            also reverts changes by others. Raises RagCacheError for a temporary failure.
        port: Port number. 0 for a free one.
        poll_s: Interval of checking the certificates.
        jitter: Returns numbers in [0, 1], which make the interval up to a fifth longer.
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
        # Every request is answered, so the server need not wait for a TLS shutdown.
        for transport in transports:
            if transport is not None:
                transport.abort()

    async def __call__(self, fn: kopf.WebhookFn) -> AsyncIterator[kopf.WebhookClientConfig]:
        """Serve ``fn``. Yield the client config at the start and when the authorities change."""
        served: Bundle | None = None
        announced: kopf.WebhookClientConfig | None = None
        problem = ""
        while True:
            wait_s = self._poll_s
            try:
                bundle = await self._certificates(served)
                config = self._endpoint(bundle.ca_bundle)
                if served is None:
                    # The server must listen before the API server sends reviews.
                    load_certificate(self._tls, bundle.serving)
                    self._runner = await self._listen(fn)
                    served = bundle
                # The API server must know an authority before its certificate is served.
                await self._announce(config)
                if bundle != served:
                    load_certificate(self._tls, bundle.serving)
                    served = bundle
            except RagCacheError as error:
                if str(error) != problem:
                    problem = str(error)
                    log.warning("webhook server: update failed error=%s", problem)
                wait_s = min(_RETRY_S, self._poll_s)
            else:
                problem = ""
                if config != announced:
                    announced = config
                    yield config
            await asyncio.sleep(wait_s * (1 + 0.2 * self._jitter()))

    async def _listen(self, fn: kopf.WebhookFn) -> web.AppRunner:
        async def review(request: web.Request) -> web.Response:
            # For an invalid review Kopf raises, and aiohttp answers 500 and logs the error. The API
            # server continues without an answer.
            headers = dict(request.headers)
            webhook = request.match_info["webhook"]
            return web.json_response(
                await fn(await request.json(), webhook=webhook, headers=headers, sslpeer={})
            )

        app = web.Application(client_max_size=_MAX_REVIEW_BYTES)
        app.router.add_post("/{webhook}", review)
        runner = web.AppRunner(app, handle_signals=False, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, port=self._port, ssl_context=self._tls).start()
        except OSError as error:
            await runner.cleanup()
            raise Unavailable("admission port", str(error)) from error
        log.info("webhook server: listening port=%d", self._port)
        return runner


def load_certificate(tls: ssl.SSLContext, certificate: Certificate) -> None:
    """Serve a certificate from the next handshake on.

    The ssl module reads only files. A file in memory keeps the key off the disk.
    """
    file = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        with open(file, "wb", closefd=False) as memory:
            memory.write(certificate.key + certificate.certificate)
        tls.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
