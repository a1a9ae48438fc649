"""The reconcile pass of a RagCache: read the live objects, write the differences, report.

A pass is level-triggered: it compares everything, so a lost event or a restart has no effect. If
nothing differs, a pass writes nothing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Final

from ragcache_core.errors import InvalidInput, RagCacheError
from ragcache_operator.builders import build_children
from ragcache_operator.builders.capabilities import unsupported_features
from ragcache_operator.builders.metadata import WORKLOADS, component_of
from ragcache_operator.builders.part_tls import key_secret
from ragcache_operator.builders.placement import ClusterPlacement
from ragcache_operator.config import Installation
from ragcache_operator.kube.api import Api, ApiError
from ragcache_operator.kube.resources import CLAIMS, Object
from ragcache_operator.metrics import Metrics
from ragcache_operator.reconcile.actions import is_owned
from ragcache_operator.reconcile.child_writer import ChildWriter
from ragcache_operator.reconcile.children import Children, Owner, owner_key
from ragcache_operator.reconcile.state import ReconcileState, backoff_s
from ragcache_operator.reconcile.status_reporter import StatusReporter
from ragcache_operator.spec.manifest import parse_manifest
from ragcache_operator.spec.ragcache import COMPONENTS, RagCache
from ragcache_operator.spec.rules import find_problems
from ragcache_operator.status.conditions import VALID, ConditionState, ObjectEvent, PostEvent
from ragcache_operator.status.gateway_client import GatewayClient

_STATEFUL: Final = "(retriever|cachestore|engine-[a-z0-9-]+)"
"""Pattern of the workloads that may be StatefulSets: engines are, with colocated shards."""
API_BACKOFF_S: Final = (1.0, 2.0, 5.0, 15.0, 30.0, 60.0)
REJECTED_BACKOFF_S: Final = (2.0, 5.0, 10.0, 20.0, 60.0, 300.0)
"""Waits after writes that the server rejects.

