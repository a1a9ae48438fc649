"""The webhooks' certificate, in a Secret that all replicas share, and its rotation.

The API server trusts the authorities in the ``caBundle`` of the webhook configurations. It would
reject a new certificate until it has the new list. So the operator creates the next certificate
early and stages it: it publishes the authority first, and serves the certificate much later. Each
authority signs one certificate, and its key is not stored, so the Secret cannot sign others.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import Enum

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ragcache_operator.kube.api import Api, Conflict
from ragcache_operator.kube.resources import SECRETS, Object

log = logging.getLogger(__name__)

# The clock of the API server may be slow.
_BACKDATED = timedelta(hours=1)
_TRIES = 5


@dataclass(frozen=True, slots=True)
class Rotation:
    """When certificates change.

    Args:
        lifetime: Lifetime of a certificate.
        renew_before: How long before its end the next certificate is staged.
        publish_for: How long the next authority is published before its certificate is served. It
            is much longer than the poll interval of the replicas.
    """

    lifetime: timedelta = timedelta(days=90)
    renew_before: timedelta = timedelta(days=30)
    publish_for: timedelta = timedelta(hours=2)

    def __post_init__(self) -> None:
        assert self.publish_for < self.renew_before < self.lifetime


@dataclass(frozen=True, slots=True)
class Certificate:
    """A serving certificate, its key and the one authority that signed it, each in PEM."""

    certificate: bytes
    key: bytes
    authority: bytes
    made: datetime
    ends: datetime


@dataclass(frozen=True, slots=True)
class Bundle:
    """Content of the Secret.

    Args:
        trusted: Authorities in PEM: of both certificates, and of earlier ones until they expire.
    """

    serving: Certificate
    staged: Certificate | None
    trusted: tuple[bytes, ...]

    @property
    def ca_bundle(self) -> str:
        """The trusted authorities as ``caBundle`` of a webhook's clientConfig."""
        return base64.b64encode(b"".join(self.trusted)).decode("ascii")


class RotationStep(Enum):
    """The next step of a rotation."""

    NONE = "none"
    MAKE = "make"  # no valid certificate exists
    STAGE = "stage"
    PROMOTE = "promote"


def service_names(service: str, namespace: str) -> tuple[str, ...]:
    """Return the DNS names of a Service. The API server uses the first."""
    return (
        f"{service}.{namespace}.svc",
        f"{service}.{namespace}.svc.cluster.local",
        f"{service}.{namespace}",
        service,
    )


def make_certificate(names: Sequence[str], now: datetime, lifetime: timedelta) -> Certificate:
    """Create a certificate for DNS names and IP addresses, with a new authority."""
    starts, ends = now - _BACKDATED, now + lifetime
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority_id = x509.random_serial_number()
    # The unique name distinguishes the authorities in one bundle.
    authority_name = _name(f"ragcache-operator webhooks {authority_id:x}"[:64])
    authority = (
        x509.CertificateBuilder()
        .subject_name(authority_name)
        .issuer_name(authority_name)
        .public_key(authority_key.public_key())
        .serial_number(authority_id)
        .not_valid_before(starts)
        .not_valid_after(ends)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(
            x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False
        )
        .sign(authority_key, hashes.SHA256())
    )
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_name(names[0][:64]))
        .issuer_name(authority_name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(starts)
        .not_valid_after(ends)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(map(_general_name, names)), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()),
            critical=False,
        )
        .sign(authority_key, hashes.SHA256())
    )
    return _certificate(certificate, key, authority)


def read_bundle(secret: Object, names: Sequence[str]) -> Bundle | None:
    """Read a Secret. Return None if it is empty, invalid or has a certificate for other names."""
    data = secret.get("data") or {}
    try:
        authorities = x509.load_pem_x509_certificates(_decoded(data["ca.crt"]))
        serving = _read_pair(data, "tls", authorities, names)
        staged = _read_pair(data, "next", authorities, names) if "next.crt" in data else None
    except (KeyError, ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature):
        return None
    return Bundle(serving, staged, tuple(map(_pem, authorities)))


def secret_data(bundle: Bundle) -> dict[str, str]:
    """Return a bundle as the ``data`` of a Secret."""
    data = {
        "tls.crt": bundle.serving.certificate,
        "tls.key": bundle.serving.key,
        "ca.crt": b"".join(bundle.trusted),
    }
    if bundle.staged is not None:
        data |= {"next.crt": bundle.staged.certificate, "next.key": bundle.staged.key}
    return {name: base64.b64encode(value).decode("ascii") for name, value in data.items()}


