"""Webhooks of a real API server: rejections, defaults, rotation under load, and no webhook.

The API server reaches them by URL here; by their Service it does in the cluster test.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from cryptography import x509

from bench.support.processes import free_port
from ragcache_operator.kube.api import Api, ApiError
from ragcache_operator.kube.resources import (
    CRDS,
    RAG_CACHES,
    RAG_COLLECTIONS,
    SECRETS,
    Object,
)
from ragcache_operator.webhooks.admission import (
    CONFIGURATIONS,
    DEFAULT,
    VALIDATE,
    AdmissionConfig,
    serving_admission,
)
from ragcache_operator.webhooks.certificates import (
    Rotation,
    ensure_bundle,
    read_bundle,
    service_names,
)
from ragcache_operator.webhooks.webhook_server import url_client_config
from tests.cluster import packages
from tests.cluster.availability import Unavailable, skip
from tests.cluster.control_plane import ControlPlane, start_control_plane

CRD_FOLDER = Path(__file__).parents[3] / "crds"
NAMESPACE = "default"
SOON_S = 60.0


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    try:
        with start_control_plane(tmp_path_factory.mktemp("plane"), audit=True) as plane:
            yield plane
    except Unavailable as reason:
        skip(reason)


@pytest.fixture
async def api(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Api]:
    # Kopf reads this variable.
    monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig))
    async with await Api.connect(plane.kubeconfig) as api:
        minor = int((await api.read("/version"))["minor"].rstrip("+"))
        folder = CRD_FOLDER if minor >= 28 else CRD_FOLDER / "before-1.28"
        for file in folder.glob("*.yaml"):
            await api.apply(yaml.safe_load(file.read_text()))
        await until_served(api)
        yield api


async def until_served(api: Api) -> None:
    async def established() -> bool:
        for resource in (RAG_CACHES, RAG_COLLECTIONS):
            crd = await api.get(CRDS, f"{resource.plural}.{resource.group}")
            conditions = crd["status"].get("conditions") or () if crd else ()
            if ("Established", "True") not in [(c["type"], c["status"]) for c in conditions]:
                return False
        return True

    await until(established)


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(SOON_S):
        while True:
            if await holds():
                return
            await asyncio.sleep(0.1)


async def installed(api: Api, name: str, **changed: Any) -> AdmissionConfig:
    """Create what the chart installs: an empty Secret and two empty configurations."""
    for resource in CONFIGURATIONS.values():
        await api.create(resource, named(resource.api_version, resource.kind, name))
    secret = {**named("v1", "Secret", f"{name}-tls", NAMESPACE), "type": "Opaque"}
    await api.create(SECRETS, secret)
    port = free_port()
    config = AdmissionConfig(
        namespace=NAMESPACE,
        secret=f"{name}-tls",
        configurations=name,
        names=(*service_names(name, NAMESPACE), "127.0.0.1"),
        endpoint=url_client_config(f"https://127.0.0.1:{port}"),
        port=port,
        poll_s=0.5,
    )
    return replace(config, **changed)


def named(api_version: str, kind: str, name: str, namespace: str | None = None) -> Object:
    scope = {"namespace": namespace} if namespace else {}
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name, **scope}}


def replica(plane: ControlPlane, config: AdmissionConfig) -> AbstractAsyncContextManager[None]:
    async def connect() -> Api:
        return await Api.connect(plane.kubeconfig)

    return serving_admission(connect, config)


@asynccontextmanager
async def webhooks(plane: ControlPlane, config: AdmissionConfig) -> AsyncIterator[None]:
    """Run a replica that serves webhooks, and wait until the API server calls them."""
    async with replica(plane, config):
        await until(lambda: refused(plane, UNFIT))
        await until(lambda: name_is_filled_in(plane))
        yield


@asynccontextmanager
async def uninstalled_at_the_end(api: Api, config: AdmissionConfig) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for resource in CONFIGURATIONS.values():
            await api.delete(resource, config.configurations)


async def kubectl(plane: ControlPlane, *words: str, obj: Object | None = None) -> tuple[bool, str]:
    """Run kubectl. Return whether it succeeded, and its output."""
    process = await asyncio.create_subprocess_exec(
        packages.command("kubectl"),
        f"--kubeconfig={plane.kubeconfig}",
        *words,
        *([] if obj is None else ["--filename=-"]),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await process.communicate(json.dumps(obj).encode() if obj else None)
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    return process.returncode == 0, (out + err).decode()


async def refused(plane: ControlPlane, obj: Object) -> bool:
    """Whether a webhook rejects the object now."""
    went_well, said = await kubectl(plane, "create", "--dry-run=server", obj=obj)
    assert went_well or "admission webhook" in said, said
    return not went_well


async def name_is_filled_in(plane: ControlPlane) -> bool:
    words = ("create", "--dry-run=server", "--output=json")
    went_well, said = await kubectl(plane, *words, obj=collection("probe"))
    assert went_well, said
    return "collection" in json.loads(said)["spec"]


def said(text: str, caplog: pytest.LogCaptureFixture) -> Callable[[], Awaitable[bool]]:
    async def holds() -> bool:
        return text in caplog.text

    return holds


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read everything and never answer, until the client disconnects."""
    with closing(writer):
        await reader.read()


