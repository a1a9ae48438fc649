"""Certificates of the parts: when they are valid, what follows from what, and the objects."""

from __future__ import annotations

import ssl
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509

from ragcache_operator.builders import build_children
from ragcache_operator.builders.capabilities import Capabilities, unsupported_features
from ragcache_operator.builders.certificates import (
    AUTHORITY_S,
    MAX_SKEW_S,
    PERIOD_S,
    VALID_S,
    CertificateAuthority,
    IssuedCertificate,
)
from ragcache_operator.builders.keys import ComponentKeys
from ragcache_operator.builders.part_tls import key_secret, platform_name
from ragcache_operator.builders.placement import ClusterPlacement
from tests.kit.operator import UID, kinds_of, make_cache, pod_of

OURS = CertificateAuthority(bytes(32), "docs.team.ragcache.internal")
NOW_S = 100.5 * AUTHORITY_S


def authorities_of(made: IssuedCertificate) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(made.authorities.encode())


def certificate_of(made: IssuedCertificate) -> x509.Certificate:
    return x509.load_pem_x509_certificate(made.chain.encode())


def test_everything_follows_from_the_secret_and_the_period() -> None:
    made = OURS.issue(NOW_S)
    assert CertificateAuthority(bytes(32), OURS.name).issue(NOW_S) == made
    assert OURS.issue(made.renew_s - 1) == made
    renewed = OURS.issue(made.renew_s)
    assert renewed.chain != made.chain
    assert renewed.private_key == made.private_key, "it is in a Secret that is created once"
    assert renewed.authorities == made.authorities
    other = CertificateAuthority(bytes([1] * 32), OURS.name).issue(NOW_S)
    assert {other.chain, other.private_key, other.authorities}.isdisjoint(
        {made.chain, made.private_key, made.authorities}
    )


@pytest.mark.parametrize("number", range(26))
def test_parts_of_neighbouring_periods_trust_each_other(number: int) -> None:
    """While a new certificate spreads, and after the operator was away for two periods."""
    at_s = NOW_S + number * PERIOD_S
    for before_s in (at_s - PERIOD_S, at_s - VALID_S + PERIOD_S, at_s):
        mine, theirs = OURS.issue(at_s), OURS.issue(before_s)
        for shown, trusting in ((mine, theirs), (theirs, mine)):
            certificate = certificate_of(shown)
            issuers = [one for one in authorities_of(trusting) if one.subject == certificate.issuer]
            certificate.verify_directly_issued_by(issuers[0])
            begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
            assert begin <= datetime.fromtimestamp(at_s, UTC) < end
            assert issuers[0].not_valid_before_utc <= begin
            assert issuers[0].not_valid_after_utc >= end


def test_a_certificate_is_for_servers_and_clients_of_one_platform() -> None:
    certificate = certificate_of(OURS.issue(NOW_S))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert names.value.get_values_for_type(x509.DNSName) == [OURS.name]
    basic = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert basic.critical
    assert not basic.value.ca
    begin = datetime.fromtimestamp(NOW_S, UTC) - timedelta(seconds=PERIOD_S + MAX_SKEW_S)
    assert certificate.not_valid_before_utc >= begin


def site(uid: str = UID, **spec: Any) -> ClusterPlacement:
    cache = make_cache(**spec)
    secret = ComponentKeys(bytes(32)).certificate_secret(uid)
    made = CertificateAuthority(secret, platform_name(cache)).issue(NOW_S)
    return ClusterPlacement(cache, tag="1", owner=uid, certificate=made)


def test_the_private_key_is_in_a_secret_and_the_rest_in_a_config_map() -> None:
    placement = site()
    secret = key_secret(placement.cache, placement)
    assert secret is not None
    assert list(secret["stringData"]) == ["tls.key"]
    assert secret["metadata"]["name"] == f"docs-tls-{UID[:8]}"
    [config] = [
        child
        for child in build_children(placement.cache, placement)
        if child["kind"] == "ConfigMap" and "tls.crt" in child["data"]
    ]
    assert set(config["data"]) == {"tls.crt", "ca.crt"}
    assert "PRIVATE" not in str(config)


