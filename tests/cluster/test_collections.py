"""RagCollections on a real API server and Job controller; pods end as a kubelet would end them."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from harness.cluster.control_plane import ControlPlane
from ragcache_operator.builders.capabilities import Capabilities
from ragcache_operator.builders.keys import ComponentKeys
from ragcache_operator.collections.job import parse_time
from ragcache_operator.collections.reconciler import (
    JOB_POLL_S,
    REMOVAL_TIMEOUT_S,
    CollectionReconciler,
)
from ragcache_operator.collections.schedule import CONFIG_MAP_POLL_S, FAILED_RETRY_S
from ragcache_operator.config import Installation, OperatorConfig
from ragcache_operator.kube.api import Api
from ragcache_operator.kube.resources import (
    CONFIG_MAPS,
    CRDS,
    JOBS,
    PODS,
    RAG_CACHES,
    RAG_COLLECTIONS,
    SERVICE_ACCOUNTS,
    Object,
    Resource,
)
from ragcache_operator.spec.crd import KINDS, definition
from ragcache_operator.status.conditions import ObjectEvent, find
from tests.kit.wait import until

DEFINITIONS = [definition(kind) for kind in KINDS]
QUOTAS = Resource("", "v1", "resourcequotas", "ResourceQuota", namespaced=True)
CONFIG = OperatorConfig("ragcache-system", "test", images="example.com/ragcache", tag="1")
_numbers = count()


@dataclass
class Team:
    """A namespace with a RagCache, and an operator that looks after one collection in it."""

    api: Api
    namespace: str
    ahead_s: float = 0.0
    events: list[ObjectEvent] = field(default_factory=list)

    @property
    def reconciler(self) -> CollectionReconciler:
        return CollectionReconciler(
            self.api,
            Installation(CONFIG, Capabilities.latest(), ComponentKeys(bytes(32))),
            clock=lambda: self.now,
        )

    @property
    def now(self) -> float:
        return time.time() + self.ahead_s

    async def make_cache(self, *, ready: bool = True) -> None:
        meta = {"name": "cache", "namespace": self.namespace}
        kind = {"apiVersion": RAG_CACHES.api_version, "kind": RAG_CACHES.kind}
        await self.api.create(RAG_CACHES, {**kind, "metadata": meta, "spec": {}})
        await self.set_ready(ready)

    async def set_ready(self, ready: bool) -> None:
        conditions = [
            {
                "type": name,
                "status": "True" if ready else "False",
                "reason": "Test",
                "message": "it starts",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
            for name in ("RetrieverReady", "GatewayReady")
        ]
        patch = {"status": {"conditions": conditions}}
        await self.api.merge(RAG_CACHES, "cache", self.namespace, patch, "status")

    async def make_collection(self, **spec: Any) -> None:
        sources = [{"configMap": {"name": "faq"}}]
        await self.api.create(
            RAG_COLLECTIONS,
            {
                "apiVersion": RAG_COLLECTIONS.api_version,
                "kind": RAG_COLLECTIONS.kind,
                "metadata": {"name": "faq", "namespace": self.namespace},
                "spec": {"cacheRef": {"name": "cache"}, "sources": sources, **spec},
            },
        )

    async def write(self, **data: str) -> None:
        await self.api.apply(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "faq", "namespace": self.namespace},
                "data": data,
            }
        )

    async def forbid_jobs(self) -> None:
        """Give the namespace a quota of no Jobs, and wait until the server knows its use."""
        await self.api.create(
            QUOTAS,
            {
                "apiVersion": "v1",
                "kind": QUOTAS.kind,
                "metadata": {"name": "no-jobs", "namespace": self.namespace},
                "spec": {"hard": {"count/jobs.batch": "0"}},
            },
        )

        async def counted() -> Object | None:
            quota = await self.api.get(QUOTAS, "no-jobs", self.namespace)
            assert quota is not None
            return quota if (quota.get("status") or {}).get("used") else None

        await eventually(counted)

    async def body(self) -> Object:
        found = await self.api.get(RAG_COLLECTIONS, "faq", self.namespace)
        assert found is not None
        return found

    async def reconcile(self) -> float | None:
        """One pass; never more than one Job runs after it."""
        again_s = await self.reconciler.reconcile(await self.body(), None, self.events.append)
        assert sum(not _ended(job) for job in await self.jobs()) <= 1
        return again_s

    async def status(self) -> dict[str, Any]:
        status: dict[str, Any] = (await self.body()).get("status") or {}
        return status

    async def condition(self, name: str) -> tuple[str, str]:
        condition = find((await self.status())["conditions"], name)
        assert condition is not None
        return condition["status"], condition["reason"]

    async def jobs(self) -> tuple[Object, ...]:
        return (await self.api.list(JOBS, self.namespace)).items

    async def job(self) -> Object:
        [job] = await self.jobs()
        return job

    async def pod(self) -> Object:
        """The pod that the Job controller makes."""

        async def found() -> Object | None:
            pods = (await self.api.list(PODS, self.namespace)).items
            live = [pod for pod in pods if not (pod.get("status") or {}).get("containerStatuses")]
            return live[0] if live else None

        return await eventually(found)

    async def end(self, status: int, message: str) -> None:
        """The pod's container ends, and the Job controller sees it."""
        pod = await self.pod()
        state = {
            "terminated": {
                "exitCode": status,
                "message": message,
                "reason": "Error" if status else "Completed",
            }
        }
        container = {
            **{"name": "sync", "image": "x", "imageID": "x", "ready": False, "restartCount": 0},
            "state": state,
        }
        patch = {
            "status": {
                "phase": "Failed" if status else "Succeeded",
                "containerStatuses": [container],
            }
        }
        await self.api.merge(PODS, pod["metadata"]["name"], self.namespace, patch, "status")
        name = pod["metadata"]["labels"]["job-name"]

        async def ended() -> Object | None:
            job = await self.api.get(JOBS, name, self.namespace)
            return job if job is not None and _ended(job) else None

        await eventually(ended)

    async def end_well(self, **numbers: int) -> None:
        await self.end(0, result(finished=True, **numbers))


