"""The Jobs of a RagCollection: built here, and read back."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from ragcache_operator.builders.labels import SYNC_COMPONENT, labels
from ragcache_operator.builders.pods.pod import CONTAINER_SECURITY, POD_SECURITY, placement
from ragcache_operator.collections.mounts import MOUNTS, mount_name, token_variable
from ragcache_operator.collections.outcome import Outcome
from ragcache_operator.collections.revision import Revision
from ragcache_operator.kube.resources import RAG_COLLECTIONS, Object
from ragcache_operator.spec import (
    GROUP,
    RagCache,
    RagCollection,
    SourceSpec,
    parse_duration,
)

COLLECTION_LABEL: Final = f"{GROUP}/collection"
"""Tells the Jobs and pods of one RagCollection; its value is the object's name."""
REVISION: Final = f"{GROUP}/revision"
ATTEMPT: Final = f"{GROUP}/attempt"
STARTED: Final = f"{GROUP}/started"
"""The operator's own time: the API server's knows no order of two Jobs in one second."""
PURPOSE: Final = f"{GROUP}/purpose"
OUTCOME: Final = f"{GROUP}/outcome"
REMOVAL: Final = "remove"

CONTAINER: Final = "sync"
LONGEST_SYNC_S: Final = 4 * 3600
"""A sync that takes longer hangs, or goes on with the next: what is written stays written."""
LONGEST_REMOVAL_S: Final = 300
_REMOVAL_PATIENCE_S: Final = 120
_SHORTEST_TTL_S: Final = 3600
_SCRATCH: Final = "1Gi"
# Beyond what sources may take: git's own files beside the pack, unpacked text beside its archive.
_SCRATCH_VOLUME: Final = "2Gi"
_RESULT: Final = "/dev/termination-log"


@dataclass(frozen=True, slots=True)
class SyncJob:
    """A Job as decisions see it. Times in seconds since 1970.

    started_at: when it was made, which orders Jobs as they ended, because no two run at once.
    finished_at: None while it runs. outcome: None until it was read. ending: it is being deleted,
    and its pod may still run.
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
        """Whether a pod of it may be at work."""
        return self.finished_at is None or self.ending


def sync_job(
    collection: RagCollection,
    uid: str,
    cache: RagCache,
    revision: Revision,
    attempt: int,
    after: str,
    now: float,
    claims: Collection[str],
    image: str,
    gateway_url: str,
) -> Object:
    """The Job that brings a RagCollection's documents.

    uid: of the RagCollection. after: the time of the sync before, so that every sync has a name of
    its own and asking twice for one makes one. now: the time. claims: volume claims that are there;
    a pod that mounts another would wait for ever, and no source would be read.
    """
    key = json.dumps([uid, str(revision), attempt, after])
    name = f"{collection.metadata.name}-sync-{hashlib.sha256(key.encode()).hexdigest()[:10]}"
    sources = [
        (index, source)
        for index, source in enumerate(collection.spec.sources)
        if source.volume is None or source.volume.claim_name in claims
    ]
    mounts = [(mount_name(i), volume) for i, s in sources if (volume := _volume(s)) is not None]
    interval_s = parse_duration(collection.spec.sync.interval)
    owner = {
        "apiVersion": RAG_COLLECTIONS.api_version,
        "kind": RAG_COLLECTIONS.kind,
        "name": collection.metadata.name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }
    job = _job(collection, cache, name, image, gateway_url, ("--scratch", _SCRATCH), LONGEST_SYNC_S)
    annotations = {REVISION: str(revision), ATTEMPT: str(attempt), STARTED: f"{now:.3f}"}
    job["metadata"] |= {"annotations": annotations, "ownerReferences": [owner]}
    # The last Job says how the last sync ended, so it outlives the wait for the next.
    job["spec"]["ttlSecondsAfterFinished"] = max(_SHORTEST_TTL_S, 2 * interval_s)
    pod = job["spec"]["template"]["spec"]
    pod["volumes"] += [{"name": mount, **volume} for mount, volume in mounts]
    container = pod["containers"][0]
    container["volumeMounts"] += [
        {"name": mount, "mountPath": f"{MOUNTS}/{mount}", "readOnly": True} for mount, _ in mounts
    ]
    container["env"] += [variable for i, s in sources for variable in _token(i, s)]
    return job


def removal_job(
    collection: RagCollection, uid: str, cache: RagCache, image: str, gateway_url: str
) -> Object:
    """The Job that deletes a RagCollection's documents.

    It has no owner: one that is being deleted may take what it owns along before it is done.
    """
    name = removal_name(collection.metadata.name, uid)
    words = ("--remove", "--patience", str(_REMOVAL_PATIENCE_S))
    job = _job(collection, cache, name, image, gateway_url, words, LONGEST_REMOVAL_S)
    job["metadata"]["annotations"] = {PURPOSE: REMOVAL}
    job["spec"]["ttlSecondsAfterFinished"] = _SHORTEST_TTL_S
    return job


def removal_name(collection: str, uid: str) -> str:
    """Name of the Job that deletes a RagCollection's documents."""
    return f"{collection}-{REMOVAL}-{hashlib.sha256(uid.encode()).hexdigest()[:10]}"