def test_every_part_mounts_the_key_with_the_certificate() -> None:
    placement = site()
    children = build_children(placement.cache, placement)
    for workload in ("gateway", "retriever", "cachestore", "engine-main"):
        pod = pod_of(children, workload)
        [volume] = [one for one in pod["volumes"] if one["name"] == "tls"]
        secret, config = volume["projected"]["sources"]
        assert secret["secret"]["name"] == f"docs-tls-{UID[:8]}"
        assert config["configMap"]["name"] == "docs-tls"
        [container] = pod["containers"]
        assert {"name": "tls", "mountPath": "/etc/ragcache/tls", "readOnly": True} in (
            container["volumeMounts"]
        )
        assert {"name": "RAGCACHE_TLS_DIR", "value": "/etc/ragcache/tls"} in container["env"]


def test_a_renewal_restarts_no_pod() -> None:
    placement = site()
    assert placement.certificate is not None
    later = replace(placement, certificate=OURS.issue(placement.certificate.renew_s))
    before, after = (
        {(child["kind"], child["metadata"]["name"]): child for child in build_children(p.cache, p)}
        for p in (placement, later)
    )
    assert [key for key in before if before[key] != after[key]] == [("ConfigMap", "docs-tls")]


def test_an_engine_serves_https_and_needs_no_certificate_of_the_kubelet() -> None:
    placement = site()
    [container] = pod_of(build_children(placement.cache, placement), "engine-main")["containers"]
    arguments = container["args"]
    assert arguments[arguments.index("--ssl-keyfile") + 1] == "/etc/ragcache/tls/tls.key"
    assert arguments[arguments.index("--ssl-cert-reqs") + 1] == str(int(ssl.CERT_OPTIONAL))
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["scheme"] == "HTTPS"


def test_without_tls_there_is_no_trace_of_it() -> None:
    placement = site(tls={"enabled": False})
    assert key_secret(placement.cache, placement) is None
    children = build_children(placement.cache, placement)
    for word in ("docs-tls", "RAGCACHE_TLS_DIR", "--ssl-", "HTTPS", "https://docs-engine"):
        assert word not in str(children)


def test_cert_manager_makes_the_certificate_where_it_is_installed() -> None:
    issuer = {"issuerRef": {"name": "own-authority", "kind": "ClusterIssuer"}}
    placement = site(tls=issuer)
    children = build_children(placement.cache, placement)
    assert key_secret(placement.cache, placement) is None
    [certificate] = kinds_of(children, "Certificate")
    spec = certificate["spec"]
    assert spec["issuerRef"] == {
        "name": "own-authority",
        "kind": "ClusterIssuer",
        "group": "cert-manager.io",
    }
    assert spec["dnsNames"] == ["docs.team.ragcache.internal"], "the name that clients accept"
    assert {"server auth", "client auth"} <= set(spec["usages"])
    for workload in ("gateway", "retriever", "cachestore", "engine-main"):
        pod = pod_of(children, workload)
        [volume] = [one for one in pod["volumes"] if one["name"] == "tls"]
        assert volume["secret"]["secretName"] == spec["secretName"]
    assert not [one for one in kinds_of(children, "ConfigMap") if "tls.crt" in one["data"]]


def test_without_cert_manager_the_operator_makes_it_and_says_so() -> None:
    placement = site(tls={"issuerRef": {"name": "own-authority"}})
    plain = replace(Capabilities.latest(), certificates=False)
    placement = replace(placement, capabilities=plain)
    assert key_secret(placement.cache, placement) is not None
    children = build_children(placement.cache, placement)
    assert not kinds_of(children, "Certificate")
    [feature] = unsupported_features(placement.cache, plain)
    assert feature.reason == "CertificateNotServed"
    assert "spec.tls.issuerRef" in feature.message