def result(failures: int = 0, *, finished: bool = True, **numbers: int) -> str:
    shown = [{"source": "configMap faq", "document": "b.md", "problem": "is empty"}]
    counts = {"written": 0, "unchanged": 0, "deleted": 0, "skipped": 0}
    whole = {"documents": 2, "chunks": 4, **counts, **numbers}
    return json.dumps(
        {
            **whole,
            "finished": finished,
            "revision": "1234",
            "failures": shown[:failures],
            "failureCount": failures,
            "warnings": [],
            "warningCount": 0,
        }
    )


def _ended(job: Object) -> set[str]:
    conditions = (job.get("status") or {}).get("conditions") or ()
    return {c["type"] for c in conditions if c["status"] == "True"}


async def eventually(find: Callable[[], Awaitable[Object | None]]) -> Object:
    """Return the first result of ``find`` that is not None."""
    found = await until(find)
    assert found is not None
    return found


@pytest.fixture
async def api(control_plane: ControlPlane) -> AsyncIterator[Api]:
    async with await Api.connect(control_plane.kubeconfig) as api:
        for definition in DEFINITIONS:
            await api.apply(definition)
        for resource in (RAG_CACHES, RAG_COLLECTIONS):
            await eventually(lambda resource=resource: _served(api, resource))  # type: ignore[misc]
        yield api


async def _served(api: Api, resource: Resource) -> Object | None:
    found = await api.get(CRDS, f"{resource.plural}.{resource.group}")
    conditions = ((found or {}).get("status") or {}).get("conditions") or ()
    established = find(conditions, "Established")
    return found if established is not None and established["status"] == "True" else None


@pytest.fixture
async def team(api: Api) -> Team:
    """A namespace of the test's own."""
    name = f"team-{next(_numbers)}"
    await api.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    async def account() -> Object | None:
        # Without it, no pod is let in.
        return await api.get(SERVICE_ACCOUNTS, "default", name)

    await eventually(account)
    return Team(api, name)


async def test_a_collection_comes_to_be_synced(team: Team) -> None:
    await team.make_collection()
    await team.reconcile()
    assert await team.condition("Ready") == ("False", "CacheNotFound")
    assert await team.jobs() == ()

    await team.make_cache(ready=False)
    await team.reconcile()
    assert await team.condition("Ready") == ("False", "CacheNotReady")

    await team.set_ready(True)
    await team.reconcile()
    assert await team.condition("Synced") == ("False", "SourceNotFound")

    await team.write(a="A")
    assert await team.reconcile() == JOB_POLL_S
    assert await team.condition("Synced") == ("False", "Syncing")
    assert (await team.status())["phase"] == "Syncing"

    await team.reconcile()
    assert len(await team.jobs()) == 1
    await team.end_well(written=2)
    assert await team.reconcile() == CONFIG_MAP_POLL_S
    status = await team.status()
    assert await team.condition("Ready") == ("True", "Synced")
    assert (status["phase"], status["documents"], status["chunks"]) == ("Ready", 2, 4)
    assert "progress" not in status
    assert parse_time(status["lastSyncTime"]) <= team.now
    assert [event.reason for event in team.events] == [
        *("CacheNotFound", "CacheNotReady", "SourceNotFound", "Syncing"),
        *("DocumentsChanged", "Synced"),
    ]