def cache(name: str, **spec: Any) -> Object:
    return {**named(RAG_CACHES.api_version, RAG_CACHES.kind, name, NAMESPACE), "spec": spec}


def collection(name: str, **spec: Any) -> Object:
    return {
        **named(RAG_COLLECTIONS.api_version, RAG_COLLECTIONS.kind, name, NAMESPACE),
        "spec": {"cacheRef": {"name": "demo"}, "sources": [{"configMap": {"name": "a"}}], **spec},
    }


# Valid by the schema on every server version. Only the webhook rejects it.
UNFIT_SPEC = {"cacheStore": {"memory": "2Gi", "resources": {"memory": "1Gi"}}}
UNFIT = cache("unfit", **UNFIT_SPEC)


async def test_a_bad_manifest_is_rejected_with_every_path_and_fix(
    api: Api, plane: ControlPlane
) -> None:
    config = await installed(api, "refusing")
    async with uninstalled_at_the_end(api, config), webhooks(plane, config):
        bad = cache(
            "bad",
            model={"source": "path:models/mine"},
            cacheStore=UNFIT_SPEC["cacheStore"],
        )
        went_well, said = await kubectl(plane, "apply", obj=bad)
    assert not went_well
    assert 'admission webhook "validate.ragcache.dev" denied the request' in said
    assert "spec.model.source: path:models/mine is a local folder" in said
    assert "use hf:ORGANISATION/NAME" in said
    assert "spec.cacheStore.resources.memory: 1Gi is not above the 2Gi of memory" in said
    assert await api.get(RAG_CACHES, "bad", NAMESPACE) is None


async def test_an_immutable_field_is_rejected_with_its_path(api: Api, plane: ControlPlane) -> None:
    config = await installed(api, "unchanging")
    async with uninstalled_at_the_end(api, config), webhooks(plane, config):
        await api.create(RAG_COLLECTIONS, collection("fixed"))
        patch = {"spec": {"cacheRef": {"name": "other"}}}
        words = ("patch", "ragcollection", "fixed", "--type=merge", f"--patch={json.dumps(patch)}")
        went_well, said = await kubectl(plane, *words)
        assert not went_well
        assert "spec.cacheRef" in said


async def test_defaults_that_a_schema_cannot_set_are_filled_in(
    api: Api, plane: ControlPlane
) -> None:
    config = await installed(api, "defaulting")
    async with uninstalled_at_the_end(api, config), webhooks(plane, config):
        made = await api.create(RAG_COLLECTIONS, collection("handbook", prune=None, chunking=None))
        assert made["spec"]["collection"] == "handbook"
        assert "chunking" not in made["spec"]
        again = await api.merge(RAG_COLLECTIONS, "handbook", NAMESPACE, {"spec": {"prune": False}})
        assert again is not None
        assert again["spec"]["collection"] == "handbook"
        own = await api.create(RAG_COLLECTIONS, collection("second", collection="handbook"))
        assert own["spec"]["collection"] == "handbook"


