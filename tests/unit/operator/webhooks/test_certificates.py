"""The webhooks' certificate and its rotation."""

from __future__ import annotations

import base64
import ssl
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import given
from hypothesis import strategies as st

from ragcache_operator.webhooks.certificates import (
    Bundle,
    Certificate,
    Rotation,
    RotationStep,
    advance,
    make_certificate,
    next_step,
    read_bundle,
    secret_data,
    service_names,
)
from ragcache_operator.webhooks.webhook_server import load_certificate

NOW = datetime(2030, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)
NAMES = service_names("hooks", "ragcache-system")
ROTATION = Rotation()


def bundle_made(now: datetime = NOW) -> Bundle:
    return advance(None, RotationStep.MAKE, NAMES, now, ROTATION)


def secret(bundle: Bundle) -> dict[str, Any]:
    return {"kind": "Secret", "data": secret_data(bundle)}


def test_the_certificate_has_the_names_of_the_service() -> None:
    assert NAMES[0] == "hooks.ragcache-system.svc"
    made = make_certificate((*NAMES, "127.0.0.1"), NOW, ROTATION.lifetime)
    certificate = x509.load_pem_x509_certificate(made.certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert tuple(names.get_values_for_type(x509.DNSName)) == NAMES
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]


def test_a_name_longer_than_a_common_name_is_supported() -> None:
    names = service_names("a" * 63, "b" * 63)
    bundle = advance(None, RotationStep.MAKE, names, NOW, ROTATION)
    assert read_bundle(secret(bundle), names) == bundle


def test_no_key_that_can_sign_is_stored() -> None:
    (authority,) = map(x509.load_pem_x509_certificate, bundle_made().trusted)
    keys = [
        serialization.load_pem_private_key(base64.b64decode(value), password=None)
        for name, value in secret_data(bundle_made()).items()
        if name.endswith(".key")
    ]
    assert authority.public_key() not in [key.public_key() for key in keys]


def test_a_slow_clock_accepts_the_certificate() -> None:
    certificate = x509.load_pem_x509_certificate(bundle_made().serving.certificate)
    assert certificate.not_valid_before_utc == NOW - timedelta(hours=1)
    assert certificate.not_valid_after_utc == NOW + ROTATION.lifetime


def test_a_bundle_survives_the_secret() -> None:
    made = bundle_made()
    staged = advance(made, RotationStep.STAGE, NAMES, NOW + 60 * DAY, ROTATION)
    for bundle in (
        made,
        staged,
        advance(staged, RotationStep.PROMOTE, NAMES, NOW + 61 * DAY, ROTATION),
    ):
        assert read_bundle(secret(bundle), NAMES) == bundle


def _rsa_pair() -> dict[str, bytes]:
    key = rsa.generate_private_key(65537, 2048)
    return {"tls.key": _pem(key)}


def _pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


