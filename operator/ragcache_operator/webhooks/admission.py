"""Webhooks: refuse what cannot work before it is stored, and fill in what schemas cannot.

They are a convenience. The reconciler checks every object again, so whenever a webhook does not
answer, or breaks, the API server goes on without it.
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
"""By webhook, the kind of object that tells the API server of it."""

# A user waits for an answer that takes microseconds to make; a lost one should cost little.
_TIMEOUT_S: Final = 5
_RETRY_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """How webhooks are served.

    namespace: the operator's own. secret: of the certificate that all replicas share.
    configurations: name of the webhook configurations. names: under which the server is asked.
    namespaces: those whose objects are checked; empty for all.
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
        """What the chart makes room for: a Secret and configurations named after the Service."""
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
    """Everything that speaks against an object, a line each; None if nothing does."""
    return "\n".join(map(str, find_problems(new, old))) or None


def spec_with_defaults(obj: Object) -> Any:
    """An object's spec with what the schema cannot give: nulls left out, a collection's name.

    Only what can never change is derived. A default that follows from a field that may change, as a
    model's name from its source, would stay behind when that field changes; it is left open here
    and derived on each use.
    """
    spec = _without_nulls(obj.get("spec"))
    name = (obj.get("metadata") or {}).get("name")
    if obj.get("kind") == RAG_COLLECTIONS.kind and name and isinstance(spec, dict):
        return {"collection": name, **spec}
    return spec


def webhooks(
    webhook: str, client: kopf.WebhookClientConfig, namespaces: Sequence[str]
) -> list[Object]:
    """What a webhook's configuration says, complete, so that it can be compared."""
    found: Object = {
        "name": f"{webhook}.{GROUP}",
        "admissionReviewVersions": ["v1"],
        "clientConfig": _at_path(client, webhook),
        "rules": [
            {
                "apiGroups": [GROUP],
                "apiVersions": sorted({resource.version for resource in _RESOURCES}),
                # Not their status, nor their scale: neither says anything that is checked here.
                "resources": [resource.plural for resource in _RESOURCES],
                "operations": list(_OPERATIONS),
                "scope": "Namespaced",
            }
        ],
        # The reconciler checks again, so a webhook that is down holds nobody up.
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
    """Kopf's handlers of the webhooks, for every replica."""
    registry = kopf.OperatorRegistry()
    # One of them fits. They are asked once, when Kopf looks up what the server serves.
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
    """Kopf's handler of the validating webhook."""
    old = review["old"]
    try:
        found = rejection(dict(body), None if old is None else dict(old))
    except Exception:
        # A mistake of ours must not lock everybody out.
        log.exception("an object could not be checked, and is let through")
        return
    if found is not None:
        raise kopf.AdmissionError(found, code=422)


def default(body: kopf.Body, patch: kopf.Patch, **review: Any) -> None:
    """Kopf's handler of the mutating webhook."""
    old = review["old"]
    if old is not None and old.get("spec") == body.get("spec"):
        # An update that leaves the spec alone, like that of a finalizer, changes it here neither.
        return
    try:
        spec = spec_with_defaults(dict(body))
    except Exception:
        log.exception("an object's defaults could not be filled in, and are left open")
        return

    def fill(raw: Any) -> None:
        raw["spec"] = spec

    if spec != body.get("spec"):
        patch.fns.append(fill)


async def announce(
    api: Api, name: str, namespaces: Sequence[str], client: kopf.WebhookClientConfig
) -> None:
    """Make the webhook configurations of this name say what they should.

    They exist already: whoever installed the operator made them, empty, and removes them with it.
    Raises ApiError, also if one does not exist.
    """
    missing = []
    for webhook, resource in CONFIGURATIONS.items():
        wanted = webhooks(webhook, client, namespaces)
        live = await api.get(resource, name)
        if live is None:
            missing.append(f"{resource.kind} {name}")
        elif difference(wanted, live.get("webhooks")) is not None:
            # An update, not an apply, because it must not make what was uninstalled.
            await api.replace(resource, {**live, "webhooks": wanted})
            log.info("%s %s is up to date", resource.kind, name)
    if missing:
        raise ApiError(404, "NotFound", f"missing: {', '.join(missing)}")


async def run_admission(api: Api, config: AdmissionConfig, stop: asyncio.Event) -> None:
    """Serve the webhooks until told to stop."""

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

    async def tell(client: kopf.WebhookClientConfig) -> None:
        await announce(api, config.configurations, config.namespaces, client)

    settings = kopf.OperatorSettings()
    settings.peering.standalone = True
    settings.posting.enabled = False
    # Nothing is watched: which kinds there are is known once they are served.
    settings.scanning.disabled = True
    # Kopf would manage the configurations too, but each replica that stops would empty them for
    # all, they could not be told to time out early, and nobody would remove them.
    settings.admission.managed = None
    settings.admission.server = WebhookServer(
        certificates=certificates,
        announce=tell,
        endpoint=config.endpoint,
        port=config.port,
        poll_s=config.poll_s,
        jitter=random.random,
    )
    if await _our_kinds(api, stop):
        await kopf.operator(
            registry=admission_registry(), settings=settings, clusterwide=True, stop_flag=stop
        )


@asynccontextmanager
async def serving_admission(
    connect: Callable[[], Awaitable[Api]], config: AdmissionConfig
) -> AsyncIterator[None]:
    """Serve the webhooks meanwhile, in a thread and an event loop of their own.

    Two of Kopf's operators do not share a loop well: the one that ends waits for, then cancels,
    every task begun after itself, whoever's it is, and both want the signals. What goes wrong here
    is logged and tried again, and never ends the rest of the process.
    """
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        while not stop.is_set():
            try:
                async with await connect() as api:
                    await run_admission(api, config, stop)
            except RagCacheError as error:
                log.warning("webhooks are not served: %s", error)
            except Exception:
                log.exception("webhooks are not served")
            await _pause(stop)

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


async def _our_kinds(api: Api, stop: asyncio.Event) -> bool:
    """Wait until the API server serves our kinds; False if told to stop before."""
    while not stop.is_set():
        try:
            if await serves_our_kinds(api):
                return True
            log.info("webhooks wait for the server to serve our kinds")
        except ApiError as error:
            log.info("webhooks wait for the server: %s", error)
        await _pause(stop)
    return False


async def _pause(stop: asyncio.Event) -> None:
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
    # A label that every namespace has since Kubernetes 1.21; before, the reconciler is alone.
    key = "kubernetes.io/metadata.name"
    return {"matchExpressions": [{"key": key, "operator": "In", "values": list(namespaces)}]}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