async def synced(team: Team, **spec: Any) -> None:
    """A collection after its first sync."""
    await team.make_cache()
    await team.write(a="A")
    await team.make_collection(**spec)
    await team.reconcile()
    await team.end_well(written=2)
    await team.reconcile()
    assert await team.condition("Synced") == ("True", "Synced")
    team.events.clear()


async def test_at_rest_nothing_is_written(team: Team) -> None:
    await synced(team)
    before = await team.body()
    for _ in range(3):
        await team.reconcile()
    assert await team.body() == before
    assert team.events == []


async def test_a_restarted_operator_writes_nothing(team: Team) -> None:
    await synced(team)
    before = await team.body()
    await team.api.delete(PODS, (await _any_pod(team))["metadata"]["name"], team.namespace)
    await team.reconcile()
    assert await team.body() == before


async def _any_pod(team: Team) -> Object:
    return (await team.api.list(PODS, team.namespace)).items[0]


async def test_a_changed_config_map_is_synced_and_a_label_on_it_is_not(team: Team) -> None:
    await synced(team)
    patch = {"metadata": {"labels": {"team": "x"}}}
    await team.api.merge(CONFIG_MAPS, "faq", team.namespace, patch)
    assert await team.reconcile() == CONFIG_MAP_POLL_S
    await team.write(a="A changed")
    assert await team.reconcile() == JOB_POLL_S
    assert await team.condition("Synced") == ("False", "Syncing")
    # What the sync before brought still answers.
    assert await team.condition("Ready") == ("True", "Synced")
    await team.end_well(written=1)
    await team.reconcile()
    assert await team.condition("Synced") == ("True", "Synced")
    # One Job is kept, to be asked and to read its log.
    assert len(await team.jobs()) == 1


async def test_other_sources_are_checked_again_after_the_interval(team: Team) -> None:
    source = {"http": {"url": "http://example.com/a.md"}}
    await synced(team, sources=[source], sync={"interval": "10m"})
    again_s = await team.reconcile()
    assert again_s is not None
    assert 500 < again_s <= 600
    team.ahead_s = 601
    assert await team.reconcile() == JOB_POLL_S
    # A look that may find nothing new says nothing.
    assert await team.condition("Synced") == ("True", "Synced")
    await team.end_well()
    await team.reconcile()
    assert team.events == []


async def test_failures_are_told_and_tried_again_at_the_interval(team: Team) -> None:
    await synced(team)
    await team.write(a="A", b="")
    await team.reconcile()
    await team.end(1, result(failures=1))
    again_s = await team.reconcile()
    assert again_s == CONFIG_MAP_POLL_S
    assert await team.condition("Synced") == ("False", "PartlySynced")
    assert await team.condition("Ready") == ("True", "PartlySynced")
    status = await team.status()
    assert status["failures"] == ["configMap faq: b.md: is empty"]
    assert status["phase"] == "Degraded"
    assert [(event.kind, event.reason) for event in team.events][-1] == ("Warning", "PartlySynced")
    assert len(await team.jobs()) == 1
    team.ahead_s = 301
    assert await team.reconcile() == JOB_POLL_S


async def test_a_sync_that_dies_is_tried_again_after_a_while(team: Team) -> None:
    await synced(team)
    await team.write(a="B")
    await team.reconcile()
    await team.end(137, "the last line of its log")
    again_s = await team.reconcile()
    assert again_s is not None
    assert JOB_POLL_S < again_s <= FAILED_RETRY_S
    synced_condition = find((await team.status())["conditions"], "Synced")
    assert synced_condition is not None
    assert synced_condition["reason"] == "SyncFailed"
    assert "the last line of its log" in synced_condition["message"]
    assert await team.condition("Ready") == ("True", "Synced")
    team.ahead_s = FAILED_RETRY_S + 1
    assert await team.reconcile() == JOB_POLL_S
    await team.end_well()
    await team.reconcile()
    assert await team.condition("Synced") == ("True", "Synced")


async def test_a_changed_spec_stops_a_sync_before_the_next_starts(team: Team) -> None:
    await team.make_cache()
    await team.write(a="A")
    await team.make_collection()
    await team.reconcile()
    first = await team.job()
    patch = {"spec": {"sources": [{"http": {"url": "http://example.com/a.md"}}]}}
    await team.api.merge(RAG_COLLECTIONS, "faq", team.namespace, patch)
    await team.reconcile()

    async def replaced() -> Object | None:
        await team.reconcile()
        jobs = await team.jobs()
        assert len(jobs) <= 1
        other = jobs and jobs[0]["metadata"]["name"] != first["metadata"]["name"]
        return jobs[0] if other else None

    await eventually(replaced)
    assert (await team.status())["observedGeneration"] == 2


