"""Builds the Jobs of a RagCollection, and reads their state."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from ragcache_operator.builders.capabilities import Capabilities
from ragcache_operator.builders.environment import container_environment
from ragcache_operator.builders.metadata import SYNC_COMPONENT, labels
from ragcache_operator.builders.placement import GATEWAY_TLS_FOLDER
from ragcache_operator.builders.pod import (
    CONTAINER_SECURITY,
    DerivedResources,
    Mount,
    component_template,
    container_mount,
    resources,
    template_fields,
    template_metadata,
)
from ragcache_operator.builders.shared_environment import shared_environment, shared_mounts
from ragcache_operator.collections.outcome import Outcome
from ragcache_operator.collections.revision import Revision
from ragcache_operator.kube.resources import RAG_COLLECTIONS, SECRETS, Object
from ragcache_operator.spec.collection import (
    MOUNTS,
    SECRET_HOSTS,
    RagCollection,
    SourceSpec,
    hosts_variable,
    mount_name,
    parse_duration,
    token_variable,
)
from ragcache_operator.spec.quantity import format_bytes
from ragcache_operator.spec.ragcache import GatewayTlsSpec, RagCache
from ragcache_operator.spec.values import GROUP, ResourcesSpec
from ragcache_wire.watched.server_certificate import CERTIFICATE_FILE

COLLECTION_LABEL: Final = f"{GROUP}/collection"
"""Label of the Jobs and pods of a RagCollection. Its value is the name of the object."""
REVISION: Final = f"{GROUP}/revision"
ATTEMPT: Final = f"{GROUP}/attempt"
STARTED: Final = f"{GROUP}/started"
"""The operator's time of creation, because the API server's has a resolution of one second."""
PURPOSE: Final = f"{GROUP}/purpose"
OUTCOME: Final = f"{GROUP}/outcome"
REMOVAL: Final = "remove"

CONTAINER: Final = "sync"
SYNC_TIMEOUT_S: Final = 4 * 3600
"""The next sync continues after a timeout, because written documents stay."""
REMOVAL_JOB_TIMEOUT_S: Final = 300
_GATEWAY_PATIENCE_S: Final = 120
_MIN_TTL_S: Final = 3600
_SCRATCH: Final = "1Gi"
# More than the limit of sources: git keeps files next to the pack, and archives are unpacked.
_SCRATCH_VOLUME: Final = "2Gi"
_SCRATCH_MOUNT: Final = Mount("scratch", "/tmp", {"emptyDir": {"sizeLimit": _SCRATCH_VOLUME}})
_DERIVED: Final = DerivedResources("100m", 256 << 20)
_MEMORY_LIMIT_BYTES: Final = 1 << 30
_KEY_VARIABLE: Final = "RAGCACHE_API_KEY"
_KEY_ENTRY: Final = "key"
_RESULT: Final = "/dev/termination-log"


@dataclass(frozen=True, slots=True)
class SyncJob:
    """The state of a Job. Times are in seconds since 1970.

    Args:
        started_at: Time of creation. It also orders Jobs by their end, because only one runs.
        finished_at: None while the Job runs.
        outcome: None until the operator has stored it.
        ending: Whether the Job is being deleted, so that its pod may still run.
    """

    name: str
    revision: Revision
    attempt: int = 0
    started_at: float = 0.0
    finished_at: float | None = None
    outcome: Outcome | None = None
    ending: bool = False

    @property
    def may_run(self) -> bool:
        """Whether a pod of the Job may still run."""
        return self.finished_at is None or self.ending


@dataclass(frozen=True, slots=True)
class SyncTarget:
    """A RagCollection, and the RagCache that its Jobs send documents to.

    Args:
        uid: Uid of the RagCollection.
        image: Image of the Jobs.
        capabilities: Capabilities of the API server.
        key: API key of the collection's syncs; None if the gateway needs none.
        allowed_networks: Networks that are not public, and that sources may have.
    """

    collection: RagCollection
    uid: str
    cache: RagCache
    image: str
    gateway_url: str
    capabilities: Capabilities
    key: str | None = field(default=None, repr=False)
    allowed_networks: tuple[str, ...] = ()


def sync_job(
    target: SyncTarget,
    revision: Revision,
    attempt: int,
    after: str,
    now: float,
    claims: Collection[str],
) -> Object:
    """Return the Job that syncs a RagCollection.

    Args:
        after: Time of the last sync. The Job's name depends on it, so that each sync has another
            name and a repeated request creates one Job.
        now: The current time in seconds since 1970.
        claims: The existing volume claims. A pod that mounts a missing claim would never start, and
            the sync would read no source.
    """
    collection, uid = target.collection, target.uid
    key = json.dumps([uid, str(revision), attempt, after])
    name = f"{collection.metadata.name}-sync-{hashlib.sha256(key.encode()).hexdigest()[:10]}"
    sources = [
        (index, source)
        for index, source in enumerate(collection.spec.sources)
        if source.volume is None or source.volume.claim_name in claims
    ]
    mounts = [(mount_name(i), volume) for i, s in sources if (volume := _volume(s)) is not None]
    interval_s = parse_duration(collection.spec.sync.interval)
    allowed = [f"--allow-network={one}" for one in target.allowed_networks]
    options = ("--scratch", _SCRATCH, *allowed)
    job = _job(target, name, options, SYNC_TIMEOUT_S)
    annotations = {REVISION: str(revision), ATTEMPT: str(attempt), STARTED: f"{now:.3f}"}
    job["metadata"] |= {"annotations": annotations, "ownerReferences": [_owner(target)]}
    # The last Job records how the last sync ended, so it must exist until the next sync.
    job["spec"]["ttlSecondsAfterFinished"] = max(_MIN_TTL_S, 2 * interval_s)
    pod = job["spec"]["template"]["spec"]
    pod["volumes"] += [{"name": mount, **volume} for mount, volume in mounts]
    container = pod["containers"][0]
    container["volumeMounts"] += [
        {"name": mount, "mountPath": f"{MOUNTS}/{mount}", "readOnly": True} for mount, _ in mounts
    ]
    container["env"] += [variable for i, s in sources for variable in _token(i, s)]
    return job


def key_secret(target: SyncTarget) -> Object:
    """Return the Secret with the key of a collection's syncs. Its name follows from the key."""
    assert target.key is not None, "the gateway needs a key"
    return {
        "apiVersion": SECRETS.api_version,
        "kind": SECRETS.kind,
        "metadata": {
            "name": _key_name(target, target.key),
            "namespace": target.collection.metadata.namespace,
            "labels": labels(target.cache.metadata.name),
            "ownerReferences": [_owner(target)],
        },
        "type": "Opaque",
        "stringData": {_KEY_ENTRY: target.key},
    }


