"""The certificate of a RagCache on a real API server: made once, and renewed without Secrets."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from harness.cluster.control_plane import ControlPlane
from ragcache_operator.builders.certificates import PERIOD_S, CertificateAuthority
from ragcache_operator.builders.part_tls import platform_name
from ragcache_operator.config import Installation
from ragcache_operator.kube.resources import CONFIG_MAPS, SECRETS
from tests.integration.operator.operator_pass import NAMESPACE, operator

pytestmark = pytest.mark.timeout(300)


def writes(calls: Sequence[str]) -> list[str]:
    """Calls that change a certificate, or pods."""
    kinds = ("secrets", "configmaps", "deployments", "statefulsets")
    return [call for call in calls if any(kind in call for kind in kinds)]


async def test_a_certificate_is_made_and_renewed_without_a_secret_or_a_rollout(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with operator(plane) as it:
        await it.make("encrypted")
        calls = await it.reconcile("encrypted")
        assert calls.count("create secrets 201") == 4, "for tokens, callers, TLS and stored KV"
        assert it.wait_s is not None
        assert it.wait_s <= PERIOD_S, "the next pass renews the certificate"
        labels = "app.kubernetes.io/instance=encrypted"
        secrets = (await it.admin.list(SECRETS, NAMESPACE, labels)).items
        [secret] = [one for one in secrets if "-tls-" in one["metadata"]["name"]]
        [(file, content)] = secret["data"].items()
        assert file == "tls.key"
        key = load_pem_private_key(base64.b64decode(content), None)
        config = await it.admin.get(CONFIG_MAPS, "encrypted-tls", NAMESPACE)
        assert config is not None
        certificate = x509.load_pem_x509_certificate(config["data"]["tls.crt"].encode())
        assert certificate.public_key() == key.public_key()
        assert writes(await it.reconcile("encrypted")) == [], "the same certificate follows again"

        # A month later.
        placement = Installation.placement

        def later(installation: Installation, cache: object, uid: str) -> object:
            found = placement(installation, cache, uid)  # type: ignore[arg-type]
            assert found.certificate is not None
            secret = installation.keys.certificate_secret(uid)
            authority = CertificateAuthority(secret, platform_name(found.cache))
            return replace(found, certificate=authority.issue(found.certificate.renew_s))

        monkeypatch.setattr(Installation, "placement", later)
        calls = await it.reconcile("encrypted")
        assert writes(calls) == ["patch configmaps 200"]
        renewed = await it.admin.get(CONFIG_MAPS, "encrypted-tls", NAMESPACE)
        assert renewed is not None
        assert renewed["data"]["tls.crt"] != config["data"]["tls.crt"]
        assert renewed["data"]["ca.crt"] == config["data"]["ca.crt"]


async def test_a_platform_without_tls_gets_no_certificate(plane: ControlPlane) -> None:
    async with operator(plane) as it:
        await it.make("plain", tls={"enabled": False})
        calls = await it.reconcile("plain")
        assert calls.count("create secrets 201") == 3
        assert await it.admin.get(CONFIG_MAPS, "plain-tls", NAMESPACE) is None