A quota or a policy may change. A server also rejects owners of a new kind for some seconds."""


class CacheReconciler:
    """Reconciles RagCaches with their children."""

    def __init__(
        self,
        api: Api,
        children: Children,
        gateway_client: GatewayClient,
        metrics: Metrics,
        installation: Installation,
    ) -> None:
        self._children = children
        self._installation = installation
        self._writer = ChildWriter(api, children, metrics)
        self._reporter = StatusReporter(api, children, gateway_client, installation.keys)

    async def reconcile(
        self, body: Object, state: ReconcileState, post_event: PostEvent
    ) -> float | None:
        """Run one pass over a RagCache.

        Returns:
            The seconds until the next pass; None if only a change requires one.
        """
        problems = find_problems(body)
        if problems:
            await self._reporter.refuse(body, "Invalid", "; ".join(map(str, problems)), post_event)
            return None
        cache = parse_manifest(body)
        placement = self._installation.placement(cache, body["metadata"]["uid"])
        try:
            desired = build_children(cache, placement)
        except InvalidInput as error:
            await self._reporter.refuse(body, "NotServed", str(error), post_event)
            return None
        self._report_unsupported(cache, state, post_event)
        errors, key_wait_s = await self._writer.ensure_secrets(body, placement, desired, state)
        found, claims_wait_s = await self._writer.grow_claims(body, desired, state)
        errors += found
        errors += await self._writer.apply(body, desired, state, post_event)
        accepted, retry_s = _acceptance_after(errors, state)
        waits_s = [
            retry_s,
            key_wait_s,
            claims_wait_s,
            _seconds_until_correction(state),
            _seconds_until_renewal(placement),
            await self._reporter.report(body, placement, desired, accepted, state, post_event),
        ]
        return min((wait_s for wait_s in waits_s if wait_s is not None), default=None)

    async def remove(self, body: Object, post_event: PostEvent) -> bool:
        """Delete what a deleted RagCache leaves behind. Return whether everything is gone.

        All deletions start at once: Kubernetes keeps a claim until no pod uses it.
        """
        owner, uid = owner_key(body), body["metadata"]["uid"]
        owned = [obj for obj in self._children.list_for(owner) if is_owned(obj, uid)]
        # Workloads first, because they would recreate their pods and claims.
        for obj in sorted(owned, key=lambda obj: obj["kind"] not in WORKLOADS):
            await self._writer.delete(obj)
        pods = self._children.list_for(owner, "Pod")
        if not owned:
            await self._delete_released_pods(owner, pods)
        # Sync pods belong to RagCollections. They end without a gateway.
        if owned or any(component_of(pod) in COMPONENTS for pod in pods):
            if _deletes_data(body):
                await self._delete_claims(owner)
            return False
        claims = self._claims(owner)
        if claims and _deletes_data(body):
            await self._delete_claims(owner)
            return False
        if claims:
            names = ", ".join(sorted(claim["metadata"]["name"] for claim in claims))
            message = f"dataPolicy Retain keeps {names}"
            post_event(ObjectEvent("Normal", "DataRetained", message))
        return True

    async def _delete_released_pods(self, owner: Owner, pods: Sequence[Object]) -> None:
        """Delete pods that a StatefulSet released when it was replaced. Nothing else would."""
        pattern = re.compile(rf"{re.escape(owner[1])}-{_STATEFUL}-\d+")
        for pod in pods:
            meta = pod["metadata"]
            if pattern.fullmatch(meta["name"]) and not meta.get("ownerReferences"):
                await self._writer.delete(pod)

    def _claims(self, owner: Owner) -> list[Object]:
        """Return the workloads' volume claims. Users may own other claims with our labels."""
        pattern = re.compile(rf"data-{re.escape(owner[1])}-{_STATEFUL}-\d+")
        claims = self._children.list_for(owner, CLAIMS.kind)
        return [claim for claim in claims if pattern.fullmatch(claim["metadata"]["name"])]

    async def _delete_claims(self, owner: Owner) -> None:
        for claim in self._claims(owner):
            await self._writer.delete(claim)

    def _report_unsupported(
        self, cache: RagCache, state: ReconcileState, post_event: PostEvent
    ) -> None:
        """Post an Event for each unsupported feature that has not been reported yet."""
        features = unsupported_features(cache, self._installation.capabilities)
        for feature in features:
            if feature.message not in state.reported:
                post_event(ObjectEvent("Warning", feature.reason, feature.message))
        state.reported = frozenset(feature.message for feature in features)


def _acceptance_after(
    errors: Sequence[RagCacheError], state: ReconcileState
) -> tuple[ConditionState, float | None]:
    """Return the condition that follows from errors of the writes, and when to retry."""
    if not errors:
        state.api_failures = state.rejections = 0
        return VALID, None
    permanent = [e for e in errors if not isinstance(e, ApiError) or e.is_permanent]
    if permanent:
        reason = "ApplyFailed" if isinstance(permanent[0], ApiError) else "ObjectTaken"
        retry_s = backoff_s(REJECTED_BACKOFF_S, state.rejections)
        state.rejections += 1
        return ConditionState("False", reason, str(permanent[0])), retry_s
    # The API server is overloaded or unreachable, so the errors say nothing about the object.
    retry_s = backoff_s(API_BACKOFF_S, state.api_failures)
    state.api_failures += 1
    if state.api_failures <= len(API_BACKOFF_S):
        return VALID, retry_s
    return ConditionState("Unknown", "ApplyRetried", str(errors[0])), retry_s


def _seconds_until_correction(state: ReconcileState) -> float | None:
    """Return the seconds until the back-off of a correction ends, or None without a back-off."""
    now_s = time.monotonic()
    waits_s = (correction.not_before_s - now_s for correction in state.corrections.values())
    return min((wait_s for wait_s in waits_s if wait_s > 0), default=None)


def _seconds_until_renewal(placement: ClusterPlacement) -> float | None:
    """Return the seconds until the parts get another certificate, or None if they have none."""
    certificate = placement.certificate
    if certificate is None or key_secret(placement.cache, placement) is None:
        return None
    return max(0.0, certificate.renew_s - time.time())


def _deletes_data(body: Object) -> bool:
    """Whether the raw spec says Delete. A deletion must work even if the spec is invalid."""
    return bool((body.get("spec") or {}).get("dataPolicy") == "Delete")