def next_step(bundle: Bundle | None, now: datetime, rotation: Rotation) -> RotationStep:
    """Return the step that is due now."""
    if bundle is None:
        return RotationStep.MAKE
    staged, ended = bundle.staged, now >= bundle.serving.ends
    if staged is not None and now < staged.ends:
        published = now >= staged.made + rotation.publish_for
        return RotationStep.PROMOTE if published or ended else RotationStep.NONE
    if ended:
        return RotationStep.MAKE
    if now >= bundle.serving.ends - rotation.renew_before:
        return RotationStep.STAGE
    return RotationStep.NONE


def advance(
    bundle: Bundle | None,
    step: RotationStep,
    names: Sequence[str],
    now: datetime,
    rotation: Rotation,
    also_trusted: Iterable[bytes] = (),
) -> Bundle:
    """Return the bundle after a step.

    An authority stays in the bundle until it expires, because a replica may still serve its
    certificate.

    Args:
        also_trusted: Authorities of certificates that a replica may still serve.
    """
    if bundle is not None and step is RotationStep.NONE:
        return bundle
    if bundle is not None and step is RotationStep.PROMOTE:
        assert bundle.staged is not None
        return replace(bundle, serving=bundle.staged, staged=None)
    made = make_certificate(names, now, rotation.lifetime)
    before = (*(bundle.trusted if bundle is not None else ()), *also_trusted)
    kept = [authority for authority in dict.fromkeys(before) if now < _end_of(authority)]
    trusted = (*kept, made.authority)
    if bundle is not None and step is RotationStep.STAGE:
        return Bundle(bundle.serving, made, trusted)
    return Bundle(made, None, trusted)


async def ensure_bundle(
    api: Api,
    namespace: str,
    name: str,
    names: Sequence[str],
    now: datetime,
    *,
    rotation: Rotation = Rotation(),
    served: Bundle | None = None,
) -> Bundle:
    """Return the bundle that all replicas share, and perform the step that is due.

    Only one replica performs a step, because the API server rejects concurrent writes.

    Args:
        served: The bundle that this replica serves now.

    Raises:
        ApiError: A call failed.
    """
    for _ in range(_TRIES):
        secret = await api.get(SECRETS, name, namespace)
        bundle = read_bundle(secret, names) if secret is not None else None
        step = next_step(bundle, now, rotation)
        if bundle is not None and step is RotationStep.NONE:
            return bundle
        also_trusted = (served.serving.authority,) if served is not None else ()
        bundle = advance(bundle, step, names, now, rotation, also_trusted)
        try:
            await _store(api, namespace, name, secret, bundle)
        except Conflict:
            # Another replica performed the step, so the next try reads its result.
            continue
        log.info("certificates: step=%s secret=%s/%s", step.value, namespace, name)
        return bundle
    raise Conflict(409, "Conflict", f"Secret {namespace}/{name} keeps changing")


async def _store(
    api: Api, namespace: str, name: str, secret: Object | None, bundle: Bundle
) -> None:
    data = secret_data(bundle)
    if secret is not None:
        # The type of a Secret is immutable, and no reader needs it.
        await api.replace(SECRETS, {**secret, "data": data})
        return
    new = {
        "apiVersion": SECRETS.api_version,
        "kind": SECRETS.kind,
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {"app.kubernetes.io/managed-by": "ragcache-operator"},
        },
        "type": "kubernetes.io/tls",
        "data": data,
    }
    await api.create(SECRETS, new)


def _read_pair(
    data: Object, prefix: str, authorities: Sequence[x509.Certificate], names: Sequence[str]
) -> Certificate:
    """Read one certificate and its key. Raises ValueError and similar errors for invalid data."""
    certificate = x509.load_pem_x509_certificate(_decoded(data[f"{prefix}.crt"]))
    key = serialization.load_pem_private_key(_decoded(data[f"{prefix}.key"]), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != (
        certificate.public_key()
    ):
        raise ValueError("the key does not belong to the certificate")
    alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    if not set(map(_general_name, names)) <= set(alternatives.value):
        raise ValueError("the certificate is for other names")
    return _certificate(certificate, key, _authority_of(certificate, authorities))


def _authority_of(
    certificate: x509.Certificate, authorities: Sequence[x509.Certificate]
) -> x509.Certificate:
    for authority in authorities:
        if authority.subject == certificate.issuer:
            certificate.verify_directly_issued_by(authority)
            return authority
    raise ValueError("the certificate's authority is not in ca.crt")


def _certificate(
    certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey, authority: x509.Certificate
) -> Certificate:
    return Certificate(
        certificate=_pem(certificate),
        key=key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
        authority=_pem(authority),
        made=certificate.not_valid_before_utc + _BACKDATED,
        ends=min(certificate.not_valid_after_utc, authority.not_valid_after_utc),
    )


def _end_of(authority: bytes) -> datetime:
    return x509.load_pem_x509_certificate(authority).not_valid_after_utc


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError("not base64") from error
