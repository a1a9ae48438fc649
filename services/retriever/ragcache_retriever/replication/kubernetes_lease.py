"""A Lease object of Kubernetes, by the REST API of its server.

Three calls are needed, so httpx suffices. The Lease's own fields hold what they are named for. The
number of transitions is the epoch, and annotations hold the rest.
"""

from __future__ import annotations

import os
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import httpx

from ragcache_core.cluster.writer_election import WriterLease
from ragcache_core.errors import InvalidInput
from ragcache_retriever.replication.lease_store import LeaseConflict, LeaseUnavailable

ACCOUNT_FOLDER: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S: Final = 2.0
_API: Final = "/apis/coordination.k8s.io/v1"
_ADDRESS: Final = "ragcache.dev/writer-address"
_REPLICAS: Final = "ragcache.dev/replicas"
_NOT_FOUND, _CONFLICT = 404, 409


class KubernetesLease:
    """A Lease in the cluster of this pod.

    Args:
        url: Base URL of the API server.
        account: Folder with the token and the certificate of a ServiceAccount. The kubelet replaces
            the token while the pod runs.
    """

    def __init__(self, url: str, namespace: str, name: str, account: Path) -> None:
        self._path = f"{_API}/namespaces/{namespace}/leases"
        self._namespace = namespace
        self._name = name
        self._token = account / "token"
        try:
            context = ssl.create_default_context(cafile=str(account / "ca.crt"))
        except OSError as error:
            raise InvalidInput(
                "RAGCACHE_LEASE",
                f"{account} has no certificate of the API server: {error}",
                "let the pod mount a token of its ServiceAccount",
            ) from error
        self._client = httpx.AsyncClient(
            base_url=url, verify=context, timeout=TIMEOUT_S, trust_env=False
        )

    @classmethod
    def of_this_pod(cls, namespace: str, name: str) -> KubernetesLease:
        """Return a Lease at the API server that the kubelet names."""
        host = os.environ.get("KUBERNETES_SERVICE_HOST")
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise InvalidInput(
                "RAGCACHE_LEASE", "names Kubernetes, and this is no pod", "use file:PATH"
            )
        literal = f"[{host}]" if ":" in host else host
        return cls(f"https://{literal}:{port}", namespace, name, ACCOUNT_FOLDER)

    async def read(self) -> WriterLease | None:
        """See LeaseStore."""
        found = await self._call("GET", f"{self._path}/{self._name}")
        return None if found is None else lease_of(found)

    async def write(self, lease: WriterLease) -> WriterLease:
        """See LeaseStore."""
        body = object_of(lease, self._namespace, self._name, datetime.now(UTC))
        if lease.version:
            written = await self._call("PUT", f"{self._path}/{self._name}", body)
        else:
            written = await self._call("POST", self._path, body)
        if written is None:
            raise LeaseConflict("the Lease was deleted")
        return lease_of(written)

    async def close(self) -> None:
        """See LeaseStore."""
        await self._client.aclose()

    async def _call(self, method: str, path: str, body: Any = None) -> Any:
        """Return the object of the answer, or None if it does not exist."""
        try:
            headers = {"Authorization": f"Bearer {self._token.read_text().strip()}"}
            answer = await self._client.request(method, path, json=body, headers=headers)
            content = answer.json()
        except (httpx.HTTPError, OSError, ValueError) as error:
            raise LeaseUnavailable(str(error) or type(error).__name__) from error
        if answer.status_code == _CONFLICT:
            raise LeaseConflict(str(content.get("message", "")))
        if answer.status_code == _NOT_FOUND and method != "POST":
            return None
        if answer.is_error:
            raise LeaseUnavailable(f"{answer.status_code}: {content.get('message', '')}")
        return content


def object_of(lease: WriterLease, namespace: str, name: str, now: datetime) -> dict[str, Any]:
    """Return the object of a Lease.

    Args:
        now: Time of the write. Only people read it.
    """
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": namespace,
        "annotations": {_ADDRESS: lease.address, _REPLICAS: str(lease.num_replicas)},
    }
    if lease.version:
        metadata["resourceVersion"] = lease.version
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata,
        "spec": {
            "holderIdentity": lease.holder,
            "leaseDurationSeconds": int(lease.lease_s),
            "leaseTransitions": lease.epoch,
            "renewTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        },
    }


def lease_of(found: dict[str, Any]) -> WriterLease:
    """Return the Lease of an object. Fields that another client removed count as empty."""
    metadata, spec = found["metadata"], found.get("spec") or {}
    annotations = metadata.get("annotations") or {}
    replicas = annotations.get(_REPLICAS, "")
    return WriterLease(
        holder=spec.get("holderIdentity") or "",
        address=annotations.get(_ADDRESS, ""),
        epoch=int(spec.get("leaseTransitions") or 0),
        lease_s=float(spec.get("leaseDurationSeconds") or 0),
        num_replicas=int(replicas) if replicas.isdigit() else 0,
        version=metadata["resourceVersion"],
    )
