"""Settings that all parts of a platform have: with what they recognize each other."""

from __future__ import annotations

from ragcache_wire.peers.credentials import Credentials
from ragcache_wire.settings.field_types import CertificateFolder, SigningKeyFile
from ragcache_wire.settings.table import ServiceSettings, setting


class PartSettings(ServiceSettings):
    """What each part reads from its environment to call the others and to admit their calls."""

    signing_key_file: SigningKeyFile | None = setting(
        None, internal="The operator mounts the Secret with the keys."
    )
    """Keys of the platform: every caller shows a token under one of them. The file is read again
    when it changes. Without it, the part has callers on loopback only."""
    tls_dir: CertificateFolder | None = setting(None, spec="spec.tls.enabled")
    """Folder with the certificate of this part, its key, and the authorities that it trusts. The
    connections between the parts are encrypted, and both ends show a certificate. The folder is
    read again when it changes. Without it, the connections are plain."""

    @property
    def credentials(self) -> Credentials:
        """With what the part proves to others that it belongs to the platform."""
        return Credentials(self.signing_key_file, self.tls_dir)
