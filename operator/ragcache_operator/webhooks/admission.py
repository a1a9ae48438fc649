"""Admission webhooks: reject invalid objects, and set defaults that a schema cannot set.

The webhooks are optional. The reconciler validates every object again, so the API server continues
without a webhook that does not answer.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import kopf

from ragcache_core.errors import RagCacheError
from ragcache_operator.kube.api import Api, ApiError
from ragcache_operator.kube.discovery import serves_our_kinds
from ragcache_operator.kube.drift import difference
from ragcache_operator.kube.resources import RAG_CACHES, RAG_COLLECTIONS, Object, Resource
from ragcache_operator.spec import GROUP
from ragcache_operator.spec.rules import find_problems
from ragcache_operator.webhooks.certificates import Bundle, Rotation, ensure_bundle, service_names
from ragcache_operator.webhooks.webhook_server import (
    ClientConfigFactory,
    WebhookServer,
    service_client_config,
)

log = logging.getLogger(__name__)

VALIDATE: Final = "validate"
DEFAULT: Final = "default"
_RESOURCES: Final = (RAG_CACHES, RAG_COLLECTIONS)
_OPERATIONS: Final = ("CREATE", "UPDATE")
_ADMISSION: Final = "admissionregistration.k8s.io"
CONFIGURATIONS: Final = {
    VALIDATE: Resource(
        _ADMISSION,
        "v1",
        "validatingwebhookconfigurations",
        "ValidatingWebhookConfiguration",
        namespaced=False,
    ),
    DEFAULT: Resource(
        _ADMISSION,
        "v1",
        "mutatingwebhookconfigurations",
        "MutatingWebhookConfiguration",
        namespaced=False,
    ),
}
"""The kind of object that registers each webhook with the API server."""

# A review takes microseconds, and a user waits for it. So a lost review must not cost much time.
_TIMEOUT_S: Final = 5
_RETRY_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Settings of the webhook server.

    Args:
        namespace: Namespace of the operator.
        secret: Secret with the certificate that all replicas share.
        configurations: Name of the webhook configurations.
        names: DNS names and addresses of the server, for its certificate.
        namespaces: Namespaces whose objects are validated. Empty for all.
    """

    namespace: str
    secret: str
    configurations: str
    names: tuple[str, ...]
    endpoint: ClientConfigFactory
    namespaces: tuple[str, ...] = ()
    port: int = 9443
    poll_s: float = 300.0
    rotation: Rotation = field(default_factory=Rotation)

    @classmethod
    def behind_service(
        cls, service: str, namespace: str, namespaces: tuple[str, ...], port: int
    ) -> AdmissionConfig:
        """Return the settings for the Helm chart, whose objects are named after the Service."""
        return cls(
            namespace=namespace,
            secret=f"{service}-tls",
            configurations=f"{service}.{namespace}",
            names=service_names(service, namespace),
            endpoint=service_client_config(service, namespace),
            namespaces=namespaces,
            port=port,
        )


def rejection(new: Mapping[str, Any], old: Mapping[str, Any] | None) -> str | None:
    """Return the problems of an object, one in each line, or None for a valid object."""
    return "\n".join(map(str, find_problems(new, old))) or None


def spec_with_defaults(obj: Object) -> Any:
    """Return an object's spec without nulls, and with the name of a collection.

    Only immutable fields get a default here. A default that follows from a mutable field, like a
    model's name from its source, would stay when that field changes. Readers derive it instead.
    """
    spec = _without_nulls(obj.get("spec"))
    name = (obj.get("metadata") or {}).get("name")
    if obj.get("kind") == RAG_COLLECTIONS.kind and name and isinstance(spec, dict):
        return {"collection": name, **spec}
    return spec


def webhooks(
    webhook: str, client: kopf.WebhookClientConfig, namespaces: Sequence[str]
) -> list[Object]:
    """Return the complete ``webhooks`` field of a webhook configuration."""
    found: Object = {
        "name": f"{webhook}.{GROUP}",
        "admissionReviewVersions": ["v1"],
        "clientConfig": _at_path(client, webhook),
        "rules": [
            {
                "apiGroups": [GROUP],
                "apiVersions": sorted({resource.version for resource in _RESOURCES}),
                # Their status and scale subresources have nothing to validate.
                "resources": [resource.plural for resource in _RESOURCES],
                "operations": list(_OPERATIONS),
                "scope": "Namespaced",
            }
        ],
        # The reconciler validates again, so a failing webhook must not block users.
        "failurePolicy": "Ignore",
        "matchPolicy": "Equivalent",
        "sideEffects": "None",
        "timeoutSeconds": _TIMEOUT_S,
        "objectSelector": {},
        "namespaceSelector": _namespace_selector(namespaces),
    }
    if webhook == DEFAULT:
        found["reinvocationPolicy"] = "Never"
    return [found]


def admission_registry() -> kopf.OperatorRegistry:
    """Return the handlers of the webhooks, which every replica serves."""
    registry = kopf.OperatorRegistry()
    # Kopf uses the first login that succeeds, once, to discover the resources of the server.
    kopf.on.login(registry=registry, id="pod")(kopf.login_with_service_account)
    kopf.on.login(registry=registry, id="kubeconfig")(kopf.login_with_kubeconfig)
    for resource in _RESOURCES:
        selector = (resource.group, resource.version, resource.plural)
        kopf.on.validate(*selector, id=VALIDATE, operations=_OPERATIONS, registry=registry)(
            validate
        )
        kopf.on.mutate(*selector, id=DEFAULT, operations=_OPERATIONS, registry=registry)(default)
    return registry


