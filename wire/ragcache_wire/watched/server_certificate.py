"""The certificate that a server shows to clients of any kind, in a folder that may change.

The folder has the files of a Kubernetes Secret for TLS, as cert-manager writes them: ``tls.crt``
(the certificate, and those of intermediate authorities after it) and ``tls.key``.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ragcache_core.errors import InvalidInput
from ragcache_wire.watched.watched_file import WatchedFile

CERTIFICATE_FILE: Final = "tls.crt"
KEY_FILE: Final = "tls.key"

_FIX: Final = f"name a folder with {CERTIFICATE_FILE} and {KEY_FILE} in PEM"


class ServerCertificate(WatchedFile[ssl.SSLContext]):
    """The context of connections from clients, which is read again when ``tls.crt`` is replaced.

    It takes TLS 1.2 and 1.3, and asks for no certificate of a client. Connections that are open
    keep the context that they began with.

    Args:
        field: What names the folder, for errors.

    Raises:
        InvalidInput: The folder has no certificate with its key. If a later read fails, the
            certificate stays as it was.
    """

    def __init__(
        self, folder: Path, field: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        path = folder / CERTIFICATE_FILE

        def parse(_: bytes) -> ssl.SSLContext:
            # Kubernetes swaps a link to a folder with both files: they must be of one state.
            return _context(path.resolve().parent, field)

        super().__init__(
            path,
            parse,
            parse(b""),
            name="server certificate",
            describe=lambda _: str(folder),
            clock=clock,
        )


def _context(folder: Path, field: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # Without a password here, OpenSSL would wait for one at the terminal.
        context.load_cert_chain(folder / CERTIFICATE_FILE, folder / KEY_FILE, password="")
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise InvalidInput(field, f"{folder} cannot be used: {error}", _FIX) from error
    # Both ends of HTTP/1.1 name it, so that no client takes the port for another protocol's.
    context.set_alpn_protocols(["http/1.1"])
    return context