def _key_name(target: SyncTarget, key: str) -> str:
    digest = hashlib.sha256(f"{target.uid}\0{key}".encode()).hexdigest()[:10]
    return f"{target.collection.metadata.name}-sync-key-{digest}"


def _key_variable(target: SyncTarget) -> list[Object]:
    if target.key is None:
        return []
    reference = {"name": _key_name(target, target.key), "key": _KEY_ENTRY}
    return [{"name": _KEY_VARIABLE, "valueFrom": {"secretKeyRef": reference}}]


def _owner(target: SyncTarget) -> Object:
    return {
        "apiVersion": RAG_COLLECTIONS.api_version,
        "kind": RAG_COLLECTIONS.kind,
        "name": target.collection.metadata.name,
        "uid": target.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def removal_job(target: SyncTarget) -> Object:
    """Return the Job that deletes a RagCollection's documents.

    It has no owner, because Kubernetes may delete it together with a deleted owner.
    """
    name = removal_name(target.collection.metadata.name, target.uid)
    options = ("--remove", "--patience", str(_GATEWAY_PATIENCE_S))
    job = _job(target, name, options, REMOVAL_JOB_TIMEOUT_S)
    job["metadata"]["annotations"] = {PURPOSE: REMOVAL}
    job["spec"]["ttlSecondsAfterFinished"] = _MIN_TTL_S
    return job


def removal_name(collection: str, uid: str) -> str:
    """Return the name of the Job that deletes a RagCollection's documents."""
    return f"{collection}-{REMOVAL}-{hashlib.sha256(uid.encode()).hexdigest()[:10]}"


def is_removal(job: Object) -> bool:
    """Whether a Job deletes documents."""
    return (job["metadata"].get("annotations") or {}).get(PURPOSE) == REMOVAL


def read_job(job: Object) -> SyncJob:
    """Read the state of a live Job."""
    meta = job["metadata"]
    annotations = meta.get("annotations") or {}
    outcome = annotations.get(OUTCOME)
    return SyncJob(
        name=meta["name"],
        revision=Revision.parse(annotations.get(REVISION, "")),
        attempt=int(_number(annotations.get(ATTEMPT, ""))),
        started_at=_number(annotations.get(STARTED, "")) or parse_time(meta["creationTimestamp"]),
        finished_at=_finished_at(job),
        outcome=None if outcome is None else Outcome.from_json(outcome),
        ending="deletionTimestamp" in meta,
    )


def parse_time(text: str) -> float:
    """Parse a time of the API server to seconds since 1970."""
    return datetime.datetime.fromisoformat(text).timestamp()


def format_time(at: float) -> str:
    """Format a time as the API server does, in whole seconds."""
    time = datetime.datetime.fromtimestamp(int(at), datetime.UTC)
    return time.isoformat().replace("+00:00", "Z")


def _number(text: str) -> float:
    """Parse a number of our annotations. Invalid text counts as 0."""
    return float(text) if re.fullmatch(r"\d{1,12}(\.\d{1,6})?", text, re.ASCII) else 0.0


def _finished_at(job: Object) -> float | None:
    status = job.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition["status"] == "True" and condition["type"] in ("Complete", "Failed"):
            at = status.get("completionTime") or condition.get("lastTransitionTime")
            return parse_time(at or job["metadata"]["creationTimestamp"])
    return None


def _job(target: SyncTarget, name: str, options: tuple[str, ...], timeout_s: int) -> Object:
    """Return a Job that runs ``ragcache sync``, without the mounts and tokens of the sources."""
    collection, cache = target.collection, target.cache
    manifest = collection.model_dump(
        mode="json", by_alias=True, exclude_none=True, exclude={"metadata": {"uid"}}
    )
    pod_labels = {
        **labels(cache.metadata.name, SYNC_COMPONENT),
        COLLECTION_LABEL: collection.metadata.name,
    }
    template = component_template(cache, cache.spec.sync_jobs.pod_template, target.capabilities)
    mounts = [_SCRATCH_MOUNT, *shared_mounts(cache, is_cluster=True)]
    arguments = ["--object", json.dumps(manifest), "--gateway", target.gateway_url]
    if cache.spec.gateway.tls is not None:
        mounts.append(_certificate_mount(cache.spec.gateway.tls))
        arguments += ["--certificate", f"{GATEWAY_TLS_FOLDER}/{CERTIFICATE_FILE}"]
    container = {
        "name": CONTAINER,
        "image": target.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["ragcache", "sync"],
        "args": [*arguments, "--result", _RESULT, *options],
        "env": [
            {"name": "HOME", "value": "/tmp"},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
            *_key_variable(target),
            *container_environment(shared_environment(cache, is_cluster=True)),
        ],
        "resources": _resources(cache.spec.sync_jobs.resources),
        "volumeMounts": [container_mount(mount) for mount in mounts],
        "terminationMessagePath": _RESULT,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": CONTAINER_SECURITY,
    }
    pod = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 10,
        "containers": [container],
        "volumes": [{"name": mount.name, **(mount.volume or {})} for mount in mounts],
        **template_fields(template),
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "namespace": collection.metadata.namespace,
            "labels": pod_labels,
        },
        "spec": {
            # The operator decides about retries.
            "backoffLimit": 0,
            "activeDeadlineSeconds": timeout_s,
            "template": {"metadata": template_metadata(template, pod_labels), "spec": pod},
        },
    }


