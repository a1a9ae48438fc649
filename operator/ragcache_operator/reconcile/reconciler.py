"""The shell around the operator's decisions: read what is, act, say what came of it.

Level-triggered: every pass looks at everything, so a lost event or a restart costs nothing, and a
pass that finds all as it should be writes nothing.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ragcache_core.errors import InvalidInput, RagCacheError
from ragcache_operator.builders import build_children
from ragcache_operator.builders.capabilities import Capabilities
from ragcache_operator.builders.labels import WORKLOADS, component_of, component_selectors
from ragcache_operator.builders.objects import signing_key
from ragcache_operator.builders.objects.autoscaling import with_replicas
from ragcache_operator.builders.site import ClusterSite
from ragcache_operator.builders.unsupported import unsupported_features
from ragcache_operator.kube.api import Api, ApiError, Conflict
from ragcache_operator.kube.drift import restoration
from ragcache_operator.kube.resources import CLAIMS, SECRETS, Object, identity, resource_of
from ragcache_operator.kube.status import write_status
from ragcache_operator.metrics import Metrics
from ragcache_operator.reconcile.actions import (
    CorrectDrift,
    CreateChild,
    DeleteChild,
    NameConflict,
    UpdateChild,
    is_owned,
    may_be_missing,
    plan_actions,
)
from ragcache_operator.reconcile.children import Children, Owner
from ragcache_operator.spec import COMPONENTS, RagCache
from ragcache_operator.spec.manifest import parse_manifest
from ragcache_operator.spec.rules import find_problems
from ragcache_operator.status.component import is_ready
from ragcache_operator.status.conditions import (
    VALID,
    Acceptance,
    Condition,
    ObjectEvent,
    SelfTest,
    current_test,
    events_for,
    is_test_due,
    make_conditions,
    refused_conditions,
    self_test_of,
)
from ragcache_operator.status.gateway_client import GatewayClient, StoreUsage
from ragcache_operator.status.observe import component_states, workload_states
from ragcache_operator.status.report import accepted_status, refused_status

log = logging.getLogger(__name__)

PROGRESS_POLL_S = 3.0
"""Between two looks at what a pod says of its start; its words are on no watch."""
CACHE_POLL_S = 60.0
TEST_RETRY_S = (1.0, 2.0, 5.0, 10.0, 20.0)
API_RETRY_S = (1.0, 2.0, 5.0, 15.0, 30.0, 60.0)
REFUSED_RETRY_S = (2.0, 5.0, 10.0, 20.0, 60.0, 300.0)
"""After writes that the server refuses by rule. A quota or a policy may change; and a server that
has just learnt of our kinds refuses owners of them for some seconds."""

SIGNING_KEY_BYTES = 32
SIGNING_KEY_RETRY_S = 60.0
"""Before a Secret is offered again to pods that are not started, for this reason or for another."""

CORRECTION_RETRY_S = (0.0, 0.0, 5.0, 30.0, 120.0, 300.0)
"""Before a correction that did not hold is made again: whoever undoes it means it."""
CORRECTION_FORGOTTEN_S = 600.0

PostEvent = Callable[[ObjectEvent], None]


@dataclass(slots=True)
class DriftCorrection:
    """How often an object was put right, and until when it is left alone."""

    times: int = 0
    not_before_s: float = 0.0


@dataclass(slots=True)
class ReconcileState:
    """What is remembered of one RagCache between passes; losing it costs a look, no more.

    Times are of the monotonic clock.
    """

    test_failures: int = 0
    next_test_s: float = 0.0
    api_failures: int = 0
    refused: int = 0
    cache: StoreUsage | None = None
    next_cache_s: float = 0.0
    next_signing_key_s: float = 0.0
    reported: frozenset[str] = frozenset()
    """Refusals that an Event has told of."""
    corrections: dict[tuple[str, str, str], DriftCorrection] = field(default_factory=dict)


class CacheReconciler:
    """Brings RagCaches and their children together. images, tag: of the parts' images."""

    def __init__(
        self,
        api: Api,
        children: Children,
        capabilities: Capabilities,
        gateway_client: GatewayClient,
        metrics: Metrics,
        *,
        images: str,
        tag: str,
        operator_namespace: str,
    ) -> None:
        self._api = api
        self._children = children
        self._capabilities = capabilities
        self._gateway_client = gateway_client
        self._metrics = metrics
        self._images = images
        self._tag = tag
        self._operator_namespace = operator_namespace

    async def reconcile(
        self, body: Object, state: ReconcileState, post_event: PostEvent
    ) -> float | None:
        """One pass over a RagCache. Returns the seconds after which to look again by oneself.

        None: only when something changes. say: posts an Event.
        """
        problems = find_problems(body)
        if problems:
            await self._refuse(body, "Invalid", "; ".join(map(str, problems)), post_event)
            return None
        cache = parse_manifest(body)
        site = self._site(cache, body)
        try:
            desired = build_children(cache, site)
        except InvalidInput as error:
            await self._refuse(body, "NotServed", str(error), post_event)
            return None
        self._tell_refusals(cache, state, post_event)
        troubles, key_again_s = await self._ensure_signing_key(body, cache, site, desired, state)
        troubles += await self._act(body, desired, state, post_event)
        accepted, again_s = _judged(troubles, state)
        waits_s = [
            again_s,
            key_again_s,
            _until_correction(state),
            await self._report(body, cache, site, desired, accepted, state, post_event),
        ]
        return min((wait_s for wait_s in waits_s if wait_s is not None), default=None)

    async def remove(self, body: Object, post_event: PostEvent) -> bool:
        """Take down what a deleted RagCache leaves behind; False while it is not all gone yet.

        Everything is told to go at once: Kubernetes keeps a claim until no pod uses it.
        """
        owner, uid = _owner(body), body["metadata"]["uid"]
        held = [obj for obj in self._children.of(owner) if is_owned(obj, uid)]
        # Workloads first, or they would make their pods and claims again.
        for obj in sorted(held, key=lambda obj: obj["kind"] not in WORKLOADS):
            await self._delete(obj)
        pods = self._children.of(owner, "Pod")
        # Pods that bring documents belong to their RagCollections, and end without a gateway.
        if held or any(component_of(pod) in COMPONENTS for pod in pods):
            if _deletes_data(body):
                await self._delete_claims(owner)
            return False
        claims = self._claims(owner)
        if claims and _deletes_data(body):
            await self._delete_claims(owner)
            return False
        if claims:
            names = ", ".join(sorted(claim["metadata"]["name"] for claim in claims))
            post_event(ObjectEvent("Normal", "DataRetained", f"dataPolicy Retain keeps {names}"))
        return True

    def _claims(self, owner: Owner) -> list[Object]:
        """Volume claims of the workloads; one that only has our labels is somebody else's."""
        ours = re.compile(rf"data-{re.escape(owner[1])}-(retriever|cachestore)-\d+")
        found = self._children.of(owner, CLAIMS.kind)
        return [claim for claim in found if ours.fullmatch(claim["metadata"]["name"])]

    async def _delete_claims(self, owner: Owner) -> None:
        for claim in self._claims(owner):
            await self._delete(claim)

    def _site(self, cache: RagCache, body: Object) -> ClusterSite:
        return ClusterSite.of(
            cache,
            images=self._images,
            tag=self._tag,
            capabilities=self._capabilities,
            owner=body["metadata"]["uid"],
            operator_namespace=self._operator_namespace,
        )

    def _tell_refusals(self, cache: RagCache, state: ReconcileState, post_event: PostEvent) -> None:
        found = unsupported_features(cache, self._capabilities)
        for refusal in found:
            if refusal.message not in state.reported:
                post_event(ObjectEvent("Warning", refusal.reason, refusal.message))
        state.reported = frozenset(refusal.message for refusal in found)

    async def _ensure_signing_key(
        self,
        body: Object,
        cache: RagCache,
        site: ClusterSite,
        desired: Sequence[Object],
        state: ReconcileState,
    ) -> tuple[list[RagCacheError], float | None]:
        """Make the Secret with the plans' key where it may be missing; never change one.

        Ahead of the workloads, which wait for it. Returns what stood in the way, and the seconds
        after which to look again.
        """
        name, pods = signing_key.secret_name(cache, site), self._children.of(_owner(body), "Pod")
        if not may_be_missing(name, desired, self._children.get, pods):
            return [], None
        wait_s = state.next_signing_key_s - time.monotonic()
        if wait_s > 0:
            return [], wait_s
        made = signing_key.secret(cache, site, secrets.token_bytes(SIGNING_KEY_BYTES))
        try:
            await self._api.create(SECRETS, made)
            self._metrics.applied(SECRETS.kind)
        except Conflict as error:
            if error.reason != "AlreadyExists":
                return [error], None
        except ApiError as error:
            log.warning("%s: %s", "/".join(_owner(body)), error)
            return [error], None
        state.next_signing_key_s = time.monotonic() + SIGNING_KEY_RETRY_S
        return [], None

    async def _act(
        self, body: Object, desired: Sequence[Object], state: ReconcileState, post_event: PostEvent
    ) -> list[RagCacheError]:
        """Write what differs. Returns what stood in the way, after trying everything."""
        uid = body["metadata"]["uid"]
        held = self._children.of(_owner(body))
        troubles: list[RagCacheError] = []
        for action in plan_actions(desired, self._children.get, held, uid):
            try:
                match action:
                    case CreateChild(obj):
                        await self._make(obj, uid)
                    case UpdateChild(obj):
                        await self._apply(obj)
                    case CorrectDrift():
                        await self._correct(action, state, post_event)
                    case DeleteChild(obj):
                        await self._delete(obj)
                    case NameConflict(obj):
                        raise _taken(obj)
            except RagCacheError as error:
                log.warning("%s: %s", "/".join(_owner(body)), error)
                troubles.append(error)
        return troubles

    async def _make(self, obj: Object, uid: str) -> None:
        # Objects without our label are on no watch; one of this name may be somebody else's.
        meta = obj["metadata"]
        found = await self._api.get(resource_of(obj), meta["name"], meta["namespace"])
        if found is not None and not is_owned(found, uid):
            raise _taken(obj)
        await self._apply(obj)

    async def _apply(self, obj: Object) -> None:
        applied = await self._api.apply(with_replicas(obj, self._children.get(obj)))
        self._children.learn(applied)
        self._metrics.applied(obj["kind"])

    async def _correct(
        self, action: CorrectDrift, state: ReconcileState, post_event: PostEvent
    ) -> None:
        """Undo what others changed, ever less often where they change it again."""
        obj, now_s = action.obj, time.monotonic()
        before = state.corrections.setdefault(identity(obj), DriftCorrection())
        if now_s < before.not_before_s:
            return
        if now_s > before.not_before_s + CORRECTION_FORGOTTEN_S:
            before.times = 0
        live = self._children.get(obj)
        if action.added and live is not None:
            meta = obj["metadata"]
            patch = restoration(obj, live)
            resource = resource_of(obj)
            restored = await self._api.merge(resource, meta["name"], meta["namespace"], patch)
            if restored is not None:
                self._children.learn({**restored, "kind": obj["kind"]})
            self._metrics.applied(obj["kind"])
        else:
            await self._apply(obj)
        name = f"{obj['kind']} {obj['metadata']['name']}"
        before.not_before_s = now_s + _step(CORRECTION_RETRY_S, before.times)
        before.times += 1
        if before.times < len(CORRECTION_RETRY_S):
            post_event(
                ObjectEvent("Normal", "DriftCorrected", f"{name}: others changed {action.path}")
            )
        elif before.times == len(CORRECTION_RETRY_S):
            words = f"{name}: others change {action.path} again and again; find out who"
            post_event(ObjectEvent("Warning", "DriftPersists", words))

    async def _delete(self, obj: Object) -> None:
        meta = obj["metadata"]
        if "deletionTimestamp" in meta:
            return
        resource = CLAIMS if obj["kind"] == CLAIMS.kind else self._children.resource(obj)
        if not await self._api.delete(resource, meta["name"], meta["namespace"]):
            self._children.forget(obj)

    async def _refuse(self, body: Object, reason: str, message: str, post_event: PostEvent) -> None:
        """Say that the spec is not acted on; what runs goes on as it was."""
        generation = body["metadata"]["generation"]
        conditions = refused_conditions(reason, message, generation, _conditions(body), _now())
        await self._write(body, refused_status(body, conditions), conditions, post_event)

    async def _report(
        self,
        body: Object,
        cache: RagCache,
        site: ClusterSite,
        desired: Sequence[Object],
        accepted: Acceptance,
        state: ReconcileState,
        post_event: PostEvent,
    ) -> float | None:
        pods = self._children.of(_owner(body), "Pod")
        progress = await self._progress(_owner(body), pods)
        components = component_states(desired, self._children.get, pods, progress)
        generation = body["metadata"]["generation"]
        test = current_test(components, self_test_of(_conditions(body)), generation)
        url = site.gateway_url

        async def say_state(test: SelfTest) -> None:
            conditions = make_conditions(
                components, test, generation, _conditions(body), _now(), accepted
            )
            states = workload_states(desired, self._children.get)
            selector = component_selectors(cache)["gateway"]
            status = accepted_status(
                *(cache, generation, components, states, conditions, test),
                *(state.cache, url, selector),
            )
            await self._write(body, status, conditions, post_event)

        waits_s = [PROGRESS_POLL_S] if progress else []
        if is_test_due(components, test, generation):
            if time.monotonic() >= state.next_test_s:
                if test.passed is None:
                    await say_state(SelfTest(None, "Asking", f"asking {url}", generation))
                test = await self._ask(url, cache, generation, state)
            if not test.passed or test.generation != generation:
                waits_s.append(max(0.0, state.next_test_s - time.monotonic()))
        if test.passed:
            if time.monotonic() >= state.next_cache_s:
                state.next_cache_s = time.monotonic() + CACHE_POLL_S
                state.cache = await self._gateway_client.cache(url) or state.cache
            waits_s.append(CACHE_POLL_S)
        await say_state(test)
        return min(waits_s, default=None)

    async def _ask(
        self, url: str, cache: RagCache, generation: int, state: ReconcileState
    ) -> SelfTest:
        verdict = await self._gateway_client.self_test(url, cache.spec.model.served_name)
        if verdict.passed:
            state.test_failures, state.next_test_s = 0, 0.0
            return SelfTest(True, "Answered", verdict.message, generation)
        state.next_test_s = time.monotonic() + _step(TEST_RETRY_S, state.test_failures)
        state.test_failures += 1
        return SelfTest(False, "SelfTestFailed", verdict.message, generation)

    async def _progress(self, owner: Owner, pods: Sequence[Object]) -> dict[str, str]:
        """What pods that run but are not ready say of their start, by name.

        Only pods of our own StatefulSets, which are the ones with such a port: anybody may label
        a pod as they like.
        """
        sets = {obj["metadata"]["uid"] for obj in self._children.of(owner, "StatefulSet")}
        asked = {
            pod["metadata"]["name"]: address
            for pod in pods
            if not is_ready(pod)
            and any(is_owned(pod, uid) for uid in sets)
            and (address := health_address(pod)) is not None
        }
        said = await asyncio.gather(*map(self._gateway_client.progress, asked.values()))
        return {name: words or "" for name, words in zip(asked, said, strict=True)}

    async def _write(
        self, body: Object, status: Object, conditions: Sequence[Condition], post_event: PostEvent
    ) -> None:
        """Write the status if it says anything new, and tell of its transitions."""
        before = _conditions(body)
        if await write_status(self._api, body, status):
            for event in events_for(before, conditions):
                post_event(event)


