"""Writes the children of a RagCache: creates, updates, corrects and deletes them."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from ragcache_core.errors import InvalidInput, RagCacheError
from ragcache_operator.builders.autoscaling import with_replicas
from ragcache_operator.builders.keys import (
    api_key_secret,
    api_key_secret_name,
    disk_key_secret,
    disk_key_secret_name,
    signing_secret,
    signing_secret_name,
    store_key_secret,
    store_key_secret_name,
)
from ragcache_operator.builders.part_tls import key_secret
from ragcache_operator.builders.placement import ClusterPlacement
from ragcache_operator.kube.api import Api, ApiError, Conflict
from ragcache_operator.kube.drift import removal_patch
from ragcache_operator.kube.resources import CLAIMS, PODS, SECRETS, Object, identity, resource_of
from ragcache_operator.metrics import Metrics
from ragcache_operator.reconcile.actions import (
    CorrectDrift,
    CreateChild,
    DeleteChild,
    NameConflict,
    ReplaceChild,
    UpdateChild,
    is_owned,
    may_be_missing,
    plan_actions,
)
from ragcache_operator.reconcile.children import Children, owner_key
from ragcache_operator.reconcile.state import (
    ClaimRefusal,
    DriftCorrection,
    ReconcileState,
    backoff_s,
)
from ragcache_operator.reconcile.volumes import ClaimGrowth, claim_growths
from ragcache_operator.status.conditions import ObjectEvent, PostEvent

log = logging.getLogger(__name__)

KEY_BYTES: Final = 32
SECRET_RETRY_S: Final = 60.0
"""Wait before the operator creates the Secret again for pods that do not start.

