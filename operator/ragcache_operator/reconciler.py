"""The shell around the operator's decisions: read what is, act, say what came of it.

Level-triggered: every pass looks at everything, so a lost event or a restart costs nothing, and a
pass that finds all as it should be writes nothing.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ragcache_core.errors import InvalidInput, RagCacheError
from ragcache_operator.actions import Apply, Remove, Taken, is_owned, plan_actions
from ragcache_operator.builders import build_children
from ragcache_operator.builders.autoscaling import with_replicas
from ragcache_operator.builders.capabilities import Capabilities
from ragcache_operator.builders.labels import component_of, selectors
from ragcache_operator.builders.refusals import refusals
from ragcache_operator.builders.site import ClusterSite
from ragcache_operator.children import Children
from ragcache_operator.gateway import CacheUse, Gateways
from ragcache_operator.kube.api import Api, ApiError
from ragcache_operator.kube.resources import CLAIMS, RAG_CACHES, Object, resource_of
from ragcache_operator.manifest import parse_manifest
from ragcache_operator.metrics import Metrics
from ragcache_operator.rules import violations
from ragcache_operator.spec import COMPONENTS, RagCache
from ragcache_operator.status.component import ComponentState, is_ready
from ragcache_operator.status.conditions import (
    Condition,
    SelfTest,
    Transition,
    holding_test,
    is_test_due,
    make_conditions,
    refused_conditions,
    self_test_of,
    transitions,
)
from ragcache_operator.status.observe import component_states, workload_states
from ragcache_operator.status.report import accepted_status, refused_status

log = logging.getLogger(__name__)

PROGRESS_POLL_S = 3.0
"""Between two looks at what a pod says of its start; its words are on no watch."""
CACHE_POLL_S = 60.0
TEST_RETRY_S = (1.0, 2.0, 5.0, 10.0, 20.0)
API_RETRY_S = (1.0, 2.0, 5.0, 15.0, 30.0, 60.0)
PERMANENT_RETRY_S = 300.0
"""A write that was refused for good is tried again this seldom: a quota or a policy may change."""

Say = Callable[[Transition], None]


@dataclass(slots=True)
class Memory:
    """What is remembered of one RagCache between passes; losing it costs a look, no more."""

    test_failures: int = 0
    api_failures: int = 0
    cache: CacheUse | None = None
    cache_seen_s: float = -CACHE_POLL_S
    told: frozenset[str] = frozenset()
    """Refusals that an Event has told of."""


class CacheReconciler:
    """Brings RagCaches and their children together. images, tag: of the parts' images."""

    def __init__(
        self,
        api: Api,
        children: Children,
        capabilities: Capabilities,
        gateways: Gateways,
        metrics: Metrics,
        *,
        images: str,
        tag: str,
        operator_namespace: str,
    ) -> None:
        self._api = api
        self._children = children
        self._capabilities = capabilities
        self._gateways = gateways
        self._metrics = metrics
        self._images = images
        self._tag = tag
        self._operator_namespace = operator_namespace

    async def reconcile(self, body: Object, memory: Memory, say: Say) -> float | None:
        """One pass over a RagCache. Returns the seconds after which to look again by oneself.

        None: only when something changes. say: posts an Event.
        """
        with self._metrics.reconciling():
            problems = violations(body)
            if problems:
                message = "; ".join(map(str, problems))
                await self._write(body, *self._refused(body, "Invalid", message), say)
                return None
            cache = parse_manifest(body)
            site = self._site(cache, body)
            try:
                desired = build_children(cache, site)
            except InvalidInput as error:
                await self._write(body, *self._refused(body, "NotServed", str(error)), say)
                return None
            self._tell_refusals(cache, memory, say)
            trouble = await self._act(body, desired, say)
            if trouble is not None:
                return await self._report_trouble(body, trouble, memory, say)
            memory.api_failures = 0
            return await self._report(body, cache, site, desired, memory, say)

    async def remove(self, body: Object, say: Say) -> bool:
        """Take down what a deleted RagCache leaves behind; False while it is not all gone yet.

        Workloads go first, so that they drain while their Services and claims are still there.
        """
        owner = _owner(body)
        uid = body["metadata"]["uid"]
        held = [obj for obj in self._children.of(owner) if is_owned(obj, uid)]
        workloads = [obj for obj in held if obj["kind"] in ("Deployment", "StatefulSet")]
        for obj in workloads:
            await self._delete(obj)
        pods = self._children.of(owner, "Pod")
        # Pods that bring documents belong to their RagCollections, and end without a gateway.
        if workloads or any(component_of(pod) in COMPONENTS for pod in pods):
            return False
        for obj in held:
            await self._delete(obj)
        claims = self._children.of(owner, "PersistentVolumeClaim")
        if (body.get("spec") or {}).get("dataPolicy") == "Delete":
            for claim in claims:
                await self._delete(claim)
            if claims:
                return False
        elif claims:
            names = ", ".join(sorted(claim["metadata"]["name"] for claim in claims))
            say(Transition("Normal", "DataRetained", f"dataPolicy Retain keeps {names}"))
        return not held

    def _site(self, cache: RagCache, body: Object) -> ClusterSite:
        return ClusterSite.of(
            cache,
            images=self._images,
            tag=self._tag,
            capabilities=self._capabilities,
            owner=body["metadata"]["uid"],
            operator_namespace=self._operator_namespace,
        )

    def _tell_refusals(self, cache: RagCache, memory: Memory, say: Say) -> None:
        found = refusals(cache, self._capabilities)
        for refusal in found:
            if refusal.message not in memory.told:
                say(Transition("Warning", refusal.reason, refusal.message))
        memory.told = frozenset(refusal.message for refusal in found)

    async def _act(self, body: Object, desired: Sequence[Object], say: Say) -> RagCacheError | None:
        """Write what differs. Returns what stood in the way, after trying everything."""
        uid = body["metadata"]["uid"]
        held = self._children.of(_owner(body))
        actions = plan_actions(desired, self._children.get, held, uid)
        trouble: RagCacheError | None = None
        for action in actions:
            try:
                match action:
                    case Apply(obj, because):
                        await self._apply(obj, because, uid, say)
                    case Remove(obj):
                        await self._delete(obj)
                    case Taken(obj):
                        raise _taken(obj)
            except RagCacheError as error:
                log.warning("%s: %s", "/".join(_owner(body)), error)
                trouble = trouble or error
        return trouble

    async def _apply(self, obj: Object, because: str, uid: str, say: Say) -> None:
        if not because:
            # Objects without our label are on no watch; one of this name may be somebody else's.
            meta = obj["metadata"]
            found = await self._api.get(resource_of(obj), meta["name"], meta["namespace"])
            if found is not None and not is_owned(found, uid):
                raise _taken(obj)
        applied = await self._api.apply(with_replicas(obj, self._children.get(obj)))
        self._children.learn(applied)
        self._metrics.applied(obj["kind"])
        if because and not because.startswith("metadata.annotations."):
            name = f"{obj['kind']} {obj['metadata']['name']}"
            say(Transition("Normal", "DriftCorrected", f"{name}: {because} was changed by others"))

    async def _delete(self, obj: Object) -> None:
        meta = obj["metadata"]
        if "deletionTimestamp" in meta:
            return
        resource = CLAIMS if obj["kind"] == CLAIMS.kind else self._children.resource(obj)
        if not await self._api.delete(resource, meta["name"], meta["namespace"]):
            self._children.forget(obj)

    def _refused(self, body: Object, reason: str, message: str) -> tuple[Object, list[Condition]]:
        conditions = refused_conditions(
            reason, message, body["metadata"]["generation"], _conditions(body), _now()
        )
        return refused_status(body, conditions), conditions

    async def _report_trouble(
        self, body: Object, trouble: RagCacheError, memory: Memory, say: Say
    ) -> float:
        if isinstance(trouble, ApiError) and not trouble.is_permanent:
            # The API server is busy or away: nothing about the object is known to be wrong.
            delay_s = _step(API_RETRY_S, memory.api_failures)
            memory.api_failures += 1
            return delay_s
        reason = "ApplyFailed" if isinstance(trouble, ApiError) else "ObjectTaken"
        await self._write(body, *self._refused(body, reason, str(trouble)), say)
        return PERMANENT_RETRY_S

    async def _report(
        self,
        body: Object,
        cache: RagCache,
        site: ClusterSite,
        desired: Sequence[Object],
        memory: Memory,
        say: Say,
    ) -> float | None:
        pods = self._children.of(_owner(body), "Pod")
        progress = await self._progress(pods)
        components = component_states(desired, self._children.get, pods, progress)
        generation = body["metadata"]["generation"]
        before = _conditions(body)
        url = site.gateway_url
        test = holding_test(components, self_test_of(before))
        wait_s: list[float] = [PROGRESS_POLL_S] if progress else []
        if is_test_due(components, test, generation):
            if not any(c["type"] == "Ready" and c["status"] == "True" for c in before):
                waiting = SelfTest(None, "Asking", f"asking {url} a question", generation)
                await self._say_state(body, cache, desired, components, waiting, memory, url, say)
            verdict = await self._gateways.self_test(url, cache.spec.model.served_name)
            reason = "Answered" if verdict.passed else "SelfTestFailed"
            test = SelfTest(verdict.passed, reason, verdict.message, generation)
            if verdict.passed:
                memory.test_failures = 0
            else:
                wait_s.append(_step(TEST_RETRY_S, memory.test_failures))
                memory.test_failures += 1
        if test.passed:
            wait_s.append(CACHE_POLL_S)
            if time.monotonic() - memory.cache_seen_s >= CACHE_POLL_S:
                memory.cache_seen_s = time.monotonic()
                memory.cache = await self._gateways.cache(url) or memory.cache
        await self._say_state(body, cache, desired, components, test, memory, url, say)
        return min(wait_s, default=None)

    async def _say_state(
        self,
        body: Object,
        cache: RagCache,
        desired: Sequence[Object],
        components: Sequence[ComponentState],
        test: SelfTest,
        memory: Memory,
        url: str,
        say: Say,
    ) -> None:
        generation = body["metadata"]["generation"]
        conditions = make_conditions(components, test, generation, _conditions(body), _now())
        status = accepted_status(
            cache,
            generation,
            components,
            workload_states(desired, self._children.get),
            conditions,
            test,
            memory.cache,
            url,
            selectors(cache)["gateway"],
        )
        await self._write(body, status, conditions, say)

    async def _progress(self, pods: Sequence[Object]) -> dict[str, str]:
        """What pods that run but are not ready say of their start, by name."""
        asked = {
            pod["metadata"]["name"]: address
            for pod in pods
            if not is_ready(pod) and (address := health_address(pod)) is not None
        }
        said = await asyncio.gather(*map(self._gateways.progress, asked.values()))
        return {name: words or "" for name, words in zip(asked, said, strict=True)}

    async def _write(
        self, body: Object, status: Object, conditions: Sequence[Condition], say: Say
    ) -> None:
        """Write the status if it says anything new, and tell of its transitions."""
        live = body.get("status") or {}
        if status == live:
            return
        # A merge patch keeps what it does not name.
        patch = {"status": {**dict.fromkeys(live.keys() - status.keys()), **status}}
        meta = body["metadata"]
        written = await self._api.merge(
            RAG_CACHES, meta["name"], meta["namespace"], patch, "status"
        )
        for transition in transitions(live.get("conditions") or (), conditions):
            say(transition)
        if written is not None:
            # What is compared with next is what has just been said, not what a watch says later.
            body.update(written)


def health_address(pod: Object) -> str | None:
    """ "host:port" of the pod's health, if it has started and has such a port."""
    status = pod.get("status") or {}
    containers = status.get("containerStatuses") or ()
    if not status.get("podIP") or not all("running" in (c.get("state") or {}) for c in containers):
        return None
    for container in pod["spec"]["containers"]:
        for port in container.get("ports") or ():
            if port.get("name") == "health":
                return f"{status['podIP']}:{port['containerPort']}"
    return None


def _owner(body: Object) -> tuple[str, str]:
    return body["metadata"]["namespace"], body["metadata"]["name"]


def _conditions(body: Object) -> Sequence[Condition]:
    return (body.get("status") or {}).get("conditions") or ()


def _taken(obj: Object) -> InvalidInput:
    name = f"{obj['kind']} {obj['metadata']['namespace']}/{obj['metadata']['name']}"
    return InvalidInput(
        "metadata.name",
        f"{name} exists and does not belong to this RagCache",
        "delete that object, or give the RagCache another name",
    )


def _now() -> str:
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    return now.isoformat().replace("+00:00", "Z")


def _step(steps: Sequence[float], failures: int) -> float:
    return steps[min(failures, len(steps) - 1)]
