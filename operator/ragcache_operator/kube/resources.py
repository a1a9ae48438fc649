"""The kinds of objects that the operator uses, and their paths on the API server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]
"""A Kubernetes object as a JSON value."""


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind in one version. ``plural`` is its name in paths."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """The ``apiVersion`` of its objects, like ``apps/v1`` or ``v1``."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str | None = None) -> str:
        """Return the path on the server. Without a namespace, the path covers all namespaces."""
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        if name:
            parts.append(name)
        return "/" + "/".join(parts)


def _core(plural: str, kind: str, *, namespaced: bool = True) -> Resource:
    return Resource("", "v1", plural, kind, namespaced)


NAMESPACES = _core("namespaces", "Namespace", namespaced=False)
NODES = _core("nodes", "Node", namespaced=False)
PODS = _core("pods", "Pod")
SERVICES = _core("services", "Service")
CONFIG_MAPS = _core("configmaps", "ConfigMap")
SECRETS = _core("secrets", "Secret")
SERVICE_ACCOUNTS = _core("serviceaccounts", "ServiceAccount")
CLAIMS = _core("persistentvolumeclaims", "PersistentVolumeClaim")
EVENTS = _core("events", "Event")
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
STATEFUL_SETS = Resource("apps", "v1", "statefulsets", "StatefulSet")
JOBS = Resource("batch", "v1", "jobs", "Job")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
NETWORK_POLICIES = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
INGRESSES = Resource("networking.k8s.io", "v1", "ingresses", "Ingress")
HTTP_ROUTES = Resource("gateway.networking.k8s.io", "v1", "httproutes", "HTTPRoute")
POD_MONITORS = Resource("monitoring.coreos.com", "v1", "podmonitors", "PodMonitor")
CERTIFICATES = Resource("cert-manager.io", "v1", "certificates", "Certificate")
RAG_CACHES = Resource("ragcache.dev", "v1alpha1", "ragcaches", "RagCache")
RAG_COLLECTIONS = Resource("ragcache.dev", "v1alpha1", "ragcollections", "RagCollection")
CRDS = Resource(
    "apiextensions.k8s.io",
    "v1",
    "customresourcedefinitions",
    "CustomResourceDefinition",
    namespaced=False,
)
DISRUPTION_BUDGETS = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
AUTOSCALERS = Resource("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler")

_ALL = (
    *(NAMESPACES, NODES, PODS, SERVICES, CONFIG_MAPS, SECRETS, SERVICE_ACCOUNTS, CLAIMS, EVENTS),
    *(DEPLOYMENTS, STATEFUL_SETS, JOBS, LEASES, NETWORK_POLICIES, INGRESSES, HTTP_ROUTES),
    *(POD_MONITORS, CERTIFICATES, RAG_CACHES, RAG_COLLECTIONS, CRDS),
    *(DISRUPTION_BUDGETS, AUTOSCALERS),
)
_BY_KIND = {(resource.api_version, resource.kind): resource for resource in _ALL}


def resource_of(obj: Object) -> Resource:
    """Return the resource of an object. Raises KeyError for an unknown kind."""
    return _BY_KIND[obj["apiVersion"], obj["kind"]]


def identity(obj: Object) -> tuple[str, str, str]:
    """Return (kind, namespace, name), which identifies an object across API versions."""
    meta = obj["metadata"]
    return obj["kind"], meta.get("namespace", ""), meta["name"]
