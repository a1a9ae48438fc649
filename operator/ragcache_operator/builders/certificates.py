"""Certificates of the connections between the parts of a platform.

All of them follow from one secret and from the time, also the private keys and the signatures. So
the operator makes the same certificates again after a restart, and reads no Secret for it. What it
renews is public: the private key is in a Secret that it creates once, and the certificate and the
authorities are in a ConfigMap.

An authority signs for AUTHORITY_S. Parts trust the authorities before and after it, too, so a new
one is known everywhere before it signs.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID

DAY_S: Final = 86_400
PERIOD_S: Final = 30 * DAY_S
"""Time between two certificates."""

VALID_S: Final = 3 * PERIOD_S
"""How long a certificate is valid. An operator may be away for the rest of it."""

AUTHORITY_S: Final = 12 * PERIOD_S
MAX_SKEW_S: Final = DAY_S
"""Clocks of nodes may be as much behind."""

_CURVE: Final = ec.SECP256R1()
_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Order of the curve's group. Source: SEC 2, section 2.4.2."""


@dataclass(frozen=True, slots=True)
class IssuedCertificate:
    """A certificate with its private key, and the authorities that parts trust, all in PEM.

    Args:
        renew_s: When another one follows, as Unix time in seconds.
    """

    chain: str
    private_key: str = field(repr=False)
    authorities: str
    renew_s: float


@dataclass(frozen=True, slots=True)
class CertificateAuthority:
    """The authority of one platform.

    Args:
        secret: 32 bytes or more. Its keys follow from them.
        name: Name of the platform, which its certificate has as a DNS name.
    """

    secret: bytes = field(repr=False)
    name: str

    def issue(self, now_s: float) -> IssuedCertificate:
        """Return the certificate of the parts at a Unix time in seconds."""
        number, authority = int(now_s // PERIOD_S), int(now_s // AUTHORITY_S)
        begin_s = number * PERIOD_S
        return IssuedCertificate(
            self._certificate(number, authority, begin_s - MAX_SKEW_S, begin_s + VALID_S),
            self._private_key(),
            "".join(map(self._authority, (authority - 1, authority, authority + 1))),
            begin_s + PERIOD_S,
        )

    def issue_for(self, now_s: float, seconds: float) -> IssuedCertificate:
        """Return a certificate that is valid for a time and not renewed."""
        end_s = int(now_s + seconds)
        chain = self._certificate(0, 0, int(now_s) - MAX_SKEW_S, end_s)
        return IssuedCertificate(chain, self._private_key(), self._authority(0, 0, end_s), end_s)

    def _private_key(self) -> str:
        pem = self._key("part").private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return pem.decode()

    def _certificate(self, number: int, authority: int, begin_s: float, end_s: float) -> str:
        issuer, key = self._key(f"authority {authority}"), self._key("part")
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        return _signed(
            _begun(self.name, self._authority_name(authority), key, (begin_s, end_s))
            .serial_number(self._serial(f"part {number}"))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(self.name)]), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True),
            issuer,
        )

    def _authority(
        self, number: int, begin_s: float | None = None, end_s: float | None = None
    ) -> str:
        """Return the certificate of an authority, which signs itself."""
        if begin_s is None or end_s is None:
            begin_s = number * AUTHORITY_S - MAX_SKEW_S
            end_s = (number + 1) * AUTHORITY_S + VALID_S
        key, name = self._key(f"authority {number}"), self._authority_name(number)
        return _signed(
            _begun(name, name, key, (begin_s, end_s))
            .serial_number(self._serial(f"authority {number}"))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True),
            key,
        )

    def _authority_name(self, number: int) -> str:
        return f"RagCache authority {self._derive('name').hex()[:16]} {number}"

    def _key(self, purpose: str) -> ec.EllipticCurvePrivateKey:
        number = int.from_bytes(self._derive(f"{purpose} a") + self._derive(f"{purpose} b"))
        return ec.derive_private_key(1 + number % (_ORDER - 1), _CURVE)

    def _serial(self, purpose: str) -> int:
        return int.from_bytes(self._derive(f"serial {purpose}")[:16]) + 1

    def _derive(self, purpose: str) -> bytes:
        text = f"ragcache-certificates-1\0{purpose}"
        return hmac.new(self.secret, text.encode(), hashlib.sha256).digest()


def _begun(
    subject: str, issuer: str, key: ec.EllipticCurvePrivateKey, valid_s: tuple[float, float]
) -> x509.CertificateBuilder:
    begin, end = (datetime.fromtimestamp(one, UTC) for one in valid_s)
    return (
        x509.CertificateBuilder()
        .subject_name(_common_name(subject))
        .issuer_name(_common_name(issuer))
        .public_key(key.public_key())
        .not_valid_before(begin)
        .not_valid_after(end)
    )


def _signed(builder: x509.CertificateBuilder, issuer: ec.EllipticCurvePrivateKey) -> str:
    signed = builder.sign(issuer, hashes.SHA256(), ecdsa_deterministic=True)
    return signed.public_bytes(Encoding.PEM).decode()


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:64])])