async def test_an_object_that_became_invalid_can_be_edited_and_deleted(
    api: Api, plane: ControlPlane
) -> None:
    stored = cache("outdated", **UNFIT_SPEC)
    stored["metadata"]["finalizers"] = ["ragcache.dev/finalizer"]
    await api.create(RAG_CACHES, stored)
    config = await installed(api, "lenient")
    async with uninstalled_at_the_end(api, config), webhooks(plane, config):

        async def patched(patch: Object, subresource: str = "") -> Object | None:
            return await api.merge(RAG_CACHES, "outdated", NAMESPACE, patch, subresource)

        await patched({"status": {"phase": "Refused"}}, "status")
        await patched({"metadata": {"labels": {"team": "platform"}}})
        with pytest.raises(ApiError, match="is not above") as rejection:
            await patched({"spec": {"dataPolicy": "Delete"}})
        assert rejection.value.status == 422
        assert rejection.value.is_permanent
        await api.delete(RAG_CACHES, "outdated", NAMESPACE)
        await patched({"metadata": {"finalizers": []}})
        assert await api.get(RAG_CACHES, "outdated", NAMESPACE) is None


async def test_the_api_server_works_without_the_webhooks(api: Api, plane: ControlPlane) -> None:
    config = await installed(api, "down")
    async with uninstalled_at_the_end(api, config):
        async with webhooks(plane, config):
            pass
        assert not await refused(plane, UNFIT), "it has ended, and there was nobody to ask"

        hanging = await asyncio.start_server(silent, "127.0.0.1", config.port)
        assert not await refused(plane, UNFIT), "it hangs, and was given up"
        hanging.close()


async def test_certificates_rotate_under_load_without_failed_requests(
    api: Api, plane: ControlPlane
) -> None:
    rotation = Rotation(
        lifetime=timedelta(minutes=5),
        renew_before=timedelta(minutes=5) - timedelta(seconds=10),
        publish_for=timedelta(seconds=10),
    )
    config = await installed(api, "rotating", rotation=rotation)
    # The API server calls only the first replica. Clients with the same caBundle call both.
    second = replace(config, port=free_port())
    serials: dict[int, set[int]] = {config.port: set(), second.port: set()}
    asked = 0
    async with (
        uninstalled_at_the_end(api, config),
        webhooks(plane, config),
        webhooks(plane, second),
    ):

        def enough() -> bool:
            return min(map(len, serials.values())) >= 3

        async def users() -> None:
            nonlocal asked
            while not enough():
                # A failed review would let the object pass.
                assert await refused(plane, UNFIT)
                asked += 1

        async def clients(port: int) -> None:
            while not enough():
                client = await trusting(api, config)
                serials[port].add(await serial_of(port, client))

        async with asyncio.timeout(2 * SOON_S), asyncio.TaskGroup() as load:
            load.create_task(users())
            load.create_task(users())
            load.create_task(clients(config.port))
            load.create_task(clients(second.port))
    assert asked > 0


async def trusting(api: Api, config: AdmissionConfig) -> ssl.SSLContext:
    """Return a TLS client that trusts the caBundle of the webhook configuration."""
    found = await api.get(CONFIGURATIONS[VALIDATE], config.configurations)
    assert found is not None
    trusted = base64.b64decode(found["webhooks"][0]["clientConfig"]["caBundle"]).decode()
    return ssl.create_default_context(cadata=trusted)