def _certificate_mount(tls: GatewayTlsSpec) -> Mount:
    """Return the mount of the gateway's certificate, without its key.

    A sync compares it with what the gateway shows, which needs no names of the Service in it.
    """
    items = [{"key": CERTIFICATE_FILE, "path": CERTIFICATE_FILE}]
    volume = {"secretName": tls.secret_name, "items": items, "optional": True}
    return Mount("gateway-tls", GATEWAY_TLS_FOLDER, {"secret": volume}, read_only=True)


def _resources(given: ResourcesSpec) -> Object:
    """Return the resources of a Job. Sources are not trusted, so it always has a memory limit."""
    limit = given.memory_limit
    if limit is None:
        limit = format_bytes(max(_MEMORY_LIMIT_BYTES, given.memory_bytes or 0))
    return resources(_DERIVED, given.model_copy(update={"memory_limit": limit}))


def _volume(source: SourceSpec) -> Object | None:
    """Return the pod's volume for a source, or None for a source that is downloaded."""
    if source.config_map is not None:
        # With a missing ConfigMap the pod starts with an empty folder, and the sync reports it.
        return {"configMap": {"name": source.config_map.name, "optional": True}}
    if source.volume is not None:
        claim = {"claimName": source.volume.claim_name, "readOnly": True}
        return {"persistentVolumeClaim": claim}
    return None


def _token(index: int, source: SourceSpec) -> list[Object]:
    fetched = source.http or source.git
    if fetched is None or fetched.bearer_secret is None:
        return []
    secret = fetched.bearer_secret
    entries = {token_variable(index): secret.key, hosts_variable(index): SECRET_HOSTS}
    # Optional as for ConfigMaps: the sync reports a missing Secret.
    references = {
        name: {"name": secret.name, "key": key, "optional": True} for name, key in entries.items()
    }
    return [
        {"name": name, "valueFrom": {"secretKeyRef": reference}}
        for name, reference in references.items()
    ]