@pytest.mark.parametrize(
    "damage",
    [
        {"tls.crt": None},
        {"tls.key": None},
        {"ca.crt": None},
        {"ca.crt": b""},
        {"tls.crt": b"no certificate"},
        {"tls.key": b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"},
        {"tls.key": _pem(ec.generate_private_key(ec.SECP256R1()))},
        _rsa_pair(),
        {"ca.crt": make_certificate(NAMES, NOW, DAY).authority},
        {"tls.crt": make_certificate(NAMES, NOW, DAY).certificate},
        {"next.crt": make_certificate(NAMES, NOW, DAY).certificate},
    ],
    ids="-".join,
)
def test_an_invalid_secret_has_no_bundle(damage: dict[str, bytes | None]) -> None:
    data = secret_data(bundle_made())
    for name, value in damage.items():
        if value is None:
            del data[name]
        else:
            data[name] = base64.b64encode(value).decode()
    assert read_bundle({"data": data}, NAMES) is None


@pytest.mark.parametrize("content", [{}, {"data": None}, {"data": {"tls.crt": "%%%"}}])
def test_an_empty_secret_has_no_bundle(content: dict[str, Any]) -> None:
    assert read_bundle(content, NAMES) is None


@given(st.dictionaries(st.sampled_from(["tls.crt", "tls.key", "ca.crt", "next.crt"]), st.text()))
def test_any_secret_is_read_or_rejected(data: dict[str, str]) -> None:
    assert read_bundle({"data": data}, NAMES) is None


def test_a_certificate_for_another_service_is_replaced() -> None:
    assert read_bundle(secret(bundle_made()), service_names("other", "ragcache-system")) is None


def test_the_next_certificate_is_staged_before_the_end_and_served_later() -> None:
    bundle = bundle_made()
    assert next_step(bundle, NOW, ROTATION) is RotationStep.NONE
    assert next_step(bundle, NOW + 59 * DAY, ROTATION) is RotationStep.NONE
    at = NOW + 60 * DAY
    assert next_step(bundle, at, ROTATION) is RotationStep.STAGE
    staged = advance(bundle, RotationStep.STAGE, NAMES, at, ROTATION)
    assert staged.serving == bundle.serving
    assert next_step(staged, at + timedelta(minutes=119), ROTATION) is RotationStep.NONE
    assert next_step(staged, at + timedelta(hours=2), ROTATION) is RotationStep.PROMOTE
    promoted = advance(staged, RotationStep.PROMOTE, NAMES, at + timedelta(hours=2), ROTATION)
    assert promoted.serving == staged.staged
    assert next_step(promoted, at + timedelta(hours=2), ROTATION) is RotationStep.NONE


def test_a_new_certificate_is_made_after_the_old_one_expired() -> None:
    bundle = bundle_made()
    assert next_step(None, NOW, ROTATION) is RotationStep.MAKE
    assert next_step(bundle, NOW + 90 * DAY, ROTATION) is RotationStep.MAKE
    staged = advance(
        bundle, RotationStep.STAGE, NAMES, NOW + 90 * DAY - timedelta(hours=1), ROTATION
    )
    assert next_step(staged, NOW + 90 * DAY, ROTATION) is RotationStep.PROMOTE
    assert next_step(staged, NOW + 300 * DAY, ROTATION) is RotationStep.MAKE


def test_a_replaced_certificate_stays_trusted_where_it_is_served() -> None:
    lost = bundle_made()
    replaced = advance(
        None, RotationStep.MAKE, NAMES, NOW, ROTATION, also_trusted=[lost.serving.authority]
    )
    assert handshake(lost.serving, replaced.trusted)
    assert handshake(replaced.serving, replaced.trusted)


@given(polls=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 6 * 24)), max_size=120))
def test_every_served_certificate_is_trusted_by_every_published_bundle(
    polls: list[tuple[int, int]],
) -> None:
    """Simulate two replicas that poll at different times for years. Real handshakes are below."""
    shared = bundle_made()
    served = [shared, shared]
    published, now = shared.trusted, NOW
    seen = [now, now]
    for who, hours in polls:
        now += timedelta(hours=hours)
        # Every replica polls within publish_for, or it would miss a staged certificate.
        for replica in (who, 1 - who):
            if replica != who and now - seen[replica] < timedelta(hours=1):
                continue
            shared = advance(shared, next_step(shared, now, ROTATION), NAMES, now, ROTATION)
            published, seen[replica] = shared.trusted, now
            assert served[replica].serving.authority in published
            served[replica] = shared
            assert all(bundle.serving.authority in published for bundle in served)
            assert len(published) <= 3


def test_an_authority_is_trusted_until_it_expires() -> None:
    first = bundle = bundle_made()
    for _ in range(3):
        bundle = advance(bundle, RotationStep.STAGE, NAMES, NOW + 89 * DAY, ROTATION)
        bundle = advance(bundle, RotationStep.PROMOTE, NAMES, NOW + 89 * DAY, ROTATION)
    assert first.serving.authority in bundle.trusted
    bundle = advance(bundle, RotationStep.STAGE, NAMES, NOW + 90 * DAY, ROTATION)
    assert first.serving.authority not in bundle.trusted


def test_old_and_new_certificates_are_trusted_during_the_overlap() -> None:
    bundle = bundle_made()
    staged = advance(bundle, RotationStep.STAGE, NAMES, NOW, ROTATION)
    promoted = advance(staged, RotationStep.PROMOTE, NAMES, NOW, ROTATION)
    for trusted in (staged.trusted, promoted.trusted):
        assert handshake(bundle.serving, trusted)
        assert handshake(promoted.serving, trusted)
    assert not handshake(promoted.serving, bundle.trusted)


def test_a_new_certificate_is_served_by_the_context_that_served_the_old() -> None:
    bundle = bundle_made(datetime.now(UTC))
    staged = advance(bundle, RotationStep.STAGE, NAMES, datetime.now(UTC), ROTATION)
    assert staged.staged is not None
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_certificate(server, bundle.serving)
    assert peer_serial(server, staged.trusted) == serial(bundle.serving)
    load_certificate(server, staged.staged)
    assert peer_serial(server, staged.trusted) == serial(staged.staged)


def handshake(certificate: Certificate, trusted: tuple[bytes, ...]) -> bool:
    """Whether a client with these authorities accepts the certificate, without a check of times."""
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_certificate(server, certificate)
    try:
        return peer_serial(server, trusted, at_any_time=True) == serial(certificate)
    except ssl.SSLCertVerificationError:
        return False


def serial(certificate: Certificate) -> int:
    return x509.load_pem_x509_certificate(certificate.certificate).serial_number


_NO_CHECK_TIME = 0x200000  # OpenSSL's X509_V_FLAG_NO_CHECK_TIME


def peer_serial(
    server: ssl.SSLContext, trusted: tuple[bytes, ...], *, at_any_time: bool = False
) -> int:
    """Return the serial number from a handshake. Raises SSLCertVerificationError."""
    client = ssl.create_default_context(cadata=b"".join(trusted).decode())
    if at_any_time:
        client.verify_flags |= _NO_CHECK_TIME
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = client.wrap_bio(to_client, to_server, server_hostname=NAMES[0])
    there = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (here, there):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    shown = here.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number