def _judged(
    troubles: Sequence[RagCacheError], state: ReconcileState
) -> tuple[Acceptance, float | None]:
    """What troubles with children mean for the spec, and when to try again."""
    if not troubles:
        state.api_failures = state.refused = 0
        return VALID, None
    lasting = [e for e in troubles if not isinstance(e, ApiError) or e.is_permanent]
    if lasting:
        reason = "ApplyFailed" if isinstance(lasting[0], ApiError) else "ObjectTaken"
        state.refused += 1
        again_s = _step(REFUSED_RETRY_S, state.refused - 1)
        return Acceptance("False", reason, str(lasting[0])), again_s
    # The API server is busy or away: nothing about the object is known to be wrong.
    state.api_failures += 1
    again_s = _step(API_RETRY_S, state.api_failures - 1)
    if state.api_failures <= len(API_RETRY_S):
        return VALID, again_s
    return Acceptance("Unknown", "ApplyRetried", str(troubles[0])), again_s


def _until_correction(state: ReconcileState) -> float | None:
    """Seconds until the next object that is left alone for now may be corrected again."""
    now_s = time.monotonic()
    left_s = (correction.not_before_s - now_s for correction in state.corrections.values())
    return min((wait_s for wait_s in left_s if wait_s > 0), default=None)


def _deletes_data(body: Object) -> bool:
    """Read from the raw spec: a deletion must not depend on the rest of it being valid."""
    return bool((body.get("spec") or {}).get("dataPolicy") == "Delete")


def health_address(pod: Object) -> str | None:
    """ "host:port" of the pod's health, if it has started and has such a port."""
    status = pod.get("status") or {}
    containers = status.get("containerStatuses") or ()
    if not status.get("podIP") or not all("running" in (c.get("state") or {}) for c in containers):
        return None
    for container in pod["spec"]["containers"]:
        for port in container.get("ports") or ():
            if port.get("name") == "health":
                host = f"[{status['podIP']}]" if ":" in status["podIP"] else status["podIP"]
                return f"{host}:{port['containerPort']}"
    return None


def _owner(body: Object) -> Owner:
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