The pods may wait for another reason, such as an image."""

CLAIM_RETRY_S: Final = 300.0
"""Wait before the operator tries again to grow a claim that the API server refused to grow."""

CORRECTION_BACKOFF_S: Final = (0.0, 0.0, 5.0, 30.0, 120.0, 300.0)
"""Waits between corrections of one object, which another client changes repeatedly."""
CORRECTION_RESET_S: Final = 600.0
"""After this time without a correction, the back-off starts again."""


class ChildWriter:
    """Writes children and the keys of RagCaches."""

    def __init__(self, api: Api, children: Children, metrics: Metrics) -> None:
        self._api = api
        self._children = children
        self._metrics = metrics

    async def ensure_secrets(
        self,
        body: Object,
        placement: ClusterPlacement,
        desired: Sequence[Object],
        state: ReconcileState,
    ) -> tuple[list[RagCacheError], float | None]:
        """Create the Secrets with keys that may be missing. Never change one.

        This comes before the workloads, whose pods wait for the Secrets.

        Returns:
            The errors, and the seconds until the next try; None if no retry is needed.
        """
        cache = placement.cache
        new: dict[str, Callable[[bytes], Object]] = {
            signing_secret_name(cache, placement): partial(signing_secret, cache, placement),
            store_key_secret_name(cache, placement): partial(store_key_secret, cache, placement),
        }
        if (name := api_key_secret_name(cache, placement)) is not None:
            new[name] = partial(api_key_secret, cache, placement, name)
        if (name := disk_key_secret_name(cache, placement)) is not None:
            new[name] = partial(disk_key_secret, cache, placement, name)
        if (key := key_secret(cache, placement)) is not None:
            new[key["metadata"]["name"]] = lambda _: key
        errors: list[RagCacheError] = []
        waits_s: list[float] = []
        for name, make in new.items():
            found, wait_s = await self._ensure_secret(body, name, make, desired, state)
            errors += found
            waits_s += [] if wait_s is None else [wait_s]
        return errors, min(waits_s, default=None)

    async def _ensure_secret(
        self,
        body: Object,
        name: str,
        make: Callable[[bytes], Object],
        desired: Sequence[Object],
        state: ReconcileState,
    ) -> tuple[list[RagCacheError], float | None]:
        pods = self._children.list_for(owner_key(body), "Pod")
        if not may_be_missing(name, desired, self._children.get, pods):
            return [], None
        wait_s = state.next_secret_s.get(name, 0.0) - time.monotonic()
        if wait_s > 0:
            return [], wait_s
        secret = make(secrets.token_bytes(KEY_BYTES))
        try:
            await self._api.create(SECRETS, secret)
            self._metrics.count_apply(SECRETS.kind)
        except Conflict as error:
            if error.reason != "AlreadyExists":
                return [error], None
        except ApiError as error:
            self._log_failure(body, error)
            return [error], None
        state.next_secret_s[name] = time.monotonic() + SECRET_RETRY_S
        return [], None

    async def apply(
        self,
        body: Object,
        desired: Sequence[Object],
        state: ReconcileState,
        post_event: PostEvent,
    ) -> list[RagCacheError]:
        """Write every child that differs from the desired one. Return the errors of all writes."""
        uid = body["metadata"]["uid"]
        existing = self._children.list_for(owner_key(body))
        errors: list[RagCacheError] = []
        for action in plan_actions(desired, self._children.get, existing, uid):
            try:
                match action:
                    case CreateChild(obj):
                        await self._create(obj, uid)
                    case UpdateChild(obj):
                        await self._apply(obj)
                    case CorrectDrift():
                        await self._correct(action, state, post_event)
                    case ReplaceChild(obj):
                        await self._replace(obj, post_event)
                    case DeleteChild(obj):
                        await self.delete(obj)
                    case NameConflict(obj):
                        raise _name_conflict(obj)
            except RagCacheError as error:
                self._log_failure(body, error)
                errors.append(error)
        return errors

    async def grow_claims(
        self, body: Object, desired: Sequence[Object], state: ReconcileState
    ) -> tuple[list[RagCacheError], float | None]:
        """Raise the requests of claims that are smaller than the spec.

        A refusal is no error of the spec: the other children are written, and a condition reports
        it.

        Returns:
            The errors of calls that may succeed later, and the seconds until a refused claim is
            tried again; None without one.
        """
        errors: list[RagCacheError] = []
        growths = claim_growths(desired, self._children.list_for(owner_key(body), CLAIMS.kind))
        known, state.claim_refusals = state.claim_refusals, {}
        for growth in growths:
            refusal = known.get(growth.name)
            if refusal and refusal.size == growth.size and time.monotonic() < refusal.retry_s:
                state.claim_refusals[growth.name] = refusal
                continue
            try:
                await self._grow(growth)
            except ApiError as error:
                if not error.is_permanent:
                    errors.append(error)
                    continue
                self._log_failure(body, error)
                retry_s = time.monotonic() + CLAIM_RETRY_S
                refusal = ClaimRefusal(growth.size, error.message, retry_s)
                state.claim_refusals[growth.name] = refusal
        retries_s = [one.retry_s - time.monotonic() for one in state.claim_refusals.values()]
        return errors, max(0.0, min(retries_s)) if retries_s else None

    async def _grow(self, growth: ClaimGrowth) -> None:
        meta = growth.claim["metadata"]
        patch = {"spec": {"resources": {"requests": {"storage": growth.size}}}}
        response = await self._api.merge(CLAIMS, meta["name"], meta["namespace"], patch)
        if response is not None:
            self._children.record_write({**response, "kind": CLAIMS.kind})
        self._metrics.count_apply(CLAIMS.kind)

    async def _replace(self, obj: Object, post_event: PostEvent) -> None:
        """Delete a StatefulSet without its pods, unless it is already being deleted."""
        meta, live = obj["metadata"], self._children.get(obj)
        if live is None or "deletionTimestamp" in live["metadata"]:
            return
        message = f"StatefulSet {meta['name']} is replaced for volumes of another size; pods stay"
        post_event(ObjectEvent("Normal", "VolumesGrow", message))
        await self._api.delete(resource_of(obj), meta["name"], meta["namespace"], "Orphan")

    async def delete(self, obj: Object) -> None:
        """Delete a child, a volume claim or a pod, unless it is already being deleted."""
        meta = obj["metadata"]
        if "deletionTimestamp" in meta:
            return
        others = {resource.kind: resource for resource in (CLAIMS, PODS)}
        resource = others.get(obj["kind"]) or self._children.resource(obj)
        if not await self._api.delete(resource, meta["name"], meta["namespace"]):
            self._children.record_delete(obj)

    async def _create(self, obj: Object, uid: str) -> None:
        # Watches see only objects with our label, so another object may have this name.
        meta = obj["metadata"]
        found = await self._api.get(resource_of(obj), meta["name"], meta["namespace"])
        if found is not None and not is_owned(found, uid):
            raise _name_conflict(obj)
        await self._apply(obj)

    async def _apply(self, obj: Object) -> None:
        response = await self._api.apply(with_replicas(obj, self._children.get(obj)))
        self._children.record_write(response)
        self._metrics.count_apply(obj["kind"])

    async def _correct(
        self, action: CorrectDrift, state: ReconcileState, post_event: PostEvent
    ) -> None:
        """Undo a change by another client, with a back-off if the client repeats it."""
        obj, now_s = action.obj, time.monotonic()
        correction = state.corrections.setdefault(identity(obj), DriftCorrection())
        if now_s < correction.not_before_s:
            return
        if now_s > correction.not_before_s + CORRECTION_RESET_S:
            correction.count = 0
        live = self._children.get(obj)
        if action.added and live is not None:
            await self._remove_additions(obj, live)
        else:
            await self._apply(obj)
        correction.not_before_s = now_s + backoff_s(CORRECTION_BACKOFF_S, correction.count)
        correction.count += 1
        name = f"{obj['kind']} {obj['metadata']['name']}"
        if correction.count < len(CORRECTION_BACKOFF_S):
            message = f"{name}: another client changed {action.path}"
            post_event(ObjectEvent("Normal", "DriftCorrected", message))
        elif correction.count == len(CORRECTION_BACKOFF_S):
            message = f"{name}: another client changes {action.path} repeatedly; stop that client"
            post_event(ObjectEvent("Warning", "DriftPersists", message))

    async def _remove_additions(self, obj: Object, live: Object) -> None:
        meta = obj["metadata"]
        patch = removal_patch(obj, live)
        response = await self._api.merge(resource_of(obj), meta["name"], meta["namespace"], patch)
        if response is not None:
            self._children.record_write({**response, "kind": obj["kind"]})
        self._metrics.count_apply(obj["kind"])

    def _log_failure(self, body: Object, error: RagCacheError) -> None:
        namespace, name = owner_key(body)
        log.warning("child writer: write failed ragcache=%s/%s error=%s", namespace, name, error)


def _name_conflict(obj: Object) -> InvalidInput:
    name = f"{obj['kind']} {obj['metadata']['namespace']}/{obj['metadata']['name']}"
    return InvalidInput(
        "metadata.name",
        f"{name} exists and does not belong to this RagCache",
        "delete that object, or give the RagCache another name",
    )
