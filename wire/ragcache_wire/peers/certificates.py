"""The certificates with which the parts of a platform encrypt their connections to each other.

A folder has the files of a Kubernetes Secret for TLS: ``tls.crt`` (the certificate of this part),
``tls.key`` (its private key) and ``ca.crt`` (the authorities that its peers trust). The first DNS
name of the certificate is the name of the platform, and a client accepts only servers with this
name. So it does not matter under which address a part is reached.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
from cryptography import x509

from ragcache_core.errors import InvalidInput
from ragcache_wire.watched.watched_file import WatchedFile

VARIABLE: Final = "RAGCACHE_TLS_DIR"
CERTIFICATE_FILE: Final = "tls.crt"
KEY_FILE: Final = "tls.key"
AUTHORITIES_FILE: Final = "ca.crt"

FIX: Final = f"give all parts certificates of one authority in {VARIABLE}"

_FILES_FIX: Final = (
    f"name a folder with {CERTIFICATE_FILE}, {KEY_FILE} and {AUTHORITIES_FILE} in PEM"
)


@dataclass(frozen=True, slots=True)
class Certificate:
    """One state of the folder.

    Args:
        chain: The certificate, and those of intermediate authorities after it, in PEM.
        key: The private key in PEM.
        authorities: The trusted authorities in PEM.
        name: The first DNS name of the certificate.
        client: The context of connections to a peer.
        server: The context of connections of a peer, which needs a certificate.
    """

    chain: bytes
    key: bytes = field(repr=False)
    authorities: bytes
    name: str
    client: ssl.SSLContext = field(compare=False, repr=False)
    server: ssl.SSLContext = field(compare=False, repr=False)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials of a gRPC channel."""
        return grpc.ssl_channel_credentials(self.authorities, self.key, self.chain)


class Certificates(WatchedFile[Certificate]):
    """The certificate in a folder, which is read again when the file ``tls.crt`` is replaced.

    Servers use a new certificate from the next connection on, and gRPC channels from the next call
    on. Connections that are open stay.

    Raises:
        InvalidInput: The folder has no certificate that can be used. If a later read fails, the
            certificate stays as it was.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        path = folder / CERTIFICATE_FILE
        try:
            path.stat()
        except OSError as error:
            raise InvalidInput(VARIABLE, f"cannot be read: {error}", _FILES_FIX) from error

        def parse(_: bytes) -> Certificate:
            # Kubernetes swaps a link to a folder with all files: they must be of one state.
            return _load(path.resolve().parent)

        super().__init__(
            path, parse, parse(b""), name="certificate", describe=lambda one: one.name, clock=clock
        )

    def load_into(self, context: ssl.SSLContext) -> None:
        """Have new connections of another library's server show the certificate in the folder."""
        folder = self._path.resolve().parent
        context.load_cert_chain(folder / CERTIFICATE_FILE, folder / KEY_FILE)
        context.load_verify_locations(folder / AUTHORITIES_FILE)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials of a gRPC server. It admits clients with a certificate alone."""
        handed = self.current()

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal handed
            current = self.current()
            if current is handed:
                return None
            handed = current
            return _configuration(current)

        # The stubs of gRPC have no None, which means that nothing has changed.
        return grpc.dynamic_ssl_server_credentials(
            _configuration(handed),
            renewed,  # type: ignore[arg-type]
            require_client_authentication=True,
        )


def _configuration(certificate: Certificate) -> grpc.ServerCertificateConfiguration:
    pair = (certificate.key, certificate.chain)
    return grpc.ssl_server_certificate_configuration([pair], certificate.authorities)


def _load(folder: Path) -> Certificate:
    """Read the files of a folder. Raises InvalidInput."""
    try:
        chain, key, authorities = [
            (folder / name).read_bytes() for name in (CERTIFICATE_FILE, KEY_FILE, AUTHORITIES_FILE)
        ]
        client, server = [
            _context(side, folder, authorities.decode("ascii"))
            for side in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)
        ]
        name = _first_name(chain.decode("ascii"))
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise InvalidInput(VARIABLE, f"{folder} cannot be used: {error}", _FILES_FIX) from error
    return Certificate(chain, key, authorities, name, client, server)


def _context(side: int, folder: Path, authorities: str) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(folder / CERTIFICATE_FILE, folder / KEY_FILE)
    context.load_verify_locations(cadata=authorities)
    context.verify_mode = ssl.CERT_REQUIRED
    if side == ssl.PROTOCOL_TLS_SERVER:
        # A ticket would arrive at an idle client, which takes unexpected bytes for an error.
        context.num_tickets = 0
    return context


def _first_name(chain: str) -> str:
    """Return the first DNS name of the first certificate. Raises ValueError."""
    names = (
        x509.load_pem_x509_certificate(chain.encode())
        .extensions.get_extension_for_class(x509.SubjectAlternativeName)
        .value.get_values_for_type(x509.DNSName)
    )
    if not names:
        raise ValueError(f"{CERTIFICATE_FILE} has no DNS name")
    return names[0]