def is_removal(job: Object) -> bool:
    """Whether a Job is one that deletes documents."""
    return (job["metadata"].get("annotations") or {}).get(PURPOSE) == REMOVAL


def read_job(job: Object) -> SyncJob:
    """A live Job as decisions see it."""
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
    """Seconds since 1970 of a time as the API server writes it."""
    return datetime.datetime.fromisoformat(text).timestamp()


def format_time(at: float) -> str:
    """A time as the API server writes it, to the second."""
    moment = datetime.datetime.fromtimestamp(int(at), datetime.UTC)
    return moment.isoformat().replace("+00:00", "Z")


def _number(text: str) -> float:
    """A number that we wrote; 0 for what somebody else made of it."""
    return float(text) if re.fullmatch(r"\d{1,12}(\.\d{1,6})?", text, re.ASCII) else 0.0


def _finished_at(job: Object) -> float | None:
    status = job.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition["status"] == "True" and condition["type"] in ("Complete", "Failed"):
            at = status.get("completionTime") or condition.get("lastTransitionTime")
            return parse_time(at or job["metadata"]["creationTimestamp"])
    return None


def _job(
    collection: RagCollection,
    cache: RagCache,
    name: str,
    image: str,
    gateway_url: str,
    words: tuple[str, ...],
    longest_s: int,
) -> Object:
    """A Job that runs ``ragcache sync``, without what the sources need."""
    manifest = collection.model_dump(
        mode="json", by_alias=True, exclude_none=True, exclude={"metadata": {"uid"}}
    )
    mine = {
        **labels(cache.metadata.name, SYNC_COMPONENT),
        COLLECTION_LABEL: collection.metadata.name,
    }
    arguments = ("--object", json.dumps(manifest), "--gateway", gateway_url, "--result", _RESULT)
    container = {
        "name": CONTAINER,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["ragcache", "sync"],
        "args": [*arguments, *words],
        "env": [
            {"name": "HOME", "value": "/tmp"},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
        ],
        # What sources hold is somebody else's: it may not take the node's memory.
        "resources": {
            "requests": {"cpu": "100m", "memory": "256Mi"},
            "limits": {"memory": "1Gi"},
        },
        "volumeMounts": [{"name": "scratch", "mountPath": "/tmp"}],
        "terminationMessagePath": _RESULT,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": CONTAINER_SECURITY,
    }
    pod = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 10,
        "securityContext": POD_SECURITY,
        "containers": [container],
        "volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": _SCRATCH_VOLUME}}],
        **placement(cache.spec.scheduling),
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": collection.metadata.namespace, "labels": mine},
        "spec": {
            # Whether and when to try again is for the operator to say.
            "backoffLimit": 0,
            "activeDeadlineSeconds": longest_s,
            "template": {"metadata": {"labels": mine}, "spec": pod},
        },
    }


def _volume(source: SourceSpec) -> Object | None:
    """The pod's volume for a source that is one."""
    if source.config_map is not None:
        # One that is missing is an empty folder, which the sync reports; the pod starts.
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
    # As with ConfigMaps: the sync says that it is missing.
    reference = {"name": secret.name, "key": secret.key, "optional": True}
    return [{"name": token_variable(index), "valueFrom": {"secretKeyRef": reference}}]
