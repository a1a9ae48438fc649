"""Keys and certificates of a test cluster: one authority, one server certificate, one token key."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFETIME = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Certificates:
    """Paths of PEM files."""

    authority: Path
    server_certificate: Path
    server_key: Path
    service_account_key: Path


def make_certificates(folder: Path, names: Sequence[str], addresses: Sequence[str]) -> Certificates:
    """Make new certificates; the server's is valid for these host names and addresses."""
    folder.mkdir(parents=True, exist_ok=True)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    server_key = ec.generate_private_key(ec.SECP256R1())
    # Service account tokens are signed RS256, which every Kubernetes version takes.
    token_key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    authority = _authority(authority_key)
    server = _server(server_key, authority, authority_key, names, addresses)
    return Certificates(
        authority=_write(folder / "ca.crt", _pem(authority)),
        server_certificate=_write(folder / "apiserver.crt", _pem(server)),
        server_key=_write(folder / "apiserver.key", _pem(server_key), secret=True),
        service_account_key=_write(folder / "tokens.key", _pem(token_key), secret=True),
    )


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test cluster authority")])
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        _builder(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _server(
    key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    names: Sequence[str],
    addresses: Sequence[str],
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kube-apiserver")])
    alternatives: list[x509.GeneralName] = [x509.DNSName(name) for name in names]
    alternatives += [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    return (
        _builder(subject, authority.subject, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(issuer_key, critical=False)
        .sign(authority_key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # Clocks of one machine may still step back.
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + _LIFETIME)
    )


def _pem(thing: x509.Certificate | ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    if isinstance(thing, x509.Certificate):
        return thing.public_bytes(serialization.Encoding.PEM)
    return thing.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )


def _write(path: Path, content: bytes, secret: bool = False) -> Path:
    path.touch(mode=0o600 if secret else 0o644)
    path.write_bytes(content)
    return path
