"""The reconcile pass of a RagCollection: observe, decide the next step, perform it, report.

A pass is level-triggered: it observes everything, so a lost event or a restart has no effect. If
nothing changed, a pass writes nothing.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ragcache_core.errors import InvalidInput
from ragcache_operator.builders.keys import uses_keys
from ragcache_operator.builders.metadata import selector_text
from ragcache_operator.builders.placement import ClusterPlacement
from ragcache_operator.collections.conditions import (
    CACHE_NOT_FOUND,
    CACHE_NOT_READY,
    SOURCE_NOT_FOUND,
    document_events,
    events_for,
    make_status,
    refused_status,
)
from ragcache_operator.collections.job import (
    COLLECTION_LABEL,
    CONTAINER,
    OUTCOME,
    REMOVAL_JOB_TIMEOUT_S,
    SyncJob,
    SyncTarget,
    format_time,
    is_removal,
    key_secret,
    parse_time,
    read_job,
    removal_job,
    removal_name,
    sync_job,
)
from ragcache_operator.collections.outcome import Outcome, outcome_of, waiting_reason
from ragcache_operator.collections.revision import (
    Revision,
    claim_names,
    config_map_names,
    revision_of,
)
from ragcache_operator.collections.schedule import (
    AwaitJob,
    Idle,
    LastSync,
    Postpone,
    RecordOutcome,
    Situation,
    StartJob,
    StopJob,
    SyncStep,
    newest_job,
    next_step,
    superseded,
)
from ragcache_operator.config import Installation
from ragcache_operator.kube.api import Api, ApiError, Conflict, write_status
from ragcache_operator.kube.resources import (
    CLAIMS,
    CONFIG_MAPS,
    JOBS,
    PODS,
    RAG_CACHES,
    SECRETS,
    Object,
)
from ragcache_operator.spec.collection import RagCollection, parse_duration
from ragcache_operator.spec.manifest import parse_collection, parse_manifest
from ragcache_operator.spec.ragcache import RagCache
from ragcache_operator.spec.rules import find_problems
from ragcache_operator.status.conditions import ObjectEvent, PostEvent, find

log = logging.getLogger(__name__)

JOB_POLL_S = 2.0
"""Interval of reading the progress of a running Job. No watch delivers it."""
REMOVAL_TIMEOUT_S = REMOVAL_JOB_TIMEOUT_S + 60.0
"""How long a deletion waits for its Job, including the start of the pod."""
_IMAGE = "tools"


@dataclass(frozen=True, slots=True)
class ObservedCache:
    """The RagCache of a collection.

    Args:
        spec: None while the RagCache cannot be used.
        problem: Reason and message of a condition if it takes no documents now, else None.
    """

    uid: str
    spec: RagCache | None
    problem: tuple[str, str] | None


class CollectionReconciler:
    """Keeps collections in sync with their sources."""

    def __init__(
        self, api: Api, installation: Installation, clock: Callable[[], float] = time.time
    ) -> None:
        self._api = api
        self._installation = installation
        self._clock = clock

    async def reconcile(self, body: Object, state: object, post_event: PostEvent) -> float | None:
        """Run one pass over a RagCollection.

        Args:
            state: Unused, because a pass needs no memory of earlier passes.

        Returns:
            The seconds until the next pass; None if only a change requires one.
        """
        problems = find_problems(body)
        if problems:
            message = "; ".join(map(str, problems))
            before, generation = body.get("status") or {}, body["metadata"]["generation"]
            status = refused_status(before, generation, message, self._clock())
            await self._write(body, status, post_event)
            return None
        collection = parse_collection(body)
        cache = await self._observe_cache(collection)
        situation = await self._observe(body, collection, cache)
        step = next_step(situation)
        if isinstance(step, RecordOutcome):
            outcome = await self._record(body, step.job)
            for event in document_events(outcome):
                post_event(event)
            situation = await self._observe(body, collection, cache)
            step = next_step(situation)
        wait_s = await self._perform(body, collection, cache, step)
        running = step.job if isinstance(step, AwaitJob) else None
        progress = "" if running is None else await self._progress(body, running)
        generation = body["metadata"]["generation"]
        status = make_status(body.get("status") or {}, generation, situation, step, progress)
        await self._write(body, status, post_event)
        for job in superseded(situation.jobs):
            await self._api.delete(JOBS, job.name, _namespace(body))
        return wait_s

    async def remove(self, body: Object, post_event: PostEvent) -> bool:
        """Delete the documents of a deleted RagCollection. Return whether that is finished.

        The documents stay if ``prune`` is false, or if no Job can delete them.
        """
        jobs = await self._jobs(body, of_any_owner=True)
        syncs = [job for job in jobs if not is_removal(job)]
        for job in syncs:
            await self._delete_job(job, "Foreground")
        if syncs:
            return False
        name = removal_name(body["metadata"]["name"], body["metadata"]["uid"])
        removal = next((job for job in jobs if job["metadata"]["name"] == name), None)
        event = await self._advance_removal(body, removal)
        if event is None:
            return False
        post_event(event)
        if removal is not None:
            await self._delete_job(removal, "Background")
        return True

    async def _advance_removal(self, body: Object, removal: Object | None) -> ObjectEvent | None:
        """Start or check the removal Job. Return the final Event, or None while it continues."""
        try:
            collection = parse_collection(body)
        except InvalidInput:
            return _documents_left("Warning", "the spec is invalid, so the documents are unknown")
        cache = await self._observe_cache(collection)
        if cache.spec is None:
            return _documents_left("Normal", cache.problem[1] if cache.problem else "")
        if not collection.spec.prune:
            return _documents_left("Normal", "prune is false")
        if removal is None:
            placement = self._installation.placement(cache.spec, cache.uid)
            target = self._target(body, collection, placement)
            try:
                await self._ensure_key(target)
                await self._create(removal_job(target))
            except ApiError as error:
                if not error.is_permanent:
                    raise
                # A quota or missing permissions may never change, and the object must go.
                return _documents_left("Warning", f"the API server rejects the Job: {error}")
        elif read_job(removal).finished_at is not None:
            outcome = outcome_of(removal, await self._pods(body, removal["metadata"]["name"]))
            return _removal_event(outcome)
        waited_s = self._clock() - parse_time(body["metadata"]["deletionTimestamp"])
        timed_out = _documents_left("Warning", "the Job that deletes them did not start in time")
        return timed_out if waited_s > REMOVAL_TIMEOUT_S else None

    # Observe

    async def _observe_cache(self, collection: RagCollection) -> ObservedCache:
        name, namespace = collection.spec.cache_ref.name, collection.metadata.namespace
        found = await self._api.get(RAG_CACHES, name, namespace)
        if found is None:
            message = f"there is no RagCache {name} in namespace {namespace}"
            return ObservedCache("", None, (CACHE_NOT_FOUND, message))
        uid = found["metadata"]["uid"]
        if "deletionTimestamp" in found["metadata"]:
            return ObservedCache(
                uid, None, (CACHE_NOT_READY, f"the RagCache {name} is being deleted")
            )
        try:
            spec = parse_manifest(found)
        except InvalidInput as error:
            return ObservedCache(
                uid, None, (CACHE_NOT_READY, f"the RagCache {name} is refused: {error}")
            )
        # The retriever and the gateway suffice: documents do not need a loaded model.
        conditions = (found.get("status") or {}).get("conditions") or ()
        for condition_type in ("RetrieverReady", "GatewayReady"):
            condition = find(conditions, condition_type)
            if condition is None or condition["status"] != "True":
                detail = "" if condition is None else f": {condition['message']}"
                message = f"the RagCache {name} is not {condition_type}{detail}"
                return ObservedCache(uid, spec, (CACHE_NOT_READY, message))
        return ObservedCache(uid, spec, None)

    async def _observe(
        self, body: Object, collection: RagCollection, cache: ObservedCache
    ) -> Situation:
        namespace = _namespace(body)
        names = config_map_names(collection)
        config_maps = {name: await self._api.get(CONFIG_MAPS, name, namespace) for name in names}
        jobs = [read_job(job) for job in await self._jobs(body) if not is_removal(job)]
        return Situation(
            interval_s=parse_duration(collection.spec.sync.interval),
            revision=revision_of(collection, cache.uid, config_maps),
            last=last_sync(body.get("status") or {}, jobs),
            jobs=jobs,
            blocked=cache.problem or _all_missing(collection, config_maps),
            polls_sources=bool(names),
            now=self._clock(),
        )

    async def _jobs(self, body: Object, *, of_any_owner: bool = False) -> list[Object]:
        meta = body["metadata"]
        selector = selector_text({COLLECTION_LABEL: meta["name"]})
        found = (await self._api.list(JOBS, meta["namespace"], labels=selector)).items
        # A Job of a deleted RagCollection of the same name will be deleted with its owner.
        return [
            job
            for job in found
            if of_any_owner
            or any(o["uid"] == meta["uid"] for o in job["metadata"].get("ownerReferences") or ())
        ]

    async def _pods(self, body: Object, job: str) -> Sequence[Object]:
        selector = selector_text({"job-name": job})
        return (await self._api.list(PODS, _namespace(body), labels=selector)).items

    # Perform

    async def _perform(
        self, body: Object, collection: RagCollection, cache: ObservedCache, step: SyncStep
    ) -> float:
        """Perform a step. Return the seconds until the next pass."""
        match step:
            case StopJob(job):
                # With foreground deletion, the Job exists until its pod is gone.
                await self._api.delete(JOBS, job.name, _namespace(body), "Foreground")
            case StartJob():
                await self._start(body, collection, cache, step)
            case Postpone(_, _, wait_s) | Idle(wait_s):
                return wait_s
        return JOB_POLL_S

    async def _start(
        self,
        body: Object,
        collection: RagCollection,
        cache: ObservedCache,
        step: StartJob,
    ) -> None:
        assert cache.spec is not None, "a RagCache without a spec blocks every start"
        namespace = _namespace(body)
        claims = {
            name
            for name in claim_names(collection)
            if await self._api.get(CLAIMS, name, namespace) is not None
        }
        placement = self._installation.placement(cache.spec, cache.uid)
        target = self._target(body, collection, placement)
        job = sync_job(
            target,
            step.revision,
            step.attempt,
            "" if step.after is None else format_time(step.after),
            self._clock(),
            claims,
        )
        await self._ensure_key(target)
        await self._create(job)

    def _target(
        self, body: Object, collection: RagCollection, placement: ClusterPlacement
    ) -> SyncTarget:
        cache, key = placement.cache, None
        if uses_keys(cache, placement):
            name = collection.collection_name
            key = self._installation.keys.collection_key(name, placement.owner, self._clock())
        image, url = placement.image(_IMAGE), placement.admin_url
        uid, capabilities = body["metadata"]["uid"], self._installation.capabilities
        networks = self._installation.config.source_networks
        return SyncTarget(collection, uid, cache, image, url, capabilities, key, networks)

    async def _ensure_key(self, target: SyncTarget) -> None:
        """Create the Secret with the key of syncs, unless there is one or none is needed."""
        if target.key is None:
            return
        try:
            await self._api.create(SECRETS, key_secret(target))
        except Conflict as error:
            if error.reason != "AlreadyExists":
                raise

    async def _create(self, job: Object) -> None:
        try:
            await self._api.create(JOBS, job)
        except Conflict:
            log.info("collections: Job exists already name=%s", job["metadata"]["name"])

    async def _record(self, body: Object, job: SyncJob) -> Outcome:
        """Store the outcome as an annotation of the Job, because its pod may be deleted earlier."""
        namespace = _namespace(body)
        live = await self._api.get(JOBS, job.name, namespace)
        outcome = outcome_of(live or {}, await self._pods(body, job.name))
        patch = {"metadata": {"annotations": {OUTCOME: outcome.to_json()}}}
        await self._api.merge(JOBS, job.name, namespace, patch)
        return outcome

    async def _progress(self, body: Object, job: SyncJob) -> str:
        """Return the progress of a Job, or what its pod waits for."""
        pods = await self._pods(body, job.name)
        for pod in pods:
            if (pod.get("status") or {}).get("phase") == "Running":
                path = PODS.path(_namespace(body), pod["metadata"]["name"]) + "/log"
                try:
                    return progress_in(
                        await self._api.text(path, container=CONTAINER, tailLines="1")
                    )
                except ApiError:
                    # The pod has just ended, or its node does not answer.
                    return ""
        return waiting_reason(pods)

    async def _delete_job(
        self, job: Object, propagation: Literal["Background", "Foreground"]
    ) -> None:
        meta = job["metadata"]
        if "deletionTimestamp" not in meta:
            await self._api.delete(JOBS, meta["name"], meta["namespace"], propagation)

    async def _write(self, body: Object, status: Object, post_event: PostEvent) -> None:
        """Write the status if it changed, and post an Event for a change of Synced."""
        live = body.get("status") or {}
        if await write_status(self._api, body, status):
            for event in events_for(live, status):
                post_event(event)


def last_sync(status: Object, jobs: Sequence[SyncJob]) -> LastSync | None:
    """Return the last sync from its Job, or from the status if the Job no longer exists."""
    newest = newest_job(jobs)
    if newest is not None and newest.outcome is not None and newest.finished_at is not None:
        return LastSync(newest.revision, newest.finished_at, newest.outcome, newest.attempt)
    at, revision = status.get("lastSyncTime"), status.get("sourceRevision")
    if not at or not revision:
        return None
    outcome = Outcome(
        "complete", documents=int(status.get("documents", 0)), chunks=int(status.get("chunks", 0))
    )
    return LastSync(Revision.parse(revision), parse_time(at), outcome)


def progress_in(line: str) -> str:
    """Return the progress in the last log line of a sync, like "12 of 40"; empty without one."""
    try:
        progress = json.loads(line)
        return f"{int(progress['done'])} of {int(progress['total'])}"
    except (ValueError, TypeError, KeyError):
        return ""


def _all_missing(
    collection: RagCollection, config_maps: Mapping[str, Object | None]
) -> tuple[str, str] | None:
    """Return a condition if every source is a missing ConfigMap, else None."""
    if any(source.config_map is None for source in collection.spec.sources):
        return None
    if any(found is not None for found in config_maps.values()):
        return None
    names = ", ".join(config_maps)
    return SOURCE_NOT_FOUND, f"there is no ConfigMap {names} in its namespace"


def _removal_event(outcome: Outcome) -> ObjectEvent:
    """Return the Event for a finished removal Job."""
    if outcome.verdict != "complete":
        return _documents_left("Warning", outcome.message)
    return ObjectEvent("Normal", "DocumentsDeleted", f"{outcome.deleted} documents deleted")


def _documents_left(kind: Literal["Normal", "Warning"], why: str) -> ObjectEvent:
    return ObjectEvent(kind, "DocumentsLeft", f"the documents stay: {why}")


def _namespace(body: Object) -> str:
    namespace: str = body["metadata"]["namespace"]
    return namespace