def validate(body: kopf.Body, **review: Any) -> None:
    """Handle the validating webhook."""
    old = review["old"]
    try:
        found = rejection(dict(body), None if old is None else dict(old))
    except Exception:
        # An error of the webhook must not block users.
        log.exception("admission: validation failed, object allowed")
        return
    if found is not None:
        raise kopf.AdmissionError(found, code=422)


def default(body: kopf.Body, patch: kopf.Patch, **review: Any) -> None:
    """Handle the mutating webhook."""
    old = review["old"]
    if old is not None and old.get("spec") == body.get("spec"):
        # An update that keeps the spec, like that of a finalizer, must not change it here.
        return
    try:
        spec = spec_with_defaults(dict(body))
    except Exception:
        log.exception("admission: defaulting failed, object unchanged")
        return

    def fill(raw: Any) -> None:
        raw["spec"] = spec

    if spec != body.get("spec"):
        patch.fns.append(fill)


async def announce(
    api: Api, name: str, namespaces: Sequence[str], client: kopf.WebhookClientConfig
) -> None:
    """Update the webhook configurations of this name.

    The Helm chart creates them empty and deletes them on uninstall.

    Raises:
        ApiError: A configuration does not exist, or a call failed.
    """
    missing = []
    for webhook, resource in CONFIGURATIONS.items():
        wanted = webhooks(webhook, client, namespaces)
        live = await api.get(resource, name)
        if live is None:
            missing.append(f"{resource.kind} {name}")
        elif difference(wanted, live.get("webhooks")) is not None:
            # An update, because an apply would recreate an uninstalled configuration.
            await api.replace(resource, {**live, "webhooks": wanted})
            log.info("admission: updated kind=%s name=%s", resource.kind, name)
    if missing:
        raise ApiError(404, "NotFound", f"missing: {', '.join(missing)}")


async def run_admission(api: Api, config: AdmissionConfig, stop: asyncio.Event) -> None:
    """Serve the webhooks until ``stop`` is set."""

    async def certificates(served: Bundle | None) -> Bundle:
        return await ensure_bundle(
            api,
            config.namespace,
            config.secret,
            config.names,
            datetime.now(UTC),
            rotation=config.rotation,
            served=served,
        )

    async def register(client: kopf.WebhookClientConfig) -> None:
        await announce(api, config.configurations, config.namespaces, client)

    settings = kopf.OperatorSettings()
    settings.peering.standalone = True
    settings.posting.enabled = False
    # This Kopf operator watches nothing, so it need not scan for kinds.
    settings.scanning.disabled = True
    # Kopf could manage the configurations. But each stopping replica would empty them for all
    # replicas, a short timeout is not possible, and an uninstall would not delete them.
    settings.admission.managed = None
    settings.admission.server = WebhookServer(
        certificates=certificates,
        announce=register,
        endpoint=config.endpoint,
        port=config.port,
        poll_s=config.poll_s,
        jitter=random.random,
    )
    if await _wait_for_kinds(api, stop):
        await kopf.operator(
            registry=admission_registry(), settings=settings, clusterwide=True, stop_flag=stop
        )


@asynccontextmanager
async def serving_admission(
    connect: Callable[[], Awaitable[Api]], config: AdmissionConfig
) -> AsyncIterator[None]:
    """Serve the webhooks inside the context, in a thread with its own event loop.

    Two Kopf operators cannot share an event loop. The one that ends waits for all tasks that
    started after it and cancels them, and both handle the signals. Failures here are logged and
    retried, and never end the process.
    """
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        while not stop.is_set():
            try:
                async with await connect() as api:
                    await run_admission(api, config, stop)
            except RagCacheError as error:
                log.warning("admission: not serving error=%s", error)
            except Exception:
                log.exception("admission: not serving")
            await _wait_retry(stop)

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run, name="admission", daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        await asyncio.to_thread(thread.join)


async def _wait_for_kinds(api: Api, stop: asyncio.Event) -> bool:
    """Wait until the API server serves our kinds. Return False if ``stop`` is set first."""
    while not stop.is_set():
        try:
            if await serves_our_kinds(api):
                return True
            log.info("admission: waiting until the API server serves our kinds")
        except ApiError as error:
            log.info("admission: waiting for the API server error=%s", error)
        await _wait_retry(stop)
    return False


async def _wait_retry(stop: asyncio.Event) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), _RETRY_S)


def _at_path(client: kopf.WebhookClientConfig, webhook: str) -> Object:
    at: Object = copy.deepcopy(dict(client))
    if "service" in at:
        at["service"]["path"] = f"/{webhook}"
    else:
        at["url"] = f"{at['url']}/{webhook}"
    return at


def _namespace_selector(namespaces: Sequence[str]) -> Object:
    if not namespaces:
        return {}
    # Every namespace has this label from Kubernetes 1.21 on. Older servers skip the webhook.
    key = "kubernetes.io/metadata.name"
    return {"matchExpressions": [{"key": key, "operator": "In", "values": list(namespaces)}]}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