async def test_what_a_pod_waits_for_is_said(team: Team) -> None:
    await team.make_cache()
    await team.write(a="A")
    await team.make_collection()
    await team.reconcile()
    pod = await team.pod()
    state = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    container = {
        **{"name": "sync", "image": "x", "imageID": "", "ready": False, "restartCount": 0},
        "state": state,
    }
    patch = {"status": {"phase": "Pending", "containerStatuses": [container]}}
    await team.api.merge(PODS, pod["metadata"]["name"], team.namespace, patch, "status")
    await team.reconcile()
    assert (await team.status())["progress"] == "ImagePullBackOff: no such image"


async def test_a_cache_that_goes_takes_readiness_along_and_a_new_one_is_filled(
    team: Team,
) -> None:
    await synced(team)
    await team.api.delete(RAG_CACHES, "cache", team.namespace)
    await team.reconcile()
    assert await team.condition("Ready") == ("False", "CacheNotFound")
    await team.make_cache()
    await team.reconcile()
    assert await team.condition("Ready") == ("False", "Syncing")
    await team.end_well()
    await team.reconcile()
    assert await team.condition("Ready") == ("True", "Synced")


async def test_a_spec_that_is_refused_is_not_acted_on(team: Team) -> None:
    await team.make_cache()
    await team.make_collection(chunking={"size": 16, "overlap": 8})
    assert await team.reconcile() is None
    assert await team.condition("Ready") == ("False", "Invalid")
    assert (await team.status())["phase"] == "Refused"
    assert await team.jobs() == ()


async def delete(team: Team) -> None:
    """Mark the collection as deleted; the finalizer holds it."""
    patch = {"metadata": {"finalizers": ["ragcache.dev/finalizer"]}}
    await team.api.merge(RAG_COLLECTIONS, "faq", team.namespace, patch)
    await team.api.delete(RAG_COLLECTIONS, "faq", team.namespace)


async def remove(team: Team) -> bool:
    return await team.reconciler.remove(await team.body(), team.events.append)


async def test_its_documents_go_with_a_collection(team: Team) -> None:
    await synced(team)
    await delete(team)

    async def started() -> Object | None:
        assert not await remove(team)
        jobs = await team.jobs()
        return next((job for job in jobs if "-remove-" in job["metadata"]["name"]), None)

    job = await eventually(started)
    assert "--remove" in job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "ownerReferences" not in job["metadata"]
    assert not await remove(team)
    await team.end_well(deleted=2)
    assert await remove(team)
    assert team.events == [ObjectEvent("Normal", "DocumentsDeleted", "2 documents deleted")]
    assert await team.jobs() == ()


async def test_a_gateway_that_cannot_be_asked_holds_no_deletion_up_for_ever(team: Team) -> None:
    await synced(team)
    await delete(team)

    async def started() -> Object | None:
        await remove(team)
        return (await team.jobs() or (None,))[0]

    await eventually(started)
    while not any("-remove-" in job["metadata"]["name"] for job in await team.jobs()):
        assert not await remove(team)
    await team.end(1, result(failures=1, finished=False))
    assert await remove(team)
    assert team.events[-1].reason == "DocumentsLeft"
    assert team.events[-1].kind == "Warning"


async def test_a_job_that_never_starts_holds_no_deletion_up_either(team: Team) -> None:
    await synced(team)
    await delete(team)
    while not any("-remove-" in job["metadata"]["name"] for job in await team.jobs()):
        assert not await remove(team)
    assert not await remove(team)
    team.ahead_s = REMOVAL_TIMEOUT_S + 1
    assert await remove(team)
    assert team.events[-1].reason == "DocumentsLeft"


async def test_a_job_that_is_not_allowed_holds_no_deletion_up_either(team: Team) -> None:
    await synced(team)
    await delete(team)
    await team.forbid_jobs()

    await until(lambda: remove(team))
    [event] = team.events
    assert (event.kind, event.reason) == ("Warning", "DocumentsLeft")
    assert "exceeded quota" in event.message


@pytest.mark.parametrize("why", ["no cache", "no prune"])
async def test_where_nothing_is_to_be_deleted_a_deletion_ends_at_once(team: Team, why: str) -> None:
    await synced(team, prune=why != "no prune")
    await delete(team)
    if why == "no cache":
        await team.api.delete(RAG_CACHES, "cache", team.namespace)

    await until(lambda: remove(team))
    assert [event.reason for event in team.events] == ["DocumentsLeft"]