async def serial_of(port: int, client: ssl.SSLContext) -> int:
    """Return the serial number of the served certificate. Raises SSLError if it is not trusted."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return x509.load_der_x509_certificate(shown).serial_number


async def test_a_connection_outlives_a_new_certificate(api: Api, plane: ControlPlane) -> None:
    config = await installed(api, "lasting")
    async with uninstalled_at_the_end(api, config), webhooks(plane, config):
        client = await trusting(api, config)
        before = await serial_of(config.port, client)
        async with aiohttp.ClientSession() as session:
            url = f"https://127.0.0.1:{config.port}/{VALIDATE}"
            connections = set()
            for turn in range(2):
                async with session.post(url, json=review(UNFIT), ssl=client) as response:
                    answer = await response.json()
                    assert response.connection is None or response.connection.transport
                assert not answer["response"]["allowed"]
                (pooled,) = session.connector._conns.values()  # type: ignore[union-attr]
                connections.add(id(pooled[0][0]))
                if turn == 0:
                    # A user empties the Secret to get a new certificate.
                    await emptied(api, config)
                    await until_other_serial(api, config, before)
        assert len(connections) == 1


def review(obj: Object) -> Object:
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "1",
            "operation": "CREATE",
            "userInfo": {"username": "tester"},
            "resource": {"group": "ragcache.dev", "version": "v1alpha1", "resource": "ragcaches"},
            "object": obj,
            "oldObject": None,
        },
    }


async def emptied(api: Api, config: AdmissionConfig) -> None:
    secret = await api.get(SECRETS, config.secret, NAMESPACE)
    assert secret is not None
    await api.replace(SECRETS, {**secret, "data": {"tls.crt": "", "tls.key": ""}})


async def until_other_serial(api: Api, config: AdmissionConfig, before: int) -> None:
    async def other() -> bool:
        return await serial_of(config.port, await trusting(api, config)) != before

    await until(other)


async def test_changes_by_others_are_reverted_and_nothing_else_is_written(
    api: Api, plane: ControlPlane
) -> None:
    config = await installed(api, "healing")

    async def versions() -> list[str]:
        found = [await api.get(r, config.configurations) for r in CONFIGURATIONS.values()]
        found.append(await api.get(SECRETS, config.secret, NAMESPACE))
        return [obj["metadata"]["resourceVersion"] for obj in found if obj is not None]

    async with uninstalled_at_the_end(api, config), webhooks(plane, config):
        before = await versions()
        await asyncio.sleep(4 * config.poll_s)
        assert await versions() == before
        live = await api.get(CONFIGURATIONS[DEFAULT], config.configurations)
        assert live is not None
        await api.replace(CONFIGURATIONS[DEFAULT], {**live, "webhooks": []})
        await until(lambda: name_is_filled_in(plane))


async def test_a_missing_configuration_is_not_created(
    api: Api, plane: ControlPlane, caplog: pytest.LogCaptureFixture
) -> None:
    config = await installed(api, "half")
    await api.delete(CONFIGURATIONS[VALIDATE], config.configurations)
    async with uninstalled_at_the_end(api, config), replica(plane, config):
        await until(said("missing: ValidatingWebhookConfiguration half", caplog))
        # The other webhook works.
        await until(lambda: name_is_filled_in(plane))
        assert await api.get(CONFIGURATIONS[VALIDATE], config.configurations) is None


@pytest.mark.parametrize("before", ["missing", "empty", "damaged"])
async def test_replicas_that_start_together_agree_on_one_certificate(
    api: Api, plane: ControlPlane, before: str
) -> None:
    name = f"agreed-{before}"
    if before != "missing":
        secret = {**named("v1", "Secret", name, NAMESPACE), "type": "Opaque"}
        if before == "damaged":
            secret["data"] = {"tls.crt": base64.b64encode(b"nonsense").decode(), "other": "AA=="}
        await api.create(SECRETS, secret)
    names = service_names("hooks", NAMESPACE)
    now = datetime.now(UTC)
    bundles = await asyncio.gather(
        *(ensure_bundle(api, NAMESPACE, name, names, now) for _ in range(8))
    )
    assert len(set(bundles)) == 1
    stored = await api.get(SECRETS, name, NAMESPACE)
    assert stored is not None
    assert read_bundle(stored, names) == bundles[0]
    assert sorted(stored["data"]) == ["ca.crt", "tls.crt", "tls.key"]


async def test_a_failure_of_the_webhooks_is_logged_and_ends_nothing(
    api: Api, plane: ControlPlane, caplog: pytest.LogCaptureFixture
) -> None:
    config = await installed(api, "early")

    async def nowhere() -> Api:
        raise ApiError(0, "NoAnswer", "no answer")

    async with uninstalled_at_the_end(api, config), serving_admission(nowhere, config):
        await until(said("admission: not serving error=kubernetes: no answer", caplog))
    assert not await refused(plane, UNFIT)


async def test_the_server_waits_for_a_port_in_use(
    api: Api, plane: ControlPlane, caplog: pytest.LogCaptureFixture
) -> None:
    config = await installed(api, "taken")
    async with uninstalled_at_the_end(api, config):
        taken = await asyncio.start_server(silent, port=config.port)
        async with replica(plane, config):
            await until(said("the admission port is unavailable", caplog))
            taken.close()
            await until(lambda: refused(plane, UNFIT))
